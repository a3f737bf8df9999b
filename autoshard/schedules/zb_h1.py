"""ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.1): 1F1B with the backward in two."""

from __future__ import annotations

from autoshard.schedules.placement import check_sizes, looped
from autoshard.schedules.schedule import Action, Schedule


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
