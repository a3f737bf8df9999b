"""Causal attention of some rows of a sequence over all of its keys: what a rank runs of a divided sequence.

The rows are one block of positions that follow each other, as where a sequence is worked on slice by slice,
or two of the same length: those that a zigzag leaves on a rank (`ir.placement`). Every block attends to the
keys before it without a mask and to its own causally; the two are joined by their log-sum-exp, as
FlashAttention joins its tiles (Dao 2022, section 3.1). So no mask of rows by keys is ever made, and keys
behind a block cost nothing.

Tensors as in `ops.attention`: q [b, h, s, d], k [b, h, t, d], v [b, h, t, e].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autoshard.ops.attention import Gradients, fake, fake_backward, in_bshd
from autoshard.torch_adapters.op_library import define

#: (rows of the queries, their keys, whether a row attends to no keys behind it)
_Tile = tuple[slice, slice, bool]


def _tiles(rows: int, keys: int, start: int, zigzag: bool) -> Iterator[list[_Tile]]:
    """Per block of rows its tiles. start: position of the first row; of a zigzag the second block lies as far
    from the end as the first from the beginning."""
    size = rows // 2 if zigzag else rows
    starts = (start, keys - start - size) if zigzag else (start,)
    for number, at in enumerate(starts):
        block = slice(number * size, (number + 1) * size)
        before = [(block, slice(0, at), False)] if at else []
        yield [*before, (block, slice(at, at + size), True)]


def merged(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the keys of both parts, each (out [b, h, s, e], log-sum-exp [b, h, s])."""
    lse = torch.logaddexp(first[1], second[1])
    finite = torch.where(lse == float("-inf"), 0.0, lse)
    shares = [torch.exp(part[1] - finite).unsqueeze(-1) for part in (first, second)]
    return (first[0] * shares[0] + second[0] * shares[1]).to(first[0].dtype), lse


def sdpa_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, start: int, zigzag: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [b, h, s, e], log-sum-exp [b, h, s]) of rows that begin at position ``start`` of the sequence."""
    outs, sums = [], []
    for tiles in _tiles(q.shape[2], k.shape[2], start, zigzag):
        parts = [
            torch.ops.autoshard.sdpa(q[:, :, rows], k[:, :, keys], v[:, :, keys], None, causal, scale)
            for rows, keys, causal in tiles
        ]
        out, lse = merged(*parts) if len(parts) > 1 else parts[0]
        outs.append(out)
        sums.append(lse)
    if len(outs) == 1:
        return in_bshd(outs[0]), sums[0]
    return in_bshd(torch.cat(outs, 2)), torch.cat(sums, 2)


def sdpa_rows_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    start: int,
    zigzag: bool,
) -> Gradients:
    """Gradients of q, k, v of `sdpa_rows`; those of k and v are what these rows add to them."""
    grad_q, grad_k, grad_v = fake_backward(grad, q, k, v, out, lse, None, True, scale)
    for gradient in (grad_q, grad_k, grad_v):
        gradient.zero_()
    for tiles in _tiles(q.shape[2], k.shape[2], start, zigzag):
        for rows, keys, causal in tiles:
            # with the log-sum-exp of all keys, a part of them gets exactly its share
            added = torch.ops.autoshard.sdpa_backward(
                *(grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys]),
                *(out[:, :, rows], lse[:, :, rows].contiguous(), None, causal, scale),
            )
            grad_q[:, :, rows] += added[0]
            grad_k[:, :, keys] += added[1]
            grad_v[:, :, keys] += added[2]
    return grad_q, grad_k, grad_v


def _fake_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, start: int, zigzag: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return fake(q, k, v, None, True, scale)


def _fake_rows_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    start: int,
    zigzag: bool,
) -> Gradients:
    return fake_backward(grad, q, k, v, out, lse, None, True, scale)


define(
    "sdpa_rows(Tensor q, Tensor k, Tensor v, float scale, int start, bool zigzag) -> (Tensor, Tensor)",
    sdpa_rows,
    _fake_rows,
)
define(
    "sdpa_rows_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float scale, "
    "int start, bool zigzag) -> (Tensor, Tensor, Tensor)",
    sdpa_rows_backward,
    _fake_rows_backward,
)
