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


def _fill_and_drain(size: PipeSize) -> float:
    return float(size.waits)


def _one_per_rank(size: PipeSize) -> float:
    return min(float(size.microbatches), float(size.ranks))


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule by name.

    make: (ranks, microbatches, chunks, slices) to schedule. chunks: stages per rank that it needs, None for
    any; default_chunks: where nobody says. bubble: idle seconds per rank, for equal stages and sends that
    take no time; None where there is no formula. filling: how many microbatches a rank could compute while it
    waits, with backward twice forward and half of it for weights. in_flight: microbatches that the rank which
    holds most of them keeps for backward, in whole stages' worth. tried: chunks that the planner tries;
    tried_ahead: where links between ranks are unlike, too. v_shaped: stages go down the ranks and back up.
    splits_backward: gradients of parameters are made apart from those of activations. sliced: whether the
    sequence may be divided. also: other names in published runs.
    """

    name: str
    make: Callable[[int, int, int, int], Schedule]
    chunks: int | None = None
    default_chunks: int = 1
    bubble: Callable[[PipeSize, StepTimes], float | None] = lambda size, times: None
    filling: Callable[[PipeSize], float] = _fill_and_drain
    in_flight: Callable[[PipeSize], float] = _one_per_rank
    tried: tuple[int, ...] = ()
    tried_ahead: tuple[int, ...] = ()
    v_shaped: bool = False
    splits_backward: bool = False
    sliced: bool = False
    also: tuple[str, ...] = ()
