"""The actions of a schedule by numbers, with what each waits for and gives, for whoever plays it often.

With n slices of microbatches in all stages together, what a forward takes has a number below n, what a
backward takes one from n to 2n, each in the order of the stages; 2n stands for what is there from the start.
A forward that is over has the number of what it took, an input gradient likewise; 2n is over from the start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from autoshard.schedules.schedule import Action, Kind, Schedule

#: kinds of actions in the order in which their costs stand, one after the other
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


class ScheduledAction(NamedTuple):
    """An action.

    costs: where its seconds stand, with those of all kinds in one row. needs: what has to be there. behind:
    what of its own rank has to be over. over: what is over when it is. gives: what another stage then gets,
    -1 for nothing. receiver: the rank of that stage, -1 if it is the action's own. pair: number of the two
    ranks. link: where the seconds of the message stand, those that go forward and then those that go back.
    """

    costs: int
    needs: int
    behind: int
    over: int
    gives: int
    receiver: int
    pair: int
    link: int
    action: Action


def steps_of(schedule: Schedule) -> tuple[tuple[ScheduledAction, ...], ...]:
    """The actions of every rank, in order."""
    return tuple(
        tuple([_step(schedule, rank, action) for action in row]) for rank, row in enumerate(schedule.actions)
    )


def turns_of(schedule: Schedule) -> tuple[tuple[tuple[ScheduledAction, ...], ...], ...]:
    """The same, with those that run as one together."""
    return tuple(
        tuple(tuple(_step(schedule, rank, action) for action in turn) for turn in row)
        for rank, row in enumerate(schedule.turns)
    )


def _step(schedule: Schedule, rank: int, action: Action) -> ScheduledAction:
    slices, stages, stage, kind = schedule.slices, schedule.stages, action.stage, action.kind
    m = schedule.microbatches * slices
    every = stages * m
    here = stage * m + schedule.unit(action)
    unit = stage * slices + action.slice
    costs = KINDS.index(kind) * stages * slices + unit
    if kind == "W":
        return ScheduledAction(costs, 2 * every, every + here, 2 * every, -1, -1, 0, 0, action)
    if kind == "F":
        needs, behind, over = here, 2 * every, here
        other, gives, link = stage + 1, here + m, unit
    else:
        # backward begins when all slices have gone forward
        needs, behind, over = every + here, here - action.slice + slices - 1, 2 * every
        if kind == "I":
            over = every + here
        other, gives, link = stage - 1, every + here - m, (stages - 1) * slices + unit - slices
    if not 0 <= other < stages:
        return ScheduledAction(costs, needs, behind, over, -1, -1, 0, 0, action)
    receiver = schedule.owner[other]
    if receiver == rank:
        return ScheduledAction(costs, needs, behind, over, gives, -1, 0, 0, action)
    return ScheduledAction(
        costs, needs, behind, over, gives, receiver, rank * schedule.ranks + receiver, link, action
    )
