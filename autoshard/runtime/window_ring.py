"""Attention of a rank's rows with a window, while keys and values go to the ranks with rows in their reach.

Keys of a block of positions go on to the rank with the next block, and from there to the one behind it, as
often as the window reaches (`ir.window_hops`); without causal order also the other way. Each hop is under way
while the rank computes with what it has, parts are joined by their log-sum-exp as in `ring_attention`, and
only keys still in reach go on. Blocks are one per rank in the order of the ranks, or the two of a zigzag
(`ir.placement`): those in the second half then go from rank to rank the other way round, and between the
halves stay on the last rank.

In backward the keys come first. Their gradients go home the same way from the furthest block on, each rank
adding its own to what comes, so that every hop is as long as one of the keys.

Every rank sends and gets in each hop, also those at an end of the sequence, where that is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from autoshard.ir.window_hops import WindowHops
from autoshard.kernels.attention import Gradients
from autoshard.ops.attention import documents_of, in_bshd
from autoshard.runtime.key_masks import KeyMask, moved, without_unseen
from autoshard.runtime.ring_attention import Pass, join

#: tensors of each of a rank's blocks
Blocks = list[list[torch.Tensor]]


@dataclass(frozen=True)
class _Part:
    """What a rank computes at a time with keys that came. side: from where. block: of the rank's, which has
    the rows. rows: of the rank. keys: of those that came. mask: see `KeyTile`."""

    side: int
    block: int
    rows: slice
    keys: slice
    mask: torch.Tensor | None


@dataclass(frozen=True)
class WindowRing:
    """The ranks of an axis. hops: how often keys go on. pass_on: sends a tensor to a rank and receives one
    like it from another (`runtime.transport.transport.Transport`)."""

    ways: int
    rank: int
    zigzag: bool
    hops: int
    pass_on: Pass

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float,
        softcap: float,
        window: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [b, h, s, e], log-sum-exp [b, h, s]) of the rank's rows over the keys in their reach."""
        way, hidden = self._way(q, causal, window), KeyMask.of(mask, window)
        wide = torch.promote_types(q.dtype, torch.float32)
        total = q.new_empty((*q.shape[:3], v.shape[-1]), dtype=wide)
        sums = q.new_empty(q.shape[:3], dtype=wide)
        for hop, came in enumerate(self._visits((k, v), way)):
            if not hop:
                for block, keys in enumerate(came[1]):
                    rows, own = self._rows(block, way), hidden.of_blocks(self._positions(block, way))
                    told = own, causal, scale, window, softcap
                    out, lse = torch.ops.autoshard.sdpa(q[:, :, rows], *keys, *told)
                    total[:, :, rows], sums[:, :, rows] = out, _in_reach(lse, own, way)
                continue
            for part in self._parts(hop, hidden, way, q.device):
                taken = (x[..., part.keys, :] for x in came[part.side][part.block])
                rest = part.mask, False, scale, 0, softcap
                out, lse = torch.ops.autoshard.sdpa(q[:, :, part.rows], *taken, *rest)
                seen = without_unseen(lse, part.mask)
                join(total[:, :, part.rows], sums[:, :, part.rows], out, seen)
        return in_bshd(total.to(q.dtype)), sums.masked_fill_(sums == float("-inf"), 0.0)

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float,
        softcap: float,
        window: int,
    ) -> Gradients:
        """Gradients of q, k and v: of the rank's keys what all ranks add to them."""
        way, hidden = self._way(q, causal, window), KeyMask.of(mask, window)
        wide = torch.promote_types(q.dtype, torch.float32)
        totals = [torch.zeros_like(x, dtype=wide) for x in (q, k, v)]
        held: list[Mapping[int, Blocks]] = []

        # with the log-sum-exp of all keys, a part of them gets exactly its share
        def gradients(rows: slice, keys: Sequence[torch.Tensor], *rest: object) -> Gradients:
            given = grad[:, :, rows], q[:, :, rows], *keys, out[:, :, rows], lse[:, :, rows].contiguous()
            result: Gradients = torch.ops.autoshard.sdpa_backward(*given, *rest)
            totals[0][:, :, rows] += result[0]
            return result

        for hop, came in enumerate(self._visits((k, v), way)):
            held.append(came)
            for block, keys in enumerate(came[1] if not hop else ()):
                rows = self._rows(block, way)
                own = hidden.of_blocks(self._positions(block, way))
                told = own, causal, scale, window, softcap
                for total, more in zip(totals[1:], gradients(rows, keys, *told)[1:], strict=True):
                    total[..., rows, :] += more
        coming: Mapping[int, Callable[[], Blocks]] = {}
        for hop in range(self.hops, 0, -1):
            sums = {
                side: [[torch.zeros_like(x, dtype=wide) for x in keys] for keys in blocks]
                for side, blocks in held[hop].items()
            }
            for part in self._parts(hop, hidden, way, q.device):
                at = (..., part.keys, slice(None))
                taken = [x[at] for x in held[hop][part.side][part.block]]
                added = gradients(part.rows, taken, part.mask, False, scale, 0, softcap)[1:]
                for total, more in zip(sums[part.side][part.block], added, strict=True):
                    total[at] += more
            self._add(sums, coming, way)
            coming = {
                side: self._send([[x.to(k.dtype) for x in each] for each in blocks], -side)
                for side, blocks in sums.items()
            }
        home = [[x[..., self._rows(n, way), :] for x in totals[1:]] for n in range(1 + self.zigzag)]
        self._add(dict.fromkeys(way.sides, home), coming, way)
        new = (total.to(x.dtype) for total, x in zip(totals, (q, k, v), strict=True))
        return next(new), next(new), next(new)

    def _way(self, q: torch.Tensor, causal: bool, window: int) -> WindowHops:
        positions = q.shape[2] * self.ways
        return WindowHops.over(positions, self.ways, window, causal=causal, zigzag=self.zigzag)

    def _visits(self, keys: Sequence[torch.Tensor], way: WindowHops) -> Iterator[Mapping[int, Blocks]]:
        """What the rank has from each side, its own first, while it goes on to others."""
        own = [[x[..., self._rows(block, way), :] for x in keys] for block in range(1 + self.zigzag)]
        at: Mapping[int, Blocks] = dict.fromkeys(way.sides, own)
        for hop in range(1, self.hops + 1):
            coming = {
                side: self._send([[_end(x, side, way.moved(hop)) for x in b] for b in blocks], side)
                for side, blocks in at.items()
            }
            yield at
            at = {side: arrived() for side, arrived in coming.items()}
        yield at

    def _send(self, blocks: Sequence[Sequence[torch.Tensor]], side: int) -> Callable[[], Blocks]:
        """To whom the next block on a side is, from whom the one before is; waits for it when called."""
        sent = [[x.contiguous() for x in tensors] for tensors in blocks]
        coming = [[torch.empty_like(x) for x in tensors] for tensors in sent]
        pending = [
            self.pass_on(x, y, (self.rank + step) % self.ways, (self.rank - step) % self.ways)
            for step, *pairs in zip((side, -side), sent, coming, strict=False)
            for x, y in zip(*pairs, strict=True)
        ]

        def arrived() -> Blocks:
            for each in pending:
                each()
            if self.zigzag and self.rank == self.ways - 1:  # its blocks lie one behind the other
                coming[side > 0] = sent[side < 0]
            return coming

        return arrived

    def _add(
        self, sums: Mapping[int, Blocks], coming: Mapping[int, Callable[[], Blocks]], way: WindowHops
    ) -> None:
        """Adds to gradients of keys what comes of those further on, if there are any."""
        for side, arrived in coming.items():
            for block, tensors in enumerate(arrived()):
                if 0 <= self._number(block) + side < way.blocks:
                    for total, more in zip(sums[side][block], tensors, strict=True):
                        _end(total, side, more.shape[-2]).add_(more)

    def _number(self, block: int) -> int:
        """The place in the sequence of one of the rank's blocks."""
        return 2 * self.ways - 1 - self.rank if block else self.rank

    def _rows(self, block: int, way: WindowHops) -> slice:
        return slice(block * way.size, (block + 1) * way.size)

    def _positions(self, block: int, way: WindowHops) -> range:
        first = self._number(block) * way.size
        return range(first, first + way.size)

    def _parts(self, hop: int, hidden: KeyMask, way: WindowHops, device: torch.device) -> Iterator[_Part]:
        """What is computed after a hop: with the keys the rows in reach of them."""
        count = way.moved(hop)
        for side, block in product(way.sides, range(1 + self.zigzag)):
            number = self._number(block)
            if not 0 <= number - side * hop < way.blocks:
                continue
            # the rows next to the keys, and of these the ones next to the rows
            inner, outer = (0, way.size - count) if side > 0 else (way.size - count, 0)
            at, first = number * way.size + inner, (number - side * hop) * way.size + outer
            for tile in hidden.tiles(range(at, at + count), range(first, first + count), device):
                rows = moved(tile.rows, (block - number) * way.size)
                yield _Part(side, block, rows, moved(tile.keys, -first), tile.mask)


def _in_reach(lse: torch.Tensor, mask: torch.Tensor | None, way: WindowHops) -> torch.Tensor:
    """The log-sum-exp of a block's rows with its own keys, also of rows that attend to none of these."""
    if mask is None or documents_of(mask) is not None:  # in its document, a row attends to its own key
        return lse
    rows = torch.arange(way.size, device=mask.device)
    begin, end = (rows - way.window + 1).clamp(min=0), (rows + (1 if way.causal else way.window))
    count = torch.nn.functional.pad(mask.expand(*mask.shape[:-1], way.size).cumsum(-1), (1, 0))
    none = count[..., end.clamp(max=way.size)] == count[..., begin]
    return lse.masked_fill(none.squeeze(-2), float("-inf"))


def _end(x: torch.Tensor, side: int, count: int) -> torch.Tensor:
    """The positions next to the block on a side."""
    return x[..., x.shape[-2] - count :, :] if side > 0 else x[..., :count, :]
