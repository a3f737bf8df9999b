"""Slices of a sequence: contiguous, of as many of its equal parts each as a plan says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


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
    def ends(self) -> tuple[int, ...]:
        """Equal parts up to the end of every slice."""
        return tuple(sum(self.counts[: k + 1]) for k in range(len(self.counts)))

    def like(self, number: int) -> int:
        """The first slice of as many parts as one."""
        return self.counts.index(self.counts[number])

    def size(self, extent: int, number: int) -> int:
        """Elements of a slice of a dim that has so many and is divided as the sequence."""
        return extent // self.units * self.counts[number]

    def seen(self, extent: int, number: int) -> int:
        """Elements of a slice and those before it."""
        return extent // self.units * self.ends[number]

    def span(self, extent: int, number: int) -> tuple[int, int]:
        """From where to where a slice is."""
        end = self.seen(extent, number)
        return end - self.size(extent, number), end
