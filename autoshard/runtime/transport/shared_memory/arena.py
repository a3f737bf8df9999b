"""Memory that the processes of one machine share: a file without a name, which each of them maps."""

from __future__ import annotations

import mmap
import os
import secrets
from bisect import bisect_left, insort
from dataclasses import dataclass

import torch

#: what blocks begin at and are multiples of, in bytes
_PAGE = 4096
#: bytes at the start that say whose memory it is
_NAME = 16
#: of the file, in bytes
_SMALLEST = 1 << 20
#: a free block is taken for a message that fills at least so much of it
_FILLED = 0.75


class Mapped:
    """A shared file in this process. It may grow at any time; what was mapped before stays valid.

    fd: of the file, closed by `close`.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = None

    def view(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """``count`` elements from a byte on, [count]; whoever has written there must have said so before."""
        return tensor_in(self.lease(offset, count * dtype.itemsize), dtype)

    def lease(self, offset: int, nbytes: int) -> memoryview:
        """Some of the bytes, from one on."""
        if self._map is None or offset + nbytes > len(self._map):
            self._map = mmap.mmap(self.fd, 0)
        return memoryview(self._map)[offset : offset + nbytes]

    def name(self) -> bytes:
        return os.pread(self.fd, _NAME, 0)

    def close(self) -> None:
        """Tensors that lie in it stay valid."""
        self._map = None
        os.close(self.fd)


def tensor_in(lease: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The elements of a piece of memory, [count]; it is referred to as long as there is any view of them."""
    return torch.frombuffer(lease, dtype=dtype) if lease.nbytes else torch.empty(0, dtype=dtype)


@dataclass(frozen=True, order=True)
class ArenaBlock:
    """Where a message lies, in bytes."""

    size: int
    offset: int


class Arena:
    """The memory of this process that others read, in blocks that are used again."""

    def __init__(self) -> None:
        self.mapped = Mapped(os.memfd_create("autoshard"))
        self._size = _SMALLEST
        os.ftruncate(self.mapped.fd, self._size)
        self.name = secrets.token_bytes(_NAME)
        os.pwrite(self.mapped.fd, self.name, 0)
        self._end = _PAGE
        #: the smallest first
        self._free: list[ArenaBlock] = []

    def free(self, nbytes: int) -> ArenaBlock | None:
        """A block that was given back and fits, or None."""
        size = _rounded(nbytes)
        at = bisect_left(self._free, ArenaBlock(size, 0))
        if at < len(self._free) and size >= _FILLED * self._free[at].size:
            return self._free.pop(at)
        return None

    def new(self, nbytes: int) -> ArenaBlock:
        """More memory. Raises OSError if there is none."""
        block = ArenaBlock(_rounded(nbytes), self._end)
        self._end += block.size
        if self._end > self._size:
            # twice as long, since all map it anew: pages that nobody has written to take no memory
            self._size = max(self._end, 2 * self._size)
            os.ftruncate(self.mapped.fd, self._size)
        return block

    def give_back(self, block: ArenaBlock) -> None:
        insort(self._free, block)


def _rounded(nbytes: int) -> int:
    return max(1, -(-nbytes // _PAGE)) * _PAGE
