"""Meshes that differ only in their data ranks, solved exactly at a few microbatches.

What is least over all placements is concave in the batch (a least of sums of concave costs), so the chord
between two solutions is a lower bound for every microbatch between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from autoshard.search.configuration import Staged
from autoshard.search.parameters import Parameters, parameters_of
from autoshard.search.problems import Posed
from autoshard.search.setting import OF_STATE
from autoshard.search.settle import Placed
from autoshard.search.terms import Profile

K = TypeVar("K")


@dataclass(frozen=True)
class Way:
    """Placements of everything: what they take, and how they use the parameters."""

    taken: Profile
    parameters: Parameters


@dataclass(frozen=True)
class End:
    """One microbatch solved exactly.

    batch: sequences per data rank. free: the fastest placements. seconds: that computing and talking take at
    least. find_lean: makes placements that hold less, gradients on their way counted or not. find_bytes: says
    what is held at least beside parameters, with everything computed again. Both are asked only where memory
    is short. find_chain: seconds of the ops of forward, in order; only asked where there are pipelines.
    """

    batch: int
    free: Way
    seconds: float
    find_lean: Callable[[bool], Way]
    find_bytes: Callable[[], float]
    find_chain: Callable[[], tuple[float, ...]]

    @cached_property
    def lean(self) -> Way:
        """For steps without a pipeline."""
        return self.find_lean(True)

    @cached_property
    def staged(self) -> Way:
        """For the stages of a pipeline, which have nothing on its way to a reduction."""
        return self.find_lean(False)

    def holding(self, staged: bool) -> Way:
        """Placements that hold less. staged: for a stage of a pipeline."""
        return self.staged if staged else self.lean

    @cached_property
    def bytes(self) -> float:
        return self.find_bytes()

    @cached_property
    def chain(self) -> tuple[float, ...]:
        return self.find_chain()


@dataclass(frozen=True)
class Shape:
    """Meshes that differ only in their data axes (and pipelines), solved at a few microbatches.

    What computes and talks in one microbatch depends on the sequences of one data rank, not on how many data
    ranks there are, but for scalars that all of them share: the mesh with the fewest, at least two, was
    solved. ends: by sequences, ascending. between: bytes that one sequence hands from layer to layer.
    shared: bytes of parameters that first and last layers share.
    choices: states of all variables of one problem. state: bytes of trained parameters with their gradients
    and optimizer, whole.
    """

    meshes: tuple[Staged, ...]
    ends: tuple[End, ...]
    between: float = 0.0
    choices: int = 0
    state: float = 0.0
    shared: float = 0.0

    def free(self, batch: int) -> Profile:
        """The fastest placements, interpolated between two ends, without what belongs to parameters."""
        low, high, t = self.place(batch)
        return _off_parameters(low.free, high.free, t)

    def lean(self, batch: int, staged: bool) -> Profile:
        """The same for those that hold less. staged: as a stage of a pipeline."""
        low, high, t = self.place(batch)
        return _off_parameters(low.holding(staged), high.holding(staged), t)

    def seconds(self, batch: int) -> float:
        """Seconds that one microbatch takes at least."""
        low, high, t = self.place(batch)
        return low.seconds + t * (high.seconds - low.seconds)

    def bytes(self, batch: int) -> float:
        """Bytes that are held at least, but for what belongs to parameters."""
        low, high, t = self.place(batch)
        return low.bytes + t * (high.bytes - low.bytes)

    def covers(self, batch: int) -> bool:
        return self.ends[0].batch <= batch <= self.ends[-1].batch

    def place(self, batch: int) -> tuple[End, End, float]:
        """The ends around a number of sequences per data rank, and how far it is from one to the other."""
        above = next(k for k, end in enumerate(self.ends) if end.batch >= batch)
        low, high = self.ends[max(0, above - 1)], self.ends[above]
        width = high.batch - low.batch
        return low, high, (batch - low.batch) / width if width else 0.0


def _off_parameters(low: Way, high: Way, t: float) -> Profile:
    taken = between(low.taken, high.taken, t)
    return Profile(
        {k: v for k, v in taken.seconds.items() if k.kind in ("work", "talk")},
        {k: v for k, v in taken.bytes.items() if k.kind not in OF_STATE},
    )


def between(low: Profile, high: Profile, t: float) -> Profile:
    """The profile at a share ``t`` of the way from one to the other."""
    return Profile(_mixed(low.seconds, high.seconds, t), _mixed(low.bytes, high.bytes, t))


def way_of(posed: Posed, placed: Placed) -> Way:
    """What is worth knowing of placements."""
    return Way(placed.taken, parameters_of(posed, placed))


def _mixed(a: Mapping[K, float], b: Mapping[K, float], t: float) -> dict[K, float]:
    return {k: (1 - t) * a.get(k, 0.0) + t * b.get(k, 0.0) for k in dict.fromkeys((*a, *b))}
