"""Causal attention of some rows of a sequence over all of its keys: what a rank runs of a divided sequence,
and any attention with a window.

The rows are one block of positions that follow each other, as where a sequence is worked on slice by slice,
or two of the same length: those that a zigzag leaves on a rank (`ir.placement`). Every block attends to the
keys before it without a mask and to its own causally; the two are joined by their log-sum-exp, as
FlashAttention joins its tiles (Dao 2022, section 3.1). So no mask of rows by keys is ever made, and keys
behind a block cost nothing. With a window, a block takes some rows at a time with the keys in their reach.

Tensors as in `ops.attention`: q [b, h, s, d], k [b, h, t, d], v [b, h, t, e]; mask of keys [.., 1, t], True:
attend. window: so many keys up to its own position does a row attend to, 0 for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from autoshard.ops.attention import Gradients, fake, fake_backward, in_bshd
from autoshard.torch_adapters.op_library import define

#: rows that a window takes at a time: those of a window, at least so many and at most so many
_FEWEST, _MOST = 256, 2048


@dataclass(frozen=True)
class _Tile:
    """rows: of the queries. keys: that they attend to, up to that of the last row. causal: whether the kernel
    hides keys behind a row's own. window: as of the op, where a mask hides these and those out of reach."""

    rows: slice
    keys: slice
    causal: bool
    window: int = 0

    def mask(self, keys: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
        """What is added to ``causal``: of some keys, or of rows by keys where there is a window."""
        part = None if keys is None else keys[..., self.keys]
        if not self.window:
            return part
        behind = torch.arange(self.keys.stop, device=device)[self.keys] - torch.arange(
            self.keys.stop - (self.rows.stop - self.rows.start), self.keys.stop, device=device
        ).unsqueeze(1)
        band = (behind <= 0) & (behind > -self.window)
        return band if part is None else band & part

    def empty(self, mask: torch.Tensor) -> torch.Tensor:
        """Rows that attend to nothing, of which kernels give any log-sum-exp."""
        return (mask.cumsum(-1) == 0).squeeze(-2) if self.causal else ~mask.any(-1)


def _tiles(rows: int, keys: int, start: int, zigzag: bool, window: int) -> Iterator[list[_Tile]]:
    """Tiles of rows, in order, whose parts are to be joined. start: position of the first row; of a zigzag
    the second block lies as far from the end as the first from the beginning."""
    size = rows // 2 if zigzag else rows
    starts = (start, keys - start - size) if zigzag else (start,)
    for number, at in enumerate(starts):
        first = number * size
        if not window:
            block = slice(first, first + size)
            before = [_Tile(block, slice(0, at), False)] if at else []
            yield [*before, _Tile(block, slice(at, at + size), True)]
            continue
        step = min(max(window, _FEWEST), _MOST)
        for begin in range(0, size, step):
            end = min(begin + step, size)
            reach = slice(max(0, at + begin - window + 1), at + end)
            yield [_Tile(slice(first + begin, first + end), reach, False, window)]


def _joined(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the keys of both parts, each (out [b, h, s, e], log-sum-exp [b, h, s])."""
    lse = torch.logaddexp(first[1], second[1])
    finite = torch.where(lse == float("-inf"), 0.0, lse)
    shares = [torch.exp(part[1] - finite).unsqueeze(-1) for part in (first, second)]
    return (first[0] * shares[0] + second[0] * shares[1]).to(first[0].dtype), finite


def sdpa_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    start: int,
    zigzag: bool,
    mask: torch.Tensor | None = None,
    window: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [b, h, s, e], log-sum-exp [b, h, s]) of rows that begin at position ``start`` of the sequence."""
    outs, sums = [], []
    for tiles in _tiles(q.shape[2], k.shape[2], start, zigzag, window):
        parts = []
        for tile in tiles:
            hidden = tile.mask(mask, q.device)
            out, lse = torch.ops.autoshard.sdpa(
                *(q[:, :, tile.rows], k[:, :, tile.keys], v[:, :, tile.keys]), hidden, tile.causal, scale
            )
            if hidden is not None and len(tiles) > 1:
                lse = lse.masked_fill(tile.empty(hidden), float("-inf"))
            parts.append((out, lse))
        out, lse = _joined(*parts) if len(parts) > 1 else parts[0]
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
    mask: torch.Tensor | None = None,
    window: int = 0,
) -> Gradients:
    """Gradients of q, k, v of `sdpa_rows`; those of k and v are what these rows add to them."""
    grad_q, grad_k, grad_v = fake_backward(grad, q, k, v, out, lse, None, True, scale)
    for gradient in (grad_q, grad_k, grad_v):
        gradient.zero_()
    for tiles in _tiles(q.shape[2], k.shape[2], start, zigzag, window):
        for tile in tiles:
            rows, keys = tile.rows, tile.keys
            # with the log-sum-exp of all keys, a part of them gets exactly its share
            added = torch.ops.autoshard.sdpa_backward(
                *(grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys]),
                *(out[:, :, rows], lse[:, :, rows].contiguous()),
                *(tile.mask(mask, q.device), tile.causal, scale),
            )
            grad_q[:, :, rows] += added[0]
            grad_k[:, :, keys] += added[1]
            grad_v[:, :, keys] += added[2]
    return grad_q, grad_k, grad_v


def _fake_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    start: int,
    zigzag: bool,
    mask: torch.Tensor | None = None,
    window: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    return fake(q, k, v, mask, True, scale)


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
    mask: torch.Tensor | None = None,
    window: int = 0,
) -> Gradients:
    return fake_backward(grad, q, k, v, out, lse, mask, True, scale)


define(
    "sdpa_rows(Tensor q, Tensor k, Tensor v, float scale, int start, bool zigzag, Tensor? mask=None, "
    "int window=0) -> (Tensor, Tensor)",
    sdpa_rows,
    _fake_rows,
)
define(
    "sdpa_rows_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float scale, "
    "int start, bool zigzag, Tensor? mask=None, int window=0) -> (Tensor, Tensor, Tensor)",
    sdpa_rows_backward,
    _fake_rows_backward,
)
