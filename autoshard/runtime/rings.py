"""Products in chunks that travel round the ranks of an axis (`ir.rings`), as each rank runs them.

Of ``ways`` ranks, rank r sends to r + 1. Gathering: in step k it multiplies the chunk of rank r - k, and
passes it on meanwhile. Scattering: the sum for rank c begins at rank c + 1 and goes round; in step k, rank r
makes its share of the sum for rank r - 1 - k while that of the ranks before it arrives, and adds the two, in
the type of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autoshard.runtime.parts import join_parts, take_part

#: of a tensor, and one like it to receive into: starts sending the first to the next rank and receiving from
#: the rank before; calling what it gives waits for both
Pass = Callable[[torch.Tensor, torch.Tensor], Callable[[], None]]


def all_gather_mm(
    xs: Sequence[torch.Tensor], dim: int, outer: int, ways: int, rank: int, pass_on: Pass
) -> list[torch.Tensor]:
    """x gathered along a dim, and its rows times every w. xs: (x, w, ...)."""
    own, weights = xs[0].contiguous(), xs[1:]
    chunks = own.new_empty((ways, *own.shape))
    chunks[rank].copy_(own)
    rows = own[..., 0].numel()
    products = [own.new_empty((ways, rows, w.shape[1])) for w in weights]
    for step in range(ways):
        at, last = (rank - step) % ways, step + 1 == ways
        arrived = None if last else pass_on(chunks[at], chunks[at - 1])
        for made, weight in zip(products, weights, strict=True):
            torch.mm(chunks[at].view(rows, -1), weight, out=made[at])
        if arrived is not None:
            arrived()
    whole = _joined(chunks, own.shape, dim, outer)
    return [whole, *(_joined(p, (*own.shape[:-1], p.shape[2]), dim, outer).flatten(0, -2) for p in products)]


def _joined(parts: torch.Tensor, shape: Sequence[int], dim: int, outer: int) -> torch.Tensor:
    """The whole of the parts of all ranks, each of a shape; a view where they lie in memory one after the
    other, as there."""
    if outer == 1 and all(n == 1 for n in shape[:dim]):
        return parts.view(*shape[:dim], parts.shape[0] * shape[dim], *shape[dim + 1 :])
    return join_parts([part.view(*shape) for part in parts], dim, outer)


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
    pairs = list(zip(xs[::2], xs[1::2], strict=True))
    lead = [n * ways if d == dim else n for d, n in enumerate(shape[:-1])]

    def share(index: int) -> torch.Tensor:
        """What this rank adds to the part of a rank."""
        total: torch.Tensor | None = None
        for left, right in pairs:
            cut = take_part(left.reshape(*lead, left.shape[1]), dim, ways, index, outer)
            product = torch.mm(cut.reshape(-1, left.shape[1]), right)
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
