"""Products in chunks that travel round the ranks of an axis (`ir.rings`), as each rank runs them.

Of ``ways`` ranks, rank r sends to r + 1. Gathering: in step k it multiplies the chunk of rank r - k, and
passes it on meanwhile. Scattering: the sum for rank c begins at rank c + 1 and goes round; in step k, rank r
makes its share of the sum for rank r - 1 - k while that of the ranks before it arrives, and adds the two, in
the type of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from autoshard.ir.rings import together

#: of a tensor, and one like it to receive into: starts sending the first to the next rank and receiving from
#: the rank before; calling what it gives waits for both
Pass = Callable[[torch.Tensor, torch.Tensor], Callable[[], None]]


def all_gather_mm(
    xs: Sequence[torch.Tensor], dim: int, outer: int, ways: int, rank: int, pass_on: Pass
) -> list[torch.Tensor]:
    """x gathered along a dim, and its rows times every w. xs: (x, w, ...)."""
    own, weights = xs[0], xs[1:]
    blocks, depth = prod(own.shape[:dim]) * outer, own.shape[-1]
    chunk = own.reshape(blocks, -1, depth).contiguous()
    full = own.new_empty((blocks, ways, *chunk.shape[1:]))
    products = [own.new_empty((*full.shape[:3], w.shape[1])) for w in weights]
    full[:, rank] = chunk
    for step in range(ways):
        at = (rank - step) % ways
        arriving, arrived = chunk, None
        if step + 1 < ways:
            # of one block, chunks lie in memory where they stay
            arriving = full[:, at - 1] if blocks == 1 else torch.empty_like(chunk)
            arrived = pass_on(chunk, arriving)
        for new, weight in zip(products, weights, strict=True):
            _times(chunk, weight, new[:, at])
        if arrived is not None:
            arrived()
            if blocks > 1:
                full[:, at - 1] = arriving
        chunk = arriving
    shape = [n * ways if d == dim else n for d, n in enumerate(own.shape)]
    return [full.view(shape), *(new.view(-1, new.shape[3]) for new in products)]


def mm_reduce_scatter(
    xs: Sequence[torch.Tensor],
    dim: int,
    shape: Sequence[int],
    outer: int,
    ways: int,
    rank: int,
    pass_on: Pass,
) -> torch.Tensor:
    """This rank's part, of a shape, of the sum of all ``a @ w`` over the ranks. xs: (a, w, ...)."""
    blocks = prod(shape[:dim]) * outer
    rows = prod(shape[:-1]) // blocks
    lefts = [x.contiguous().view(blocks, ways, rows, x.shape[1]) for x in xs[::2]]
    pairs = list(zip(lefts, xs[1::2], strict=True))

    def share(index: int) -> torch.Tensor:
        """What this rank adds to the part of a rank."""
        total: torch.Tensor | None = None
        for left, right in pairs:
            product = right.new_empty((blocks, rows, right.shape[1]))
            _times(left[:, index], right, product)
            total = product if total is None else total.add_(product)
        assert total is not None
        return total

    total = share((rank - 1) % ways)
    for step in range(1, ways):
        buffer = torch.empty_like(total)
        arrived = pass_on(total, buffer)
        own = share((rank - 1 - step) % ways)
        arrived()
        total = own.add_(buffer)
    return total.view(*shape)


def _times(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Blocks of rows, wherever they lie, times one matrix, to where they stay."""
    if len(rows) == 1:
        torch.mm(rows[0], weight, out=out[0])
    elif together(len(rows), rows.shape[1]):
        out.copy_(torch.mm(rows.reshape(-1, rows.shape[2]), weight).view(out.shape))
    else:
        torch.bmm(rows, weight.expand(len(rows), -1, -1), out=out)
