"""Attention of a rank's rows while the keys and values of all ranks of an axis go round it.

Rank r sends what it has to r + 1 while it computes with it; after step k it has what rank r - k began with.
Parts of the result are joined by their log-sum-exp (Liu et al., "Ring attention with blockwise transformers",
2023). Over several nodes there are two rings, so that every network card has its share to carry: what a node
has goes round inside it, and meanwhile each rank sends what it began this round with to the rank in its place
of the next node (Gu et al., "LoongTrain", 2024, section 4.3).

Causal rows lie in a zigzag (`ir.placement`), so that in every step each rank has as many pairs of a row and a
key as any other: of its own keys those before a row; of a rank before it the first half, for all rows; of one
behind it all, for the second half of its rows. In backward the gradients of keys and values go round with
them, and home in the end.

Of documents, all keys go round, and rows compute with those of their own (`runtime.key_masks`).

Tensors as in `ops.attention`, of the part of a sequence that a rank has; the mask of keys is of the full one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from autoshard.kernels.attention import Gradients
from autoshard.ops.attention import documents_of, in_bshd
from autoshard.runtime.key_masks import KeyMask, moved, without_unseen

#: of a tensor, one like it to receive into, the rank that it goes to and the one that sends: starts both;
#: calling what it gives waits for both
Pass = Callable[[torch.Tensor, torch.Tensor, int, int], Callable[[], None]]


@dataclass(frozen=True)
class _Part:
    """What a rank computes in a step. rows: of its queries. keys: of those that it has at the moment. causal:
    whether a row attends to the keys up to its own alone. mask: of the keys, or of rows by keys."""

    rows: slice
    keys: slice
    causal: bool
    mask: torch.Tensor | None

    def seen(self, lse: torch.Tensor) -> torch.Tensor:
        """The log-sum-exp, also of rows that attend to none of the keys, of which kernels give any."""
        if documents_of(self.mask) is not None:  # in its document, a row attends to its own key
            return lse
        if self.mask is None or not self.causal:
            return without_unseen(lse, self.mask)
        return lse.masked_fill((self.mask.cumsum(-1) == 0).squeeze(-2), float("-inf"))


@dataclass(frozen=True)
class _Visit:
    """Keys and values that a rank has for a step. source: the rank whose they are. first: whether they begin
    their round inside the node."""

    source: int
    keys: Sequence[torch.Tensor]
    first: bool


@dataclass(frozen=True)
class _Sent:
    """Tensors on their way. arrived: waits for them."""

    tensors: Sequence[torch.Tensor]
    arrived: Callable[[], None]


@dataclass(frozen=True)
class RingAttention:
    """The ring of an axis. inside: how many ranks that follow each other are in a node. pass_on: sends a
    tensor to a rank and receives one like it from another (`runtime.transport.transport.Transport`)."""

    ways: int
    rank: int
    inside: int
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [b, h, s, e], log-sum-exp [b, h, s]) of the rank's rows over all keys."""
        total: torch.Tensor | None = None
        sums: torch.Tensor | None = None
        hidden = KeyMask.of(mask)
        for visit in self._visits((k, v)):
            for part in self._parts(visit.source, k, hidden, causal):
                taken = (x[..., part.keys, :] for x in visit.keys)
                rest = part.mask, part.causal, scale, 0, softcap
                out, lse = torch.ops.autoshard.sdpa(q[:, :, part.rows], *taken, *rest)
                lse = part.seen(lse)
                if total is None or sums is None:  # the rank's own keys, for all of its rows
                    total, sums = out.to(lse.dtype), lse
                else:
                    join(total[:, :, part.rows], sums[:, :, part.rows], out, lse)
        assert total is not None and sums is not None
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
    ) -> Gradients:
        """Gradients of q, k and v: of the rank's keys what all ranks add to them."""
        grad_q = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        near: _Sent | None = None  # sums of this node
        far: _Sent | None = None  # of all nodes so far
        hidden = KeyMask.of(mask)
        for visit in self._visits((k, v)):
            added: list[_Added] = []
            for part in self._parts(visit.source, k, hidden, causal):
                rows, at = (slice(None), slice(None), part.rows), (..., part.keys, slice(None))
                # with the log-sum-exp of all keys, a part of them gets exactly its share
                given = grad[rows], q[rows], *(x[at] for x in visit.keys), out[rows], lse[rows].contiguous()
                rest = part.mask, part.causal, scale, 0, softcap
                new = torch.ops.autoshard.sdpa_backward(*given, *rest)
                grad_q[rows] += new[0]
                added = _together(visit.keys, added, _Added(part.keys, new[1:]))
            if visit.first:
                if near is not None:  # the round before has come home meanwhile
                    far = self._to_next_node(near, far)
                sums: Sequence[torch.Tensor] = [torch.zeros_like(x) for x in visit.keys]
            else:
                assert near is not None
                near.arrived()
                sums = near.tensors
            for each in added:
                each.to(sums)
            near = self._send(sums, self._inside) if self.inside > 1 else _Sent(sums, _nothing)
        assert near is not None
        last = self._to_next_node(near, far)
        last.arrived()
        return grad_q.to(q.dtype), last.tensors[0], last.tensors[1]

    def _to_next_node(self, near: _Sent, far: _Sent | None) -> _Sent:
        """The sums of a node, once they are back where they began, with those of the nodes before."""
        near.arrived()
        if far is not None:
            far.arrived()
            for total, more in zip(near.tensors, far.tensors, strict=True):
                total += more
        if self.inside == self.ways:
            return _Sent(near.tensors, _nothing)
        return self._send(near.tensors, self._across)

    def _visits(self, keys: Sequence[torch.Tensor]) -> Iterator[_Visit]:
        """What the rank has, step by step, while it goes on to others."""
        nodes, node, place = self.ways // self.inside, *divmod(self.rank, self.inside)
        base = [x.contiguous() for x in keys]
        for turn in range(nodes):
            far = self._send(base, self._across) if turn + 1 < nodes else None
            at: Sequence[torch.Tensor] = base
            for step in range(self.inside):
                last = step + 1 == self.inside
                near = None if last else self._send(at, self._inside)
                source = (node - turn) % nodes * self.inside + (place - step) % self.inside
                yield _Visit(source, at, not step)
                if near is not None:
                    near.arrived()
                    at = near.tensors
            if far is not None:
                far.arrived()
                base = list(far.tensors)

    @property
    def _inside(self) -> tuple[int, int]:
        """The next rank of the node, and the one before."""
        first = self.rank - self.rank % self.inside
        place = self.rank - first
        return first + (place + 1) % self.inside, first + (place - 1) % self.inside

    @property
    def _across(self) -> tuple[int, int]:
        """The ranks in this rank's place of the next node and of the one before."""
        return (self.rank + self.inside) % self.ways, (self.rank - self.inside) % self.ways

    def _send(self, sent: Sequence[torch.Tensor], peers: tuple[int, int]) -> _Sent:
        coming = [torch.empty_like(x) for x in sent]
        pending = [self.pass_on(x, y, *peers) for x, y in zip(sent, coming, strict=True)]

        def arrived() -> None:
            for each, _ in zip(pending, sent, strict=True):  # what is sent is held until then
                each()

        return _Sent(coming, arrived)

    def _parts(self, source: int, keys: torch.Tensor, hidden: KeyMask, causal: bool) -> Iterator[_Part]:
        """What is computed with the keys of a rank. keys: as many."""
        size = keys.shape[-2]
        if source == self.rank or hidden.documents is None:
            yield self._part(source, size, hidden, causal)
            return
        blocks = enumerate(self._blocks(self.rank, size, causal))
        for (n, rows), (m, others) in product(blocks, enumerate(self._blocks(source, size, causal))):
            if causal and others.start > rows.start:
                continue
            for tile in hidden.tiles(rows, others, keys.device):
                own, theirs = n * len(rows) - rows.start, m * len(rows) - others.start
                yield _Part(moved(tile.rows, own), moved(tile.keys, theirs), False, tile.mask)

    def _part(self, source: int, size: int, hidden: KeyMask, causal: bool) -> _Part:
        """The same in one, of the keys of the rank itself or without documents. size: how many these are."""
        half = size // 2
        every = slice(0, size)
        blocks = self._blocks(source, size, causal)
        if not causal or source == self.rank:  # in the order of positions
            return _Part(every, every, causal, hidden.of_blocks(*blocks))
        if source < self.rank:
            return _Part(every, slice(0, half), False, hidden.of_blocks(blocks[0]))
        return _Part(slice(half, size), every, False, hidden.of_blocks(*blocks))

    def _blocks(self, rank: int, size: int, causal: bool) -> tuple[range, ...]:
        """Positions of a rank: those of its two blocks of a zigzag if causal. size: how many these are."""
        if not causal:
            return (range(rank * size, (rank + 1) * size),)
        half, last = size // 2, 2 * self.ways - 1 - rank
        return range(rank * half, (rank + 1) * half), range(last * half, (last + 1) * half)


@dataclass(frozen=True)
class _Added:
    """What is added to gradients of some keys, and of their values."""

    keys: slice
    more: Sequence[torch.Tensor]

    def to(self, sums: Sequence[torch.Tensor]) -> None:
        for total, more in zip(sums, self.more, strict=True):
            total[..., self.keys, :] += more


def _together(keys: Sequence[torch.Tensor], before: list[_Added], new: _Added) -> list[_Added]:
    """As one in fp32 if there are several. keys: all of them."""
    if not before:
        return [new]
    every, wide = slice(0, keys[0].shape[-2]), torch.promote_types(keys[0].dtype, torch.float32)
    if before[0].keys != every or before[0].more[0].dtype != wide:
        sums = _Added(every, [torch.zeros_like(x, dtype=wide) for x in keys])
        before[0].to(sums.more)
        before = [sums]
    new.to(before[0].more)
    return before


def _nothing() -> None:
    """Waits for nothing."""


def join(total: torch.Tensor, sums: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Adds attention over other keys to what rows have, in place."""
    new = torch.logaddexp(sums, lse)
    share = torch.exp(lse - new.masked_fill(new == float("-inf"), 0.0))
    total.lerp_(out.to(total.dtype), share.unsqueeze(-1))
    sums.copy_(new)
