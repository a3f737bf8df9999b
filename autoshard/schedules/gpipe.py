"""GPipe (Huang et al., 2019, section 2.3): all forwards, then all backwards."""

from __future__ import annotations

from autoshard.schedules.placement import check_sizes, looped
from autoshard.schedules.schedule import Action, Schedule
from autoshard.schedules.spec import ScheduleSpec, all_microbatches, fill_and_drain_bubble


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Every rank holds all microbatches before its first backward. Raises UsageError if chunks is not 1."""
    check_sizes("gpipe", ranks, microbatches, chunks, only=1)
    every = range(microbatches)
    rows = [[Action("F", r, m) for m in every] + [Action("B", r, m) for m in every] for r in range(ranks)]
    return Schedule("gpipe", microbatches, looped(ranks, 1), tuple(map(tuple, rows)))


GPIPE = ScheduleSpec(
    "gpipe",
    gpipe,
    chunks=1,
    bubble=fill_and_drain_bubble,
    in_flight=all_microbatches,
    tried_ahead=(1,),
)
