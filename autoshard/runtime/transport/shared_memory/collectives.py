"""Collectives between processes of one machine, through memory that they share
(`runtime.transport.shared_memory.peers`).

Ranks on CPUs share cores, and gloo has each byte copied into the kernel and out of it again, once in every
turn of its rings. Here each rank lays its message down once, and the others compute with it where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch

from autoshard.runtime.pending import Finish, as_it_is
from autoshard.runtime.transport.shared_memory.peers import Neighbours, Posted, Seen
from autoshard.runtime.transport.transport import Arrival, Join, reduced

#: bytes up to which each rank reduces all of a message itself, instead of a part which the others then read:
#: waiting a second time costs more
_WHOLE = 1 << 16


class SharedMemory:
    """A `runtime.transport.transport.Transport`. name: of the process group."""

    def __init__(self, neighbours: Neighbours, name: str) -> None:
        self.near, self.name = neighbours, name
        self.rank, self.ways = neighbours.rank, neighbours.ways

    def room(self, count: int, like: torch.Tensor) -> torch.Tensor | None:
        return self.near.room(count, like.dtype)

    def gather(self, x: torch.Tensor) -> Arrival:
        shape = (self.ways * x.shape[0], *x.shape[1:])
        return self.gather_rows(x, lambda rows: torch.cat(list(rows)).view(shape))

    def gather_rows(self, x: torch.Tensor, join: Join) -> Callable[[], Any]:
        posted, arriving = self._read_by_all(x, [(0, x.numel())] * self.ways)

        def joined() -> Any:
            seen = arriving()
            new = join(self._in_order(posted.lies, seen))
            self._finished(posted, seen)
            return new

        return joined

    def scatter(self, x: torch.Tensor) -> tuple[Arrival, Finish]:
        part = x.numel() // self.ways
        shape = (x.shape[0] // self.ways, *x.shape[1:])
        posted, arriving = self._read_by_all(x, [(k * part, part) for k in range(self.ways)])

        def add() -> torch.Tensor:
            own = posted.lies.view(self.ways, part)[self.rank]
            return self._reduced(posted, own, arriving(), "sum").view(shape)

        return add, as_it_is

    def all_reduce(self, x: torch.Tensor, op: str, own: bool = False) -> tuple[Arrival, Finish]:
        if op not in ("sum", "max"):
            raise NotImplementedError(f"an all-reduce of {op!r}")
        shape = x.shape
        if x.nbytes > _WHOLE:
            return self._all_reduce_parts(x, op), as_it_is
        posted, arriving = self._read_by_all(x, [(0, x.numel())] * self.ways)
        return lambda: self._reduced(posted, posted.lies, arriving(), op).view(shape), as_it_is

    def _all_reduce_parts(self, x: torch.Tensor, op: str) -> Arrival:
        """Each rank reduces a part, and then reads those of the others into its own message, which becomes
        the result: part k of it is read by rank k alone, and not after rank k has announced its part."""
        near, others, shape = self.near, self.near.others(), x.shape
        cuts = list(pairwise(x.numel() * k // self.ways for k in range(self.ways + 1)))
        start, end = cuts[self.rank]
        posted, arriving = self._read_by_all(x, [(first, last - first) for first, last in cuts])
        reduced = near.numbers(others)

        def join() -> torch.Tensor:
            seen = arriving()
            parts = [posted.lies[first:last] for first, last in cuts]
            # others read this one while the result is in use already
            own = near.room(end - start, posted.lies.dtype)
            self._reduce(parts[self.rank], seen, op, own)
            for each in seen:
                near.done(each)
            sent = near.post(own, len(others))
            for k in others:
                near.announce(k, reduced[k], sent, 0, end - start)
            parts[self.rank].copy_(own)
            near.release(sent)
            for k in others:
                one = near.look(k, reduced[k], len(parts[k]), own.dtype)
                parts[k].copy_(one.lies)
                near.done(one)
            return near.keep(posted).view(shape)

        return join

    def all_to_all(self, x: torch.Tensor) -> Arrival:
        counts = [x.numel() // self.ways] * self.ways
        return self.exchange(x, counts, counts)

    def exchange(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Arrival:
        shape = (sum(received), *x.shape[1:])
        width = prod(shape[1:])
        starts = accumulate(sent, initial=0)
        places = [(start * width, count * width) for start, count in zip(starts, sent, strict=False)]
        posted, arriving = self._read_by_all(x, places, [count * width for count in received])

        def join() -> torch.Tensor:
            out = torch.empty(shape, dtype=posted.lies.dtype)
            parts = out.split(list(received))
            start, count = places[self.rank]
            seen = arriving()
            for part, row in zip(
                parts, self._in_order(posted.lies[start : start + count], seen), strict=True
            ):
                part.view(-1).copy_(row)
            self._finished(posted, seen)
            return out

        return join

    def pass_on(self, x: torch.Tensor, out: torch.Tensor, after: int, before: int) -> Callable[[], None]:
        near = self.near
        # of two ranks, the next is the one before
        numbers = near.numbers(dict.fromkeys((after, before)))
        posted = near.post(x, 1)
        near.announce(after, numbers[after], posted, 0, x.numel())
        near.release(posted)

        def finish() -> None:
            seen = near.look(before, numbers[before], out.numel(), out.dtype)
            out.copy_(seen.lies.view(out.shape))
            near.done(seen)

        return finish

    def _read_by_all(
        self, x: torch.Tensor, places: Sequence[tuple[int, int]], counts: Sequence[int] | None = None
    ) -> tuple[Posted, Callable[[], list[Seen]]]:
        """Lays a message down of which rank k reads the elements at ``places[k]``, a start and a number; and
        what gives those that this rank reads of the others: ``counts[k]`` of rank k, if not as many as of its
        own."""
        near, dtype = self.near, x.dtype
        posted = near.post(x, self.ways - 1)
        numbers = near.numbers(near.others())
        for k, number in numbers.items():
            near.announce(k, number, posted, *places[k])
        wanted = counts or [places[self.rank][1]] * self.ways
        return posted, lambda: [near.look(k, number, wanted[k], dtype) for k, number in numbers.items()]

    def _reduced(self, posted: Posted, own: torch.Tensor, seen: Sequence[Seen], op: str) -> torch.Tensor:
        """own: what counts of this rank's message. Nobody's message is read again afterwards."""
        out = torch.empty_like(own)
        self._reduce(own, seen, op, out)
        self._finished(posted, seen)
        return out

    def _finished(self, posted: Posted, seen: Sequence[Seen]) -> None:
        for each in seen:
            self.near.done(each)
        self.near.release(posted)

    def _in_order(self, own: torch.Tensor, seen: Sequence[Seen]) -> list[torch.Tensor]:
        rows = {self.rank: own} | {each.rank: each.lies for each in seen}
        return [rows[k] for k in range(self.ways)]

    def _reduce(self, own: torch.Tensor, seen: Sequence[Seen], op: str, out: torch.Tensor) -> None:
        """In the order of the ranks. out: where to."""
        reduced(self._in_order(own, seen), op, out)
