"""Actions of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from autoshard.program.program import Program
from autoshard.schedules.schedule import Action
from faults.edits import (
    with_schedule,
)
from faults.fault import PIPES, Fault, Kind, rules


def drop_action(program: Program) -> Iterator[Fault]:
    """A rank leaves an action out."""
    if program.stages is None:
        return
    actions = program.stages.schedule.actions
    for rank, row in enumerate(actions):
        for place in range(len(row)):
            rest = (*actions[:rank], (*row[:place], *row[place + 1 :]), *actions[rank + 1 :])
            made = with_schedule(program, actions=rest)
            yield Fault(made, rules("schedule"), (str(row[place]), *map(str, row[place + 1 :])))


def swapped_microbatches(program: Program) -> Iterator[Fault]:
    """A rank takes two microbatches in another order than the others."""
    if program.stages is None:
        return
    actions = program.stages.schedule.actions
    for rank, row in enumerate(actions):
        forward = [k for k, a in enumerate(row) if a.kind == "F" and a.stage == row[0].stage]
        for a, b in pairwise(forward):
            other = list(row)
            other[a], other[b] = other[b], other[a]
            rest = (*actions[:rank], tuple(other), *actions[rank + 1 :])
            yield Fault(with_schedule(program, actions=rest), rules("schedule"), (str(row[a]), str(row[b])))


def backward_first(program: Program) -> Iterator[Fault]:
    """A rank begins with a backward that waits for its own forward: it never starts."""
    if program.stages is None:
        return
    actions = program.stages.schedule.actions
    for rank, row in enumerate(actions):
        place = next(k for k, a in enumerate(row) if a.kind in "BI")
        other = (row[place], *row[:place], *row[place + 1 :])
        rest = (*actions[:rank], other, *actions[rank + 1 :])
        yield Fault(with_schedule(program, actions=rest), rules("schedule"), (str(row[place]),))


def wrong_owner(program: Program) -> Iterator[Fault]:
    """A stage is said to be on another rank than its actions."""
    if program.stages is None:
        return
    owner = program.stages.schedule.owner
    for stage in range(len(owner)):
        other = (*owner[:stage], (owner[stage] + 1) % program.stages.schedule.ranks, *owner[stage + 1 :])
        yield Fault(with_schedule(program, owner=other), rules("schedule"), (f"{stage}.",))


def doubled_action(program: Program) -> Iterator[Fault]:
    """A microbatch is computed twice, so that its gradients count twice."""
    if program.stages is None:
        return
    actions: tuple[tuple[Action, ...], ...] = program.stages.schedule.actions
    for rank, row in enumerate(actions):
        for place, action in enumerate(row):
            rest = (*actions[:rank], (*row[: place + 1], action, *row[place + 1 :]), *actions[rank + 1 :])
            yield Fault(with_schedule(program, actions=rest), rules("schedule"), (str(action),))


def missing_turn(program: Program) -> Iterator[Fault]:
    """One of two that run as one has a turn less than it stops: ranks would end a step at different ops."""
    assert program.stages is not None
    for pair, taken in program.stages.turns.items():
        for place in (0, len(taken) // 2):
            fewer = {**program.stages.turns, pair: (*taken[:place], *taken[place + 1 :])}
            made = replace(program, stages=replace(program.stages, turns=fewer))
            yield Fault(made, rules("schedule"), (f"F{pair[0]}",))


def paired_with_its_own(program: Program) -> Iterator[Fault]:
    """A forward runs as one with the backward of its own microbatch, which waits for it."""
    assert program.stages is not None
    schedule = program.stages.schedule
    for row in schedule.actions:
        for action, behind in pairwise(row):
            if action.kind == "F" and behind.kind == "B" and action not in schedule.paired:
                made = with_schedule(program, paired=schedule.paired | {action})
                yield Fault(made, rules("schedule"), (str(action), str(behind)))


KINDS: dict[str, Kind] = {
    "turn of a pair left out": Kind(missing_turn, ("pairs",)),
    "pair that waits for itself": Kind(paired_with_its_own, ("pairs",)),
    "missing action": Kind(drop_action, PIPES),
    "microbatches out of order": Kind(swapped_microbatches, PIPES),
    "backward before forward": Kind(backward_first, PIPES),
    "stage on another rank": Kind(wrong_owner, PIPES),
    "microbatch counted twice": Kind(doubled_action, PIPES),
}
