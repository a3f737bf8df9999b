"""Slices of a sequence: contiguous, of as many of its equal parts each as a plan says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from autoshard.ir.graph import Arg
from autoshard.ir.placement import Placement, Shard, local_extent, local_shape
from autoshard.ir.symbols import LocalOffset, LocalSize


@dataclass(frozen=True)
class Slices:
    """counts: of every slice, how many of the equal parts of the sequence it has."""

    counts: tuple[int, ...]

    @classmethod
    def equal(cls, number: int) -> Slices:
        return cls((1,) * number)

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def units(self) -> int:
        """Equal parts of the sequence."""
        return sum(self.counts)

    @property
    def even(self) -> bool:
        return len(set(self.counts)) == 1

    @cached_property
    def cumulative(self) -> tuple[int, ...]:
        """Equal parts of every slice and those before it."""
        return tuple(accumulate(self.counts))

    @property
    def shares(self) -> tuple[float, ...]:
        """Of every slice, its part of the sequence."""
        return tuple(count / self.units for count in self.counts)

    def like(self, number: int) -> int:
        """The first slice of as many parts as one."""
        return self.counts.index(self.counts[number])

    def size(self, extent: int, number: int) -> int:
        """Elements of a slice of a dim that has so many and is divided as the sequence."""
        return extent // self.units * self.counts[number]

    def seen(self, extent: int, number: int) -> int:
        """Elements of a slice and those before it."""
        return extent // self.units * self.cumulative[number]

    def span(self, extent: int, number: int) -> tuple[int, int]:
        """From where to where a slice is."""
        end = self.seen(extent, number)
        return end - self.size(extent, number), end

    def local_shape(self, shape: Sequence[int], placed: Placement, number: int) -> tuple[int, ...]:
        """Of a slice of a value: its parts are ranks of an axis on which the value lies as placed."""
        one = local_shape(shape, (placed,), (self.units,), (0,))
        if not isinstance(placed, Shard):
            return one
        return (*one[: placed.dim], one[placed.dim] * self.counts[number], *one[placed.dim + 1 :])

    def resolved(self, arg: Arg, number: int) -> Arg:
        """An argument with what depends on the slice in numbers, its parts being such ranks one after the
        other."""
        if isinstance(arg, LocalSize | LocalOffset):
            first = self.cumulative[number] - self.counts[number]
            shards = [(Shard(0, s.outer, s.inner), self.units, first) for s in arg.shards]
            offset, size = local_extent(arg.size, shards)
            return size * self.counts[number] if isinstance(arg, LocalSize) else offset
        if isinstance(arg, tuple):
            return tuple(self.resolved(a, number) for a in arg)
        return arg
