"""GPipe (Huang et al., 2019, section 2.3): all forwards, then all backwards."""

from __future__ import annotations

from autoshard.schedules.placement import check_sizes, looped
from autoshard.schedules.schedule import Action, Schedule
from autoshard.schedules.spec import PipeSize, ScheduleSpec, StepTimes


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Every rank holds all microbatches before its first backward. Raises UsageError if chunks is not 1."""
    check_sizes("gpipe", ranks, microbatches, chunks, only=1)
    every = range(microbatches)
    rows = [[Action("F", r, m) for m in every] + [Action("B", r, m) for m in every] for r in range(ranks)]
    return Schedule("gpipe", microbatches, looped(ranks, 1), tuple(map(tuple, rows)))


def _bubble(size: PipeSize, times: StepTimes) -> float:
    return size.waits * times.total


GPIPE = ScheduleSpec(
    "gpipe",
    lambda ranks, microbatches, chunks, slices: gpipe(ranks, microbatches, chunks),
    chunks=1,
    bubble=_bubble,
    in_flight=lambda size: float(size.microbatches),
    tried_ahead=(1,),
)
