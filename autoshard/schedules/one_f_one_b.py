"""1F1B (PipeDream-Flush, Narayanan et al., 2021; Megatron SC'21, section 2.2.1)."""

from __future__ import annotations

from autoshard.schedules.placement import check_sizes, looped
from autoshard.schedules.schedule import Action, Schedule
from autoshard.schedules.spec import ScheduleSpec, fill_and_drain_bubble


def one_f_one_b(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """As long as GPipe, but rank r holds min(ranks - r, microbatches) microbatches at most.

    Raises UsageError if chunks is not 1.
    """
    check_sizes("1f1b", ranks, microbatches, chunks, only=1)
    rows = [_row(r, min(ranks - 1 - r, microbatches), microbatches) for r in range(ranks)]
    return Schedule("1f1b", microbatches, looped(ranks, 1), tuple(rows))


def _row(stage: int, warm_up: int, microbatches: int) -> tuple[Action, ...]:
    row = [Action("F", stage, m) for m in range(warm_up)]
    for m in range(warm_up, microbatches):
        row += [Action("F", stage, m), Action("B", stage, m - warm_up)]
    row += [Action("B", stage, m) for m in range(microbatches - warm_up, microbatches)]
    return tuple(row)


ONE_F_ONE_B = ScheduleSpec(
    "1f1b",
    one_f_one_b,
    chunks=1,
    bubble=fill_and_drain_bubble,
    tried=(1,),
    also=("none",),
    overlapped="interleaved-overlap",
)
