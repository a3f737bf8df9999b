"""What each rank of a pipeline computes, in order.

Computing only: what is sent and received follows from which rank owns which stage. An action waits for

- F(s, m): F(s-1, m)
- B(s, m) or I(s, m): F(s, m), and B or I of (s+1, m)
- W(s, m): I(s, m)

A stage takes its microbatches in order, forward and backward (B or I); weight gradients (W) may come later.

Where a microbatch is divided into slices of its sequence, 0 to k-1, all of this holds slice by slice, and a
stage takes them in order going forward and in reverse order going back, when all of them have gone forward:

- F(s, m, c): F(s, m, c-1) as well
- B(s, m, c): F(s, m, k-1) and B(s, m, c+1) as well

A forward and the backward of another microbatch behind it may be paired to run as one: each computes while
the other waits for the tokens of experts (F&B of DeepSeek-V3's DualPipe, arXiv 2412.19437, section
3.2.1). They begin when both can, and what they give is there when both are done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

from autoshard.schedules.steps import ScheduledAction, steps_of

T = TypeVar("T")

#: forward, full backward, its input-gradient part, its weight-gradient part
Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Action:
    """One stage computing one microbatch, or a slice of it, forward or backward.

    ``F3.0`` is stage 3, microbatch 0; ``F3.0/2`` its slice 2.
    """

    kind: Kind
    stage: int
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        part = f"/{self.slice}" if self.slice else ""
        return f"{self.kind}{self.stage}.{self.microbatch}{part}"


def in_turns(row: Sequence[T], paired: Callable[[T], bool]) -> tuple[tuple[T, ...], ...]:
    """What a rank does, in order, with what runs as one together. paired: whether one does with the next."""
    turns: list[tuple[T, ...]] = []
    joins = False
    for each in row:
        if joins:
            turns[-1] = (*turns[-1], each)
        else:
            turns.append((each,))
        joins = not joins and paired(each)
    return tuple(turns)


@dataclass(frozen=True)
class Schedule:
    """The order of work of a pipeline.

    owner: the pipeline rank of each stage. actions: per pipeline rank, in order. slices: into how many parts
    of its sequence every microbatch is divided. paired: forwards that run as one with the
    backward behind each.
    """

    name: str
    microbatches: int
    owner: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    slices: int = 1
    paired: frozenset[Action] = frozenset()

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        return len(self.owner)

    def unit(self, action: Action) -> int:
        """The number of an action's slice among all slices of all microbatches."""
        return action.microbatch * self.slices + action.slice

    @cached_property
    def steps(self) -> tuple[tuple[ScheduledAction, ...], ...]:
        """The actions of every rank with what joins them."""
        return steps_of(self)

    @cached_property
    def turns(self) -> tuple[tuple[tuple[Action, ...], ...], ...]:
        """Per pipeline rank, the actions that run as one, in order: one each where nothing is paired."""
        return tuple(in_turns(row, self.paired.__contains__) for row in self.actions)

    @cached_property
    def pairs(self) -> Mapping[tuple[int, int], tuple[Action, ...]]:
        """(stage of a forward, stage of a backward) -> the first two such actions that run as one."""
        result: dict[tuple[int, int], tuple[Action, ...]] = {}
        for turn in (turn for row in self.turns for turn in row if len(turn) > 1):
            result.setdefault((turn[0].stage, turn[1].stage), turn)
        return result

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward comes in two parts."""
        return any(a.kind in "IW" for row in self.actions for a in row)
