"""What the ranks of a pipeline send each other, action by action."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from autoshard.ir.boundaries import Wire, wires_of
from autoshard.ir.lowered import Phase
from autoshard.program.program import Program
from autoshard.schedules.schedule import Action, Schedule

#: stage, phase, slice
_Part: TypeAlias = "tuple[int, str, int]"


@dataclass(frozen=True, slots=True)
class StageSend:
    """A value of one microbatch on its way. number: its place among all from this sender to this receiver."""

    sender: int
    receiver: int
    number: int
    value: str
    microbatch: int


@dataclass(frozen=True)
class RankAction:
    """One action of a rank: the parts it runs, what must have arrived before, and what it sends after.

    paired: whether it runs as one with the action behind it.
    """

    action: Action
    phases: tuple[Phase, ...]
    receives: tuple[StageSend, ...]
    sends: tuple[StageSend, ...]
    paired: bool = False


@dataclass(frozen=True)
class PipelineMessages:
    """The moves of every pipeline rank of a program, in order. forward_only: without any backward."""

    program: Program
    forward_only: bool = False

    @cached_property
    def moves(self) -> tuple[tuple[RankAction, ...], ...]:
        assert self.program.stages is not None
        schedule = self.program.stages.schedule
        wires = wires_of(self.program.lowered, {p.name for p in self.program.signature.ports})
        if self.forward_only:
            orders = tuple(tuple(a for a in row if a.kind == "F") for row in schedule.actions)
            schedule = replace(schedule, actions=orders, paired=frozenset())
            wires = tuple(w for w in wires if w.phase == w.into == "forward")
        leaving = _by_part(wires, schedule)
        sent: dict[tuple[int, int, str], StageSend] = {}
        numbers: dict[tuple[int, int], int] = {}
        sends: dict[tuple[int, Action], list[StageSend]] = {}
        for rank, actions in enumerate(schedule.actions):
            for action in actions:
                for phase in phases_of(action, schedule):
                    for value, receiver in leaving.get((action.stage, phase, action.slice), ()):
                        number = numbers.get((rank, receiver), 0)
                        numbers[rank, receiver] = number + 1
                        message = StageSend(rank, receiver, number, value, action.microbatch)
                        sent[receiver, action.microbatch, value] = message
                        sends.setdefault((rank, action), []).append(message)
        entering: dict[_Part, list[str]] = {}
        for wire in wires:
            if schedule.owner[wire.source] != schedule.owner[wire.target]:
                entering.setdefault((wire.target, wire.into, wire.into_slice), []).append(wire.value)
        return tuple(
            self._rank(rank, actions, schedule, sends, sent, entering)
            for rank, actions in enumerate(schedule.actions)
        )

    def _rank(
        self,
        rank: int,
        actions: tuple[Action, ...],
        schedule: Schedule,
        sends: Mapping[tuple[int, Action], list[StageSend]],
        sent: Mapping[tuple[int, int, str], StageSend],
        entering: Mapping[_Part, list[str]],
    ) -> tuple[RankAction, ...]:
        moves = []
        have: set[StageSend] = set()
        for action in actions:
            phases = phases_of(action, schedule)
            receives: list[StageSend] = []
            for phase in phases:
                for value in entering.get((action.stage, phase, action.slice), ()):
                    message = sent[rank, action.microbatch, value]
                    if message not in have:
                        have.add(message)
                        receives.append(message)
            receives.sort(key=lambda m: (m.sender, m.number))
            sent_after, paired = tuple(sends.get((rank, action), ())), action in schedule.paired
            moves.append(RankAction(action, phases, tuple(receives), sent_after, paired))
        return tuple(moves)


def phases_of(action: Action, schedule: Schedule) -> tuple[Phase, ...]:
    """The parts of a stage that an action runs, in order."""
    match action.kind:
        case "F":
            return ("forward",)
        case "I":
            return ("backward",)
        case "W":
            return ("weight",)
        case "B":
            return ("backward", "weight") if schedule.splits_backward else ("backward",)


def _by_part(wires: tuple[Wire, ...], schedule: Schedule) -> dict[_Part, list[tuple[str, int]]]:
    """Part -> (value, receiving rank) of what leaves it; a rank is sent a value once."""
    result: dict[_Part, dict[tuple[str, int], None]] = {}
    for wire in wires:
        sender, receiver = schedule.owner[wire.source], schedule.owner[wire.target]
        if sender != receiver:
            result.setdefault((wire.source, wire.phase, wire.slice), {})[wire.value, receiver] = None
    return {part: list(values) for part, values in result.items()}


def moves_of(program: Program, forward_only: bool = False) -> tuple[tuple[RankAction, ...], ...]:
    """What every pipeline rank does; a program of one stage runs one microbatch after the other."""
    if program.stages is not None:
        return PipelineMessages(program, forward_only).moves
    split = any(p.phase == "weight" for p in program.lowered.parts)
    back = ("backward", "weight") if split else ("backward",)
    moves: list[RankAction] = []
    for m in range(program.microbatches):
        moves.append(RankAction(Action("F", 0, m), ("forward",), (), ()))
        if not forward_only:
            moves.append(RankAction(Action("B", 0, m), back, (), ()))  # type: ignore[arg-type]
    return (tuple(moves),)
