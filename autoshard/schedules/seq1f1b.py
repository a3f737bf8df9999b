"""1F1B over slices of the sequence (Sun et al., "Seq1F1B", 2024, section 3.2).

A slice is the unit that is sent on (Li et al., "TeraPipe", ICML 2021): microbatches pass through the stages
as trains of slices, and ranks wait for the first slice of a microbatch, not for all of it.
"""

from __future__ import annotations

from autoshard.errors import UsageError
from autoshard.schedules.placement import check_sizes, looped
from autoshard.schedules.schedule import Action, Schedule
from autoshard.schedules.spec import ScheduleSpec, fill_and_drain_bubble


def seq1f1b(ranks: int, microbatches: int, chunks: int = 1, slices: int = 1) -> Schedule:
    """1F1B with slices in place of microbatches, those of a microbatch backward in reverse order.

    Rank r holds min(ranks - r + slices - 1, slices x microbatches) slices at most. With one slice it is
    1F1B. Raises UsageError for a size below 1, or if chunks is not 1.
    """
    check_sizes("seq1f1b", ranks, microbatches, chunks, only=1)
    if slices < 1:
        raise UsageError(f"a sequence cannot have {slices} slices", where="schedule seq1f1b")
    units = microbatches * slices
    rows = [_row(r, min(ranks - 2 - r + slices, units), microbatches, slices) for r in range(ranks)]
    return Schedule("seq1f1b", microbatches, looped(ranks, 1), tuple(rows), slices)


def _row(stage: int, warm_up: int, microbatches: int, slices: int) -> tuple[Action, ...]:
    fs = [Action("F", stage, m, c) for m in range(microbatches) for c in range(slices)]
    bs = [Action("B", stage, m, c) for m in range(microbatches) for c in reversed(range(slices))]
    row = fs[:warm_up]
    for f, b in zip(fs[warm_up:], bs, strict=False):
        row += [f, b]
    return tuple(row + bs[len(fs) - warm_up :])


SEQ1F1B = ScheduleSpec(
    "seq1f1b",
    seq1f1b,
    chunks=1,
    bubble=fill_and_drain_bubble,
    sliced=True,
)
