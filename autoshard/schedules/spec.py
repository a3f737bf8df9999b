"""What is known of a schedule: its order, its closed forms, and where the planner tries it. One per file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isclose

from autoshard.schedules.schedule import Schedule


@dataclass(frozen=True)
class PipeSize:
    """ranks: of the pp axis. chunks: stages per rank. slices: of the sequence of a microbatch."""

    ranks: int
    microbatches: int
    chunks: int = 1
    slices: int = 1

    @property
    def waits(self) -> int:
        """Ranks that the first microbatch passes before the last one computes."""
        return self.ranks - 1


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a rank for one microbatch, all its chunks together; backward = input + weight."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    @property
    def total(self) -> float:
        return self.forward + self.backward_input + self.backward_weight

    @property
    def equal(self) -> bool:
        return isclose(self.forward, self.backward_input) and isclose(self.forward, self.backward_weight)


def fill_and_drain_bubble(size: PipeSize, times: StepTimes) -> float:
    """(p - 1) (F + B): GPipe (Huang et al., 2019, section 2.3), 1F1B (Megatron SC'21, section 2.2.1).

    Over slices of the sequence as over that many smaller microbatches (Seq1F1B, section 3.2).
    """
    return fill_and_drain(size) * times.total


def fill_and_drain(size: PipeSize) -> float:
    """Microbatches for which a rank waits until the first one comes, and after its last one has gone."""
    return size.waits / size.slices


def one_per_rank(size: PipeSize) -> float:
    """What the first rank of 1F1B holds, of microbatches or of slices."""
    return min(float(size.microbatches), (size.waits + size.slices) / size.slices)


def all_microbatches(size: PipeSize) -> float:
    return float(size.microbatches)


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule by name.

    make: (ranks, microbatches, chunks) to schedule, and slices where it is sliced. chunks: stages per rank
    that it needs, None for any; default_chunks: where nobody says. bubble: idle seconds per rank, for equal
    stages and sends that take no time; None where there is no formula. filling: how many microbatches a rank
    could compute while it waits, with backward twice forward and half of it for weights. in_flight:
    microbatches that the rank which holds most of them keeps for backward, in full stages' worth. tried:
    chunks that the planner tries; tried_ahead: where links between ranks are unlike, too. v_shaped: stages go
    down the ranks and back up. splits_backward: gradients of parameters are made apart from those of
    activations. sliced: whether the sequence may be divided. also: other names in published runs. overlapped:
    the schedule of the same order in which forwards run as one with backwards, "" for none.
    """

    name: str
    make: Callable[..., Schedule]
    chunks: int | None = None
    default_chunks: int = 1
    bubble: Callable[[PipeSize, StepTimes], float | None] = lambda size, times: None
    filling: Callable[[PipeSize], float] = fill_and_drain
    in_flight: Callable[[PipeSize], float] = one_per_rank
    tried: tuple[int, ...] = ()
    tried_ahead: tuple[int, ...] = ()
    v_shaped: bool = False
    splits_backward: bool = False
    sliced: bool = False
    also: tuple[str, ...] = ()
    overlapped: str = ""
