"""Ranks of a process group on one machine, which read each other's messages where they lie.

A message stays in the memory of its sender (`runtime.transport.shared_memory.arena`). Its readers are told
where through a pipe from each rank to each other, and answer when they have read it. Whoever waits sleeps in
the kernel until something comes, and sees the end of a pipe when the rank at its other side is gone.
"""

from __future__ import annotations

import os
import select
import struct
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil

import torch

from autoshard.runtime.transport.shared_memory.arena import Arena, ArenaBlock, Mapped, tensor_in

#: what, number of the message between the two ranks, block of the sender, its offset in bytes, its bytes
_RECORD = struct.Struct("<5Q")
_LIES, _READ = 1, 2
#: records that are read at once
_MANY = 128


class PeerError(RuntimeError):
    """A rank of the same machine is late or gone."""


@dataclass(frozen=True)
class Posted:
    """A message of this rank. key: of its block; lies: the message itself, [elements], in its lease."""

    key: int
    lies: torch.Tensor
    lease: memoryview


@dataclass(frozen=True)
class Seen:
    """A message of another rank, or a part of it, in its memory. key: of its block there."""

    rank: int
    key: int
    lies: torch.Tensor


class Neighbours:
    """The ranks of a group, seen from one of them.

    rank: this one, its place in the group. names: place -> rank of the world, for errors. memories, inlets,
    outlets: of every other rank, its memory and the ends of the pipes from it and to it; they are closed with
    this. patience: seconds to wait for a rank.

    Messages between two ranks are numbered, in the order of the program, which is the same on both: `numbers`
    gives the next to and from each. A message that is announced may be looked at in any order.
    """

    def __init__(
        self,
        rank: int,
        names: Mapping[int, int],
        arena: Arena,
        memories: Mapping[int, Mapped],
        inlets: Mapping[int, int],
        outlets: Mapping[int, int],
        patience: float,
    ) -> None:
        self.rank, self.ways, self.patience = rank, len(memories) + 1, patience
        self.names, self._arena, self._memories = dict(names), arena, dict(memories)
        self._inlets, self._outlets = dict(inlets), dict(outlets)
        self._numbers = dict.fromkeys(memories, 0)
        #: (rank, number) -> (key, offset, bytes) of what was announced
        self._announced: dict[tuple[int, int], tuple[int, int, int]] = {}
        #: key -> a block of this rank, and how many have yet to let go of it, itself among them
        self._blocks: dict[int, tuple[ArenaBlock, int]] = {}
        self._rooms: dict[int, tuple[ArenaBlock, memoryview]] = {}
        #: keys of what was kept and is gone: tensors may go in any thread, between any two lines
        self._dropped: deque[int] = deque()
        #: rank -> answers for which its pipe had no room
        self._owed: dict[int, list[bytes]] = {k: [] for k in memories}
        self._count = 0
        self._polls = {rank: _poll([inlet]) for rank, inlet in self._inlets.items()}
        self._poll = _poll(self._inlets.values())
        files = [arena.mapped, *memories.values()]
        weakref.finalize(self, close, (self._inlets, self._outlets), files)

    def others(self) -> list[int]:
        """All ranks but this one, the next first: no rank is the first choice of all."""
        return [(self.rank + k) % self.ways for k in range(1, self.ways)]

    def numbers(self, ranks: Iterable[int]) -> dict[int, int]:
        """The number of the next message to and from each of some ranks, which then is taken."""
        taken = {}
        for rank in ranks:
            taken[rank] = self._numbers[rank]
            self._numbers[rank] += 1
        return taken

    # -- what this rank sends ------------------------------------------------------------------------

    def room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory to put a message together in, [count]; to be posted, whole."""
        if not count:
            return torch.empty(0, dtype=dtype)
        taken = self._taken(count * dtype.itemsize)
        room = tensor_in(taken[1], dtype)
        self._rooms[room.data_ptr()] = taken
        return room

    def post(self, x: torch.Tensor, readers: int) -> Posted:
        """Lay a message where others can read it, until so many have, and `release`. x: contiguous."""
        lies = x.view(-1)
        taken = self._rooms.pop(x.data_ptr(), None)
        if taken is None:
            taken = self._taken(x.nbytes)
            lies = tensor_in(taken[1], x.dtype).copy_(lies)
        self._count += 1
        self._blocks[self._count] = (taken[0], readers + 1)
        return Posted(self._count, lies, taken[1])

    def announce(self, rank: int, number: int, message: Posted, start: int, count: int) -> None:
        """Tell a rank where its elements of a message are. Raises PeerError if it is gone."""
        block, _ = self._blocks[message.key]
        size = message.lies.itemsize
        where = (block.offset + start * size, count * size)
        self._write(rank, _RECORD.pack(_LIES, number, message.key, *where))

    def release(self, posted: Posted) -> None:
        """This rank does not look at its own message any more."""
        self._let_go(posted.key)

    def keep(self, posted: Posted) -> torch.Tensor:
        """Instead of `release`: the memory of a message that nobody reads any more, [elements]. It is this
        rank's, to write to as well, until there is no view of it left."""
        weakref.finalize(posted.lease, self._dropped.append, posted.key).atexit = False
        return posted.lies

    def _let_go(self, key: int) -> None:
        block, left = self._blocks[key]
        if left > 1:
            self._blocks[key] = (block, left - 1)
        else:
            del self._blocks[key]
            self._arena.give_back(block)

    def _taken(self, nbytes: int) -> tuple[ArenaBlock, memoryview]:
        while self._dropped:
            self._let_go(self._dropped.popleft())
        result = self._arena.free(nbytes)
        if result is None:
            self._take_in(0.0)
            result = self._arena.free(nbytes)
        block = result or self._arena.new(nbytes)
        return block, self._arena.mapped.lease(block.offset, nbytes)

    # -- what it reads -------------------------------------------------------------------------------

    def look(self, rank: int, number: int, count: int, dtype: torch.dtype) -> Seen:
        """A message of a rank, [count], waited for; `done` says that it was read.

        Raises PeerError if the rank is gone or lets one wait too long, or sends another number of elements.
        """
        start: float | None = None
        while (rank, number) not in self._announced:
            if rank not in self._inlets:
                raise self._gone(rank)
            start = start or time.monotonic()
            left = self.patience - (time.monotonic() - start)
            if not self._take_in(left, self._polls[rank]):
                raise self._late(rank, "came from")
        key, offset, nbytes = self._announced.pop((rank, number))
        if nbytes != count * dtype.itemsize:
            raise PeerError(
                f"rank {self.names[rank]} sent {nbytes} bytes where {count * dtype.itemsize} are expected: "
                "the process group runs different programs"
            )
        return Seen(rank, key, self._memories[rank].view(offset, count, dtype))

    def done(self, seen: Seen) -> None:
        """What was seen is not looked at any more."""
        owed = self._owed[seen.rank]
        owed.append(_RECORD.pack(_READ, 0, seen.key, 0, 0))
        # one who has stopped reading needs no answer now, and one who has ended none at all
        while owed and self._wrote(seen.rank, owed[-1]) is not None:
            owed.pop()

    # -- pipes ---------------------------------------------------------------------------------------

    def _write(self, rank: int, record: bytes) -> None:
        """Raises PeerError if the rank has ended, or reads nothing for too long."""
        start: float | None = None
        while (wrote := self._wrote(rank, record)) is None:
            start = start or time.monotonic()
            if time.monotonic() - start > self.patience:
                raise self._late(rank, "was read by")
            # the other rank may be waiting, in the same way, for this one to read
            self._take_in(0.01)
        if not wrote:
            raise self._gone(rank)

    def _wrote(self, rank: int, record: bytes) -> bool | None:
        """Whether there is somebody to read it; None if the pipe is full."""
        try:
            os.write(self._outlets[rank], record)
        except BlockingIOError:
            return None
        except BrokenPipeError:
            return False
        return True

    def _take_in(self, patience: float, poll: select.poll | None = None) -> bool:
        """Read what others have written, after waiting for it so many seconds; whether anything came."""
        ready = {fd for fd, _ in (poll or self._poll).poll(max(0, ceil(patience * 1e3)))}
        for rank, inlet in list(self._inlets.items()):
            if inlet in ready:
                self._receive(rank, os.read(inlet, _MANY * _RECORD.size))
        return bool(ready)

    def _receive(self, rank: int, raw: bytes) -> None:
        if not raw:
            inlet = self._inlets.pop(rank)
            self._poll.unregister(inlet)
            os.close(inlet)
        for what, number, key, offset, nbytes in _RECORD.iter_unpack(raw):
            if what == _LIES:
                self._announced[rank, number] = (key, offset, nbytes)
            else:
                self._let_go(key)

    def _late(self, rank: int, what: str) -> PeerError:
        return PeerError(f"timed out: nothing {what} rank {self.names[rank]} for {self.patience:.0f} s")

    def _gone(self, rank: int) -> PeerError:
        return PeerError(f"connection closed: rank {self.names[rank]} has ended")


def _poll(fds: Iterable[int]) -> select.poll:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return poll


def close(pipes: Iterable[Mapping[int, int]], files: Iterable[Mapped]) -> None:
    """Ends of pipes by rank, and shared files."""
    for ends in pipes:
        for fd in ends.values():
            os.close(fd)
    for file in files:
        file.close()
