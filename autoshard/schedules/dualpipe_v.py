"""DualPipeV: both ways of a V at once, each forward as one with a backward of the other way.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv 2412.19437, section 3.2.1) has DualPipe, in which
microbatches come from both ends, so that every rank holds two stages, and every stage is there twice. Cut in
half, both ends become the arms of a V, and every stage is there once.
"""

from __future__ import annotations

from autoshard.schedules.placement import check_sizes, v_shaped
from autoshard.schedules.schedule import Action, Kind, Schedule
from autoshard.schedules.spec import PipeSize, ScheduleSpec, StepTimes


def dualpipe_v(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Two stages per rank, down the ranks and back up.

    The order is the one for at least 2 * ranks microbatches; of fewer, those that are not there are left out.
    Raises UsageError if chunks is not 2.
    """
    check_sizes("dualpipe-v", ranks, microbatches, chunks, only=2)
    rows, paired = [], set[Action]()
    for rank in range(ranks):
        turns = _Row(ranks, rank).turns(max(microbatches, 2 * ranks))
        left = [[a for a in turn if a.microbatch < microbatches] for turn in turns]
        rows.append(tuple(action for turn in left for action in turn))
        paired |= {turn[0] for turn in left if len(turn) > 1}
    return Schedule("dualpipe-v", microbatches, v_shaped(ranks), tuple(rows), paired=frozenset(paired))


class _Row:
    """A rank's order. down, up: its two stages."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self.down, self.up = rank, 2 * ranks - 1 - rank
        self.done: dict[tuple[str, int], int] = {}
        self.result: list[tuple[Action, ...]] = []
        #: whose weight gradients are still to come, the oldest first
        self.late: list[Action] = []

    def next(self, kind: Kind, stage: int) -> Action:
        key = ("F" if kind == "F" else "B", stage)
        microbatch = self.done.get(key, 0)
        self.done[key] = microbatch + 1
        if kind == "I":
            self.late.append(Action("W", stage, microbatch))
        return Action(kind, stage, microbatch)

    def alone(self, kind: Kind, stage: int) -> None:
        self.result.append((self.next(kind, stage),))

    def pair(self, forward: int, backward: int) -> None:
        self.result.append((self.next("F", forward), self.next("B", backward)))

    def weight(self) -> None:
        self.result.append((self.late.pop(0),))

    def turns(self, microbatches: int) -> list[tuple[Action, ...]]:
        """To the tip of the V and back are so many ranks as come after this one."""
        down, up, behind = self.down, self.up, self.ranks - self.rank - 1
        for _ in range(2 * behind):
            self.alone("F", down)
        for _ in range(self.rank + 1):
            self.alone("F", down)
            self.alone("F", up)
        for _ in range(behind):
            self.alone("I", up)
            self.weight()
            self.alone("F", up)
        for _ in range(microbatches - 2 * self.ranks + self.rank + 1):
            self.pair(down, up)
            self.pair(up, down)
        for _ in range(behind):
            self.alone("B", up)
            self.pair(up, down)
        # weight gradients are put off to where this rank would wait, from half of the way on
        half = (self.rank + 1) // 2
        for k in range(self.rank + 1):
            later = k > half or (k == half and self.rank % 2 == 1)
            self.alone("I" if later else "B", up)
            self.alone("I" if later or k == half else "B", down)
        for _ in range(behind):
            self.weight()
            self.alone("I", down)
        while self.late:
            self.weight()
        return self.result


def _bubble(size: PipeSize, times: StepTimes) -> float | None:
    """(p - 1) (F&B + B - 3 W) of a stage, which are half as long as those of a rank.

    Where forward and both parts of backward are equal, and pairs save nothing.
    """
    enough = size.microbatches >= 2 * size.ranks
    spent = times.total + times.backward_input + times.backward_weight - 3 * times.backward_weight
    return size.waits * spent / 2 if times.equal and enough else None


DUALPIPE_V = ScheduleSpec(
    "dualpipe-v",
    dualpipe_v,
    chunks=2,
    default_chunks=2,
    bubble=_bubble,
    filling=lambda size: max(size.waits, size.waits + 2 * size.ranks - size.microbatches) / 3,
    in_flight=lambda size: min(float(size.microbatches), size.ranks + 0.5),
    v_shaped=True,
    splits_backward=True,
    also=("dualpipev",),
)
