"""ZB-H2 (Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.2): no bubble, twice the memory."""

from __future__ import annotations

from autoshard.schedules.placement import check_sizes, looped
from autoshard.schedules.schedule import Action, Schedule


def zb_h2(ranks: int, microbatches: int, more: int = 0) -> Schedule:
    """More forwards before the first backward, and weight gradients put off further.

    Rank r starts with 2 (ranks - r) - 1 forwards and puts its weight gradients off by 2 r microbatches, so
    that every rank holds 2 ranks - 1 of them. It has no bubble only where a rank need not wait for the others
    at the end of a step; the planner does not offer it.

    more: forwards that all ranks but the last start with beside these.
    """
    check_sizes("zb-h2", ranks, microbatches, 1, only=1)
    starts = [2 * (ranks - r) - 1 + (more if r < ranks - 1 else 0) for r in range(ranks)]
    rows = [_row(r, min(start, microbatches), microbatches) for r, start in enumerate(starts)]
    return Schedule("zb-h2", microbatches, looped(ranks, 1), tuple(rows))


def _row(rank: int, warm_up: int, microbatches: int) -> tuple[Action, ...]:
    row = [Action("F", rank, m) for m in range(warm_up)]
    late = min(2 * rank, microbatches)
    for m in range(microbatches):
        row.append(Action("I", rank, m))
        if m >= late:
            row.append(Action("W", rank, m - late))
        if m + warm_up < microbatches:
            row.append(Action("F", rank, m + warm_up))
    row += [Action("W", rank, m) for m in range(microbatches - late, microbatches)]
    return tuple(row)
