"""The schedule of a pipeline as JSON text: one line of actions per rank."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby

import msgspec

from autoshard.errors import VerificationError
from autoshard.ir.decode import Number, decoded
from autoshard.program.manifest import RECOMPILE
from autoshard.program.program import PipelineStages
from autoshard.schedules.check import check
from autoshard.schedules.schedule import Action, Schedule

_RUN = re.compile(r"^([FB])(\d{1,6})$")
_ACTION = re.compile(r"^([FBIW])(\d{1,6})\.(\d{1,6})(?:/(\d{1,6}))?$")


class _PairTurns(msgspec.Struct, forbid_unknown_fields=True):
    """pairs: ``3+1`` for the forward of stage 3 and the backward of stage 1.

    turns: ``F2 B1 F1`` for two stops of the forward, one of the backward and one of the forward.
    """

    pairs: list[str]
    turns: str


class _ScheduleFile(msgspec.Struct, forbid_unknown_fields=True):
    """actions: of every rank, with blanks between, and ``+`` where two run as one. turns: of these.
    parts: see `PipelineStages`."""

    name: str
    microbatches: Number
    slices: Number
    position: Number
    owner: tuple[Number, ...]
    actions: list[str]
    turns: list[_PairTurns] = []
    parts: tuple[Number, ...] = ()


def schedule_to_json(stages: PipelineStages) -> str:
    """The same schedule gives the same text."""
    new = stages.schedule
    actions = [" ".join("+".join(map(str, turn)) for turn in row) for row in new.turns]
    alike: dict[tuple[int, ...], list[str]] = {}
    for (forward, backward), taken in stages.turns.items():
        alike.setdefault(taken, []).append(f"{forward}+{backward}")
    turns = [_PairTurns(pairs, _runs(taken)) for taken, pairs in alike.items()]
    numbers = (new.name, new.microbatches, new.slices, stages.position, new.owner)
    file = _ScheduleFile(*numbers, actions, turns, stages.parts)
    return json.dumps(msgspec.to_builtins(file), indent=1) + "\n"


def schedule_from_json(text: str) -> PipelineStages:
    """Raises VerificationError if the text is no schedule, or its ranks would wait for each other forever."""
    try:
        file = decoded(
            json.loads(text), _ScheduleFile, "schedule.json", fail=VerificationError, hint=RECOMPILE
        )
        turns = [[[_action(a) for a in word.split("+")] for word in line.split()] for line in file.actions]
        actions = tuple(tuple(action for turn in row for action in turn) for row in turns)
        paired = frozenset(a for row in turns for turn in row for a in turn[:-1])
        taken = {_pair(pair): _unrolled(each.turns) for each in file.turns for pair in each.pairs}
    except (ValueError, RecursionError) as error:
        raise VerificationError(f"not a schedule: {error}", hint=RECOMPILE) from None
    schedule = Schedule(file.name, file.microbatches, file.owner, actions, file.slices, paired)
    if idle := set(range(schedule.ranks)) - set(file.owner):
        raise VerificationError(
            f"rank {min(idle)} owns no stage",
            where=f"schedule {schedule.name}",
            hint=RECOMPILE,
        )
    # before anything is made for each of them
    if schedule.microbatches * schedule.slices * schedule.stages > sum(map(len, actions)):
        raise VerificationError(
            f"the schedule has too few actions for {schedule.microbatches} microbatches",
            hint=RECOMPILE,
        )
    check(schedule)
    if set(schedule.pairs) != set(taken):
        raise VerificationError("the schedule has other pairs than turns of pairs", hint=RECOMPILE)
    if file.parts and (len(file.parts) != file.slices or min(file.parts) < 1):
        raise VerificationError("the schedule has other slices than parts of slices", hint=RECOMPILE)
    return PipelineStages(schedule, file.position, taken, file.parts)


def _runs(taken: Sequence[int]) -> str:
    return " ".join(f"{'FB'[part]}{len(list(run))}" for part, run in groupby(taken))


def _unrolled(text: str) -> tuple[int, ...]:
    result: list[int] = []
    for word in text.split():
        match = _RUN.match(word)
        if match is None:
            raise ValueError(f"{word!r} is no turn of a pair")
        result += ["FB".index(match[1])] * int(match[2])
    return tuple(result)


def _pair(word: str) -> tuple[int, int]:
    forward, _, backward = word.partition("+")
    return int(forward), int(backward)


def _action(word: str) -> Action:
    match = _ACTION.match(word)
    if match is None:
        raise ValueError(f"{word!r} is no action")
    kind, stage, microbatch, part = match.groups()
    return Action(kind, int(stage), int(microbatch), int(part or 0))  # type: ignore[arg-type]
