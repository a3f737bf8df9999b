"""ZB-V (Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 6): no bubble with the memory of 1F1B."""

from __future__ import annotations

from autoshard.schedules.placement import check_sizes, v_shaped
from autoshard.schedules.schedule import Action, Kind, Schedule
from autoshard.schedules.spec import PipeSize, ScheduleSpec, StepTimes


def zb_v(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Two stages per rank, down the ranks and back up, so that the rank of the first has the last one too.

    With F = I = W, no time for sends and at least 2 * ranks microbatches, no rank is idle between its
    first action and its last; it holds 2 * ranks microbatches of one stage at most, each half as large as
    those of 1F1B. The order is the one for these times; for others see `autoshard.schedules.searched`.

    Raises UsageError if chunks is not 2.
    """
    check_sizes("zb-v", ranks, microbatches, chunks, only=2)
    # The pattern needs 2 * ranks - 1 microbatches to unfold. For fewer, those above are left out of it.
    unfolded = max(microbatches, 2 * ranks - 1)
    rows = []
    for rank in range(ranks):
        row = _row(ranks, rank, unfolded)
        rows.append(tuple(a for a in row if a.microbatch < microbatches))
    return Schedule("zb-v", microbatches, v_shaped(ranks), tuple(rows))


def _row(ranks: int, rank: int, microbatches: int) -> list[Action]:
    """A rank's order. down, up: its two stages; from the last rank to the first takes longest on rank 0."""
    down, up, to_end = rank, 2 * ranks - 1 - rank, ranks - rank
    row: list[Action] = []
    done: dict[tuple[Kind, int], int] = {}

    def next_of(kinds: tuple[Kind, ...], stage: int) -> None:
        for kind in kinds:
            microbatch = done.get((kind, stage), 0)
            done[kind, stage] = microbatch + 1
            row.append(Action(kind, stage, microbatch))

    # Until the first microbatch has been to the last rank and back here,
    for _ in range(2 * to_end - 1):
        next_of(("F",), down)
    # then both ways at the pace of the ranks before this one, for it to reach the last stage,
    for _ in range(rank):
        next_of(("F",), up)
        next_of(("F",), down)
    # and its backward comes: the upper stage alone, until it has been to the last rank and back again.
    for _ in range(to_end):
        next_of(("F", "I", "W"), up)
    # From here on both stages do all three in turn.
    while done["F", up] < microbatches:
        if done["F", down] < microbatches:
            next_of(("F",), down)
        next_of(("I", "W"), down)
        next_of(("F", "I", "W"), up)
    # Other ranks wait for input gradients; weight gradients are put off to where this rank would wait.
    for _ in range(rank):
        next_of(("I",), down)
        next_of(("I",), up)
    for _ in range(to_end):
        next_of(("I", "W"), down)
    for stage in (up, down):
        while done["W", stage] < microbatches:
            next_of(("W",), stage)
    return row


def _bubble(size: PipeSize, times: StepTimes) -> float | None:
    """None inside a rank with F = I = W and at least 2 p - 1 microbatches (section 6).

    What is left in the makespan is that the last rank starts, or the first one ends, (p - 1) F / 2 apart.
    """
    enough = size.microbatches >= 2 * size.ranks - 1
    return size.waits * times.forward / 2 if times.equal and enough else None


ZB_V = ScheduleSpec(
    "zb-v",
    zb_v,
    chunks=2,
    default_chunks=2,
    bubble=_bubble,
    filling=lambda size: max(size.waits / 2, size.waits + size.ranks - size.microbatches) / 3,
    tried=(2,),
    v_shaped=True,
    splits_backward=True,
    also=("zbv",),
    overlapped="dualpipe-v",
)
