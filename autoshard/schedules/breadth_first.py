"""Breadth-first pipelines (Lamy-Poirier, 2023): several stages per rank, one after the other."""

from __future__ import annotations

from autoshard.schedules.interleaved import interleaved_bubble, interleaved_filling
from autoshard.schedules.placement import check_sizes, looped
from autoshard.schedules.schedule import Action, Schedule
from autoshard.schedules.spec import ScheduleSpec, all_microbatches


def breadth_first(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """A chunk takes all microbatches before the next chunk takes any, forward and then backward.

    The bubble of the interleaved schedule and the memory of GPipe; parameters of a chunk are used twice
    a step only, which suits parameters that have to be gathered. Raises UsageError for a size below 1.
    """
    check_sizes("breadth-first", ranks, microbatches, chunks)
    every = range(microbatches)
    rows = []
    for rank in range(ranks):
        mine = range(rank, ranks * chunks, ranks)
        row = [Action("F", s, m) for s in mine for m in every]
        rows.append(tuple(row + [Action("B", s, m) for s in reversed(mine) for m in every]))
    return Schedule("breadth-first", microbatches, looped(ranks, chunks), tuple(rows))


BREADTH_FIRST = ScheduleSpec(
    "breadth-first",
    breadth_first,
    default_chunks=2,
    bubble=interleaved_bubble,
    filling=interleaved_filling,
    in_flight=all_microbatches,
    tried_ahead=(2,),
)
