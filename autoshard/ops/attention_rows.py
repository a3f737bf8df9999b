"""Attention of some rows of a sequence over all of its keys: what a rank runs of a divided sequence, and
any attention with a window or with documents.

The rows are one block of positions that follow each other, as where a sequence is worked on slice by slice,
or two of the same length: those that a zigzag leaves on a rank (`ir.placement`). Where it is causal, a block
attends to the keys before it without a mask and to its own causally; the two are joined by their log-sum-exp,
as FlashAttention joins its tiles (Dao 2022, section 3.1). So no mask of rows by keys is ever made, and keys
behind a block cost nothing. With a window, a block takes some rows at a time with the keys in their reach;
with documents, the rows of each document with its keys.

Tensors as in `ops.attention`: q [b, h, s, d], k [b, h, t, d], v [b, h, t, e], where k and v may be
of groups of heads; mask of keys [.., 1, t].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from autoshard.kernels.attention import Gradients
from autoshard.ops.attention import (
    by_triton,
    documents_of,
    fake,
    fake_backward,
    in_bshd,
    in_groups,
    in_groups_backward,
    repeated,
    zeros_like_all,
)
from autoshard.torch_adapters.op_library import define

#: rows that are taken at a time where they need a mask: those of a window, at least and at most so many
_FEWEST, _MOST = 256, 2048
_ALL = slice(None)


@dataclass(frozen=True)
class _Reach:
    """Which keys a row attends to by its position. window: 0 for all. causal: none behind its own."""

    window: int
    causal: bool

    def mask(self, rows: range, keys: slice, device: torch.device) -> torch.Tensor:
        """[rows, keys], True: attend."""
        behind = torch.arange(keys.start, keys.stop, device=device) - torch.arange(
            rows.start, rows.stop, device=device
        ).unsqueeze(1)
        if not self.window:
            return behind <= 0
        return (behind > -self.window) & (behind < (1 if self.causal else self.window))


@dataclass(frozen=True)
class _Tile:
    """rows: of the queries of some sequences of the batch. at: position of the first of them. keys: that they
    are given. causal: whether the kernel hides keys behind a row's own. reach: what a mask has to hide.
    numbers: whether the mask compares the documents of rows and keys."""

    batch: slice
    rows: slice
    at: int
    keys: slice
    causal: bool = False
    reach: _Reach | None = None
    numbers: bool = False

    def mask(self, keys: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
        """What is added to ``causal``: of some keys, or of rows by keys. keys: of all of the sequence."""
        positions = range(self.at, self.at + self.rows.stop - self.rows.start)
        part: torch.Tensor | None = None
        if keys is not None and self.numbers:
            own = keys[..., positions.start : positions.stop]
            part = own.transpose(-1, -2) == keys[..., self.keys]
        elif keys is not None and documents_of(keys) is None:
            part = keys[..., self.keys]
        if self.reach is None or not (self.reach.window or self.reach.causal):
            return part
        band = self.reach.mask(positions, self.keys, device)
        return band if part is None else band & part

    def empty(self, mask: torch.Tensor) -> torch.Tensor:
        """Rows that attend to nothing, of which kernels give any log-sum-exp."""
        return (mask.cumsum(-1) == 0).squeeze(-2) if self.causal else ~mask.any(-1)


@dataclass(frozen=True)
class _Block:
    """Rows from ``first``, the position of which is ``at``."""

    first: int
    at: int
    size: int

    def tiles(self, batch: slice, begin: int, end: int, reach: _Reach) -> Iterator[list[_Tile]]:
        """Its rows that are positions from ``begin`` to ``end``, with the keys between the two."""
        start, stop = max(begin, self.at), min(end, self.at + self.size)
        if start >= stop:
            return
        if not reach.window:
            rows = self._rows(start, stop)
            if not reach.causal:
                yield [_Tile(batch, rows, start, slice(begin, end))]
                return
            before = [_Tile(batch, rows, start, slice(begin, start))] if start > begin else []
            yield [*before, _Tile(batch, rows, start, slice(start, stop), causal=True)]
            return
        step = min(max(reach.window, _FEWEST), _MOST)
        for at in range(start, stop, step):
            last = min(at + step, stop)
            keys = slice(
                max(begin, at - reach.window + 1), last if reach.causal else min(end, last + reach.window - 1)
            )
            yield [_Tile(batch, self._rows(at, last), at, keys, reach=reach)]

    def compared(self, keys: int, reach: _Reach) -> Iterator[list[_Tile]]:
        """All of its rows, for a mask that compares the documents of rows and keys."""
        for at in range(self.at, self.at + self.size, _MOST):
            last = min(at + _MOST, self.at + self.size)
            seen = slice(0, last if reach.causal else keys)
            yield [_Tile(_ALL, self._rows(at, last), at, seen, reach=reach, numbers=True)]

    def _rows(self, begin: int, end: int) -> slice:
        return slice(self.first + begin - self.at, self.first + end - self.at)


def _tiles(
    rows: int, keys: int, start: int, zigzag: bool, mask: torch.Tensor | None, reach: _Reach
) -> Iterator[list[_Tile]]:
    """Tiles of the same rows, whose parts are to be joined. start: position of the first row; of a zigzag the
    second block lies as far from the end as the first from the beginning."""
    size = rows // 2 if zigzag else rows
    blocks = [_Block(0, start, size)]
    if zigzag:
        blocks.append(_Block(size, keys - start - size, size))
    documents = documents_of(mask)
    spans = [(_ALL, ((0, keys),))] if documents is None else _spans(documents)
    for block in blocks:
        if spans is None:
            yield from block.compared(keys, reach)
            continue
        for batch, each in spans:
            for begin, end in each:
                yield from block.tiles(batch, begin, end, reach)


def _spans(documents: torch.Tensor) -> list[tuple[slice, Sequence[tuple[int, int]]]] | None:
    """For sequences of the batch, (begin, end) of each document; None where one goes on after another.

    documents [b or 1, t]: the number of each position's.
    """
    change = documents[:, 1:].long() - documents[:, :-1].long()
    host = torch.cat((change.amin(-1, keepdim=True), change), -1).cpu() if change.numel() else None
    if host is not None and bool((host[:, 0] < 0).any()):
        return None
    spans: list[tuple[slice, Sequence[tuple[int, int]]]] = []
    for number in range(len(documents)):
        first = [] if host is None else (host[number, 1:].nonzero().flatten() + 1).tolist()
        edges = [0, *first, documents.shape[1]]
        batch = _ALL if len(documents) == 1 else slice(number, number + 1)
        spans.append((batch, tuple(pairwise(edges))))
    return spans


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
    causal: bool = True,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [b, h, s, e], log-sum-exp [b, h, s]) of rows that begin at position ``start`` of the sequence."""
    if by_triton(q, k, v, mask, window, softcap):
        told = start, zigzag, window, causal, softcap
        out, lse = torch.ops.autoshard.flash_rows(q, *repeated(q, k, v), _keys_of(mask), scale, *told)
        return in_bshd(out), lse
    new: list[tuple[_Tile, torch.Tensor, torch.Tensor]] = []
    for tiles in _tiles(q.shape[2], k.shape[2], start, zigzag, mask, _Reach(window, causal)):
        parts = []
        for tile in tiles:
            hidden = _of_batch(tile.mask(mask, q.device), tile.batch)
            out, lse = torch.ops.autoshard.sdpa(
                q[tile.batch, :, tile.rows],
                *(x[tile.batch, :, tile.keys] for x in (k, v)),
                *(hidden, tile.causal, scale, 0, softcap),
            )
            if hidden is not None and len(tiles) > 1:
                lse = lse.masked_fill(tile.empty(hidden), float("-inf"))
            parts.append((out, lse))
        new.append((tiles[0], *(_joined(*parts) if len(parts) > 1 else parts[0])))
    if len(new) == 1:
        return in_bshd(new[0][1]), new[0][2]
    outs, sums = fake(q, k, v, None, causal, scale)
    for tile, out, lse in new:
        outs[tile.batch, :, tile.rows] = out
        sums[tile.batch, :, tile.rows] = lse
    return outs, sums


def _keys_of(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask of keys as `kernels.attention` takes it, [b or 1, t]."""
    if mask is None:
        return None
    return mask.reshape(-1, mask.shape[-1]).to(torch.bool if mask.dtype == torch.bool else torch.int64)


def _of_batch(mask: torch.Tensor | None, batch: slice) -> torch.Tensor | None:
    """The mask of some sequences of the batch."""
    return mask if mask is None or mask.dim() < 4 or len(mask) == 1 else mask[batch]


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
    causal: bool = True,
    softcap: float = 0.0,
) -> Gradients:
    """Gradients of q, k, v of `sdpa_rows`; those of k and v are what these rows add to them."""
    if by_triton(q, k, v, mask, window, softcap):
        told = scale, start, zigzag, window, causal, softcap
        given = grad, q, *repeated(q, k, v), out, lse, _keys_of(mask), *told
        new = torch.ops.autoshard.flash_rows_backward(*given)
        return in_bshd(new[0]), in_bshd(new[1]), in_bshd(new[2])
    grad_q, grad_k, grad_v = zeros_like_all(q, k, v)
    for tiles in _tiles(q.shape[2], k.shape[2], start, zigzag, mask, _Reach(window, causal)):
        for tile in tiles:
            rows, keys = (tile.batch, _ALL, tile.rows), (tile.batch, _ALL, tile.keys)
            # with the log-sum-exp of all keys, a part of them gets exactly its share
            added = torch.ops.autoshard.sdpa_backward(
                *(grad[rows], q[rows], k[keys], v[keys], out[rows], lse[rows].contiguous()),
                *(_of_batch(tile.mask(mask, q.device), tile.batch), tile.causal, scale, 0, softcap),
            )
            grad_q[rows] += added[0]
            grad_k[keys] += added[1]
            grad_v[keys] += added[2]
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
    causal: bool = True,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    return fake(q, k, v, mask, causal, scale)


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
    causal: bool = True,
    softcap: float = 0.0,
) -> Gradients:
    return fake_backward(grad, q, k, v, out, lse, mask, causal, scale)


define(
    "sdpa_rows(Tensor q, Tensor k, Tensor v, float scale, int start, bool zigzag, Tensor? mask=None, "
    "int window=0, bool causal=True, float softcap=0.0) -> (Tensor, Tensor)",
    in_groups(sdpa_rows),
    in_groups(_fake_rows),
)
define(
    "sdpa_rows_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float scale, "
    "int start, bool zigzag, Tensor? mask=None, int window=0, bool causal=True, float softcap=0.0) "
    "-> (Tensor, Tensor, Tensor)",
    in_groups_backward(sdpa_rows_backward),
    in_groups_backward(_fake_rows_backward),
)
