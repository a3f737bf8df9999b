"""ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.1): 1F1B with the backward in two."""

from __future__ import annotations

from autoshard.schedules.placement import check_sizes, looped
from autoshard.schedules.schedule import Action, Schedule
from autoshard.schedules.spec import PipeSize, ScheduleSpec, StepTimes


def zb_h1(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Weight gradients fill what 1F1B leaves empty; no rank holds more than 1F1B's first rank.

    Rank r starts like 1F1B and puts its weight gradients off by r microbatches: it then holds
    (ranks - r) + r of them. Raises UsageError if chunks is not 1.
    """
    check_sizes("zb-h1", ranks, microbatches, chunks, only=1)
    rows = [_row(r, min(ranks - r, microbatches), microbatches) for r in range(ranks)]
    return Schedule("zb-h1", microbatches, looped(ranks, 1), tuple(rows))


def _row(rank: int, warm_up: int, microbatches: int) -> tuple[Action, ...]:
    row = [Action("F", rank, m) for m in range(warm_up)]
    late = min(rank, microbatches)
    for m in range(microbatches):
        row.append(Action("I", rank, m))
        if m >= late:
            row.append(Action("W", rank, m - late))
        if m + warm_up < microbatches:
            row.append(Action("F", rank, m + warm_up))
    row += [Action("W", rank, m) for m in range(microbatches - late, microbatches)]
    return tuple(row)


def _bubble(size: PipeSize, times: StepTimes) -> float | None:
    """(p - 1) (F + I - W), sections 2.1 and 2.3, with at least p microbatches.

    The paper's figures have W <= F, I. In general the last rank starts (p - 1) F late, and the first one gets
    its last input gradient (p - 1) I after the last one has had it.
    """
    f, i, w = times.forward, times.backward_input, times.backward_weight
    return size.waits * max(f, i, f + i - w) if size.microbatches >= size.ranks else None


ZB_H1 = ScheduleSpec(
    "zb-h1",
    zb_h1,
    chunks=1,
    bubble=_bubble,
    filling=lambda size: max(size.waits, size.waits + size.ranks - size.microbatches) / 3,
    tried=(1,),
    splits_backward=True,
    also=("zb-1p",),
)
