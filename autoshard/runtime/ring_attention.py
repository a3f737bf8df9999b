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

Tensors as in `ops.attention`, of the part of a sequence that a rank has; the mask of keys is of the full one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from autoshard.kernels.attention import Gradients
from autoshard.ops.attention import in_bshd

#: of a tensor, one like it to receive into, the rank that it goes to and the one that sends: starts both;
#: calling what it gives waits for both
Pass = Callable[[torch.Tensor, torch.Tensor, int, int], Callable[[], None]]


@dataclass(frozen=True)
class _Part:
    """What a rank computes in a step. rows: of its queries. keys: of those that it has at the moment. causal:
    whether a row attends to the keys up to its own alone. mask: of the keys."""

    rows: slice
    keys: slice
    causal: bool
    mask: torch.Tensor | None

    def unseen(self) -> torch.Tensor | None:
        """Rows that attend to none of the keys, of which kernels give any log-sum-exp."""
        if self.mask is None:
            return None
        return (self.mask.cumsum(-1) == 0).squeeze(-2) if self.causal else ~self.mask.any(-1)


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
        for visit in self._visits((k, v)):
            part = self._part(visit.source, k.shape[-2], mask, causal)
            taken = (x[..., part.keys, :] for x in visit.keys)
            rest = part.mask, part.causal, scale, 0, softcap
            out, lse = torch.ops.autoshard.sdpa(q[:, :, part.rows], *taken, *rest)
            unseen = part.unseen()
            if unseen is not None:
                lse = lse.masked_fill(unseen, float("-inf"))
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
        for visit in self._visits((k, v)):
            part = self._part(visit.source, k.shape[-2], mask, causal)
            rows, at = (slice(None), slice(None), part.rows), (..., part.keys, slice(None))
            # with the log-sum-exp of all keys, a part of them gets exactly its share
            given = grad[rows], q[rows], *(x[at] for x in visit.keys), out[rows], lse[rows].contiguous()
            rest = part.mask, part.causal, scale, 0, softcap
            added = torch.ops.autoshard.sdpa_backward(*given, *rest)
            grad_q[rows] += added[0]
            if visit.first:
                if near is not None:  # the round before has come home meanwhile
                    far = self._to_next_node(near, far)
                sums: Sequence[torch.Tensor] = [torch.zeros_like(x) for x in visit.keys]
            else:
                assert near is not None
                near.arrived()
                sums = near.tensors
            for total, more in zip(sums, added[1:], strict=True):
                total[at] += more
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

    def _part(self, source: int, size: int, mask: torch.Tensor | None, causal: bool) -> _Part:
        """What is computed with the keys of a rank. size: how many these are."""
        half = size // 2
        every = slice(0, size)
        if not causal:
            return _Part(every, every, False, _of_keys(mask, ((source * size, size),)))
        blocks = (source * half, half), ((2 * self.ways - 1 - source) * half, half)
        if source == self.rank:  # in the order of positions
            return _Part(every, every, True, _of_keys(mask, blocks))
        if source < self.rank:
            return _Part(every, slice(0, half), False, _of_keys(mask, blocks[:1]))
        return _Part(slice(half, size), every, False, _of_keys(mask, blocks))


def _nothing() -> None:
    """Waits for nothing."""


def _of_keys(mask: torch.Tensor | None, blocks: Sequence[tuple[int, int]]) -> torch.Tensor | None:
    """The mask of some blocks of keys, (first, how many) of each."""
    if mask is None or mask.shape[-1] == 1:
        return mask
    return torch.cat([mask.narrow(-1, first, count) for first, count in blocks], -1)


def join(total: torch.Tensor, sums: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Adds attention over other keys to what rows have, in place."""
    new = torch.logaddexp(sums, lse)
    share = torch.exp(lse - new.masked_fill(new == float("-inf"), 0.0))
    total.lerp_(out.to(total.dtype), share.unsqueeze(-1))
    sums.copy_(new)
