"""What a caching allocator takes of a device for a sequence of allocations, by the rules of CUDA's in torch.

Rules and constants are those of torch, c10/cuda/CUDACachingAllocator.cpp (round_size, get_allocation_size,
get_free_block, should_split, try_merge_blocks, release_cached_blocks, and its note "Expandable Segments").
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from math import ceil, inf
from typing import TypeAlias

#: an allocation of so many bytes, or None for the end of it, by a name of one's choice
Event: TypeAlias = "tuple[Hashable, float | None]"

_MIB = 2**20
_BLOCK = 512  # kMinBlockSize
_SMALL = _MIB  # kSmallSize: up to it, blocks are of the small pool
_SMALL_SEGMENT = 2 * _MIB  # kSmallBuffer
_MIDDLE, _MIDDLE_SEGMENT = 10 * _MIB, 20 * _MIB  # kMinLargeAlloc, kLargeBuffer
_LARGE = 2 * _MIB  # kRoundLarge


@dataclass(frozen=True)
class Reserved:
    """Peaks in bytes. allocated: of blocks in use, rounded as the allocator does; reserved: of segments, free
    blocks included. flushes: how often cached segments were given back to make room. fits: whether all that
    was asked for was found within the limit; the peaks are those until then."""

    allocated: int
    reserved: int
    flushes: int
    fits: bool


class _Block:
    """Part of a segment. before, after: its neighbours, None at the ends of the segment."""

    __slots__ = ("address", "after", "before", "free", "size", "small")

    def __init__(self, address: int, size: int, small: bool) -> None:
        self.address, self.size, self.small, self.free = address, size, small, True
        self.before: _Block | None = None
        self.after: _Block | None = None


class _OutOfMemory(Exception):
    pass


class CachingAllocator:
    """Segments of a device, cut into blocks. expandable: whether each pool is one segment that grows by pages
    (``expandable_segments:True``). limit: bytes of segments that the device has room for."""

    def __init__(self, *, expandable: bool = False, limit: float = inf) -> None:
        self.expandable, self.limit = expandable, limit
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.flushes = 0
        self._blocks: dict[Hashable, _Block] = {}
        #: per pool, free blocks by size and address
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        #: per pool, the last block of the segment that grows
        self._last: dict[bool, _Block | None] = {True: None, False: None}
        self._next = 0

    def run(self, events: Iterable[Event]) -> Reserved:
        """After all these, or as many as there was room for."""
        fits = True
        try:
            for name, size in events:
                if size is None:
                    self.free(name)
                else:
                    self.allocate(name, size)
        except _OutOfMemory:
            fits = False
        return Reserved(self.peak_allocated, self.peak_reserved, self.flushes, fits)

    def allocate(self, name: Hashable, size: float) -> None:
        """A block of at least so many bytes, none for 0."""
        if size <= 0:
            return
        rounded = max(_BLOCK, ceil(size / _BLOCK) * _BLOCK)
        small = rounded <= _SMALL
        block = self._best(rounded, small) or self._segment(rounded, small)
        left = block.size - rounded
        if left >= _BLOCK if small or self.expandable else left > _SMALL:
            self._split(block, rounded)
        block.free = False
        self._blocks[name] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, name: Hashable) -> None:
        """Give a block back; names that have none are of allocations without bytes."""
        block = self._blocks.pop(name, None)
        if block is None:
            return
        self.allocated -= block.size
        block.free = True
        before, after = block.before, block.after
        if before is not None and before.free:
            self._take(before)
            block.address, block.size = before.address, before.size + block.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.free:
            self._take(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
            if self._last[block.small] is after:
                self._last[block.small] = block
        self._give(block)

    # -- blocks ----------------------------------------------------------------------------------------

    def _give(self, block: _Block) -> None:
        insort(self._free[block.small], (block.size, block.address, block))

    def _take(self, block: _Block) -> None:
        rows = self._free[block.small]
        del rows[bisect_left(rows, (block.size, block.address))]

    def _best(self, size: int, small: bool) -> _Block | None:
        """The smallest free block that is large enough; of a segment that grows, its end comes last."""
        rows = self._free[small]
        at = bisect_left(rows, (size,))
        if self.expandable and at + 1 < len(rows) and rows[at][2] is self._last[small]:
            at += 1
        return rows.pop(at)[2] if at < len(rows) else None

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size - size, block.small)
        rest.before, rest.after, block.after, block.size = block, block.after, rest, size
        if rest.after is not None:
            rest.after.before = rest
        if self._last[block.small] is block:
            self._last[block.small] = rest
        self._give(rest)

    # -- segments --------------------------------------------------------------------------------------

    def _segment(self, size: int, small: bool) -> _Block:
        if self.expandable:
            return self._grown(size, small)
        if small:
            full = _SMALL_SEGMENT
        else:
            full = _MIDDLE_SEGMENT if size < _MIDDLE else ceil(size / _LARGE) * _LARGE
        self._reserve(full)
        self._next += 1
        return _Block(self._next << 48, full, small)

    def _grown(self, size: int, small: bool) -> _Block:
        last = self._last[small]
        there = last.size if last is not None and last.free else 0
        page = _SMALL_SEGMENT if small else _MIDDLE_SEGMENT
        more = ceil((size - there) / page) * page
        self._reserve(more)
        if last is not None and last.free:
            self._take(last)
            last.size += more
            return last
        new = _Block(last.address + last.size if last is not None else 0, more, small)
        if last is not None:
            last.after, new.before = new, last
        self._last[small] = new
        return new

    def _reserve(self, size: int) -> None:
        """Raises _OutOfMemory if there is no room, even when all that is cached is given back."""
        if self.reserved + size > self.limit:
            self._flush()
            if self.reserved + size > self.limit:
                raise _OutOfMemory
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _flush(self) -> None:
        """Give back the segments that are free as a whole; of one that grows, the pages at its end."""
        self.flushes += 1
        for small, rows in self._free.items():
            if not self.expandable:
                gone = [r for r in rows if r[2].before is None and r[2].after is None]
                self.reserved -= sum(size for size, _, _ in gone)
                self._free[small] = [r for r in rows if r[2].before is not None or r[2].after is not None]
                continue
            last, page = self._last[small], _SMALL_SEGMENT if small else _MIDDLE_SEGMENT
            if last is not None and last.free and last.size >= page:
                self._take(last)
                spare = last.size // page * page
                last.size -= spare
                self.reserved -= spare
                if last.size:
                    self._give(last)
                    continue
                self._last[small] = last.before
                if last.before is not None:
                    last.before.after = None
