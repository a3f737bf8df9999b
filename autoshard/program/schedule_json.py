"""The schedule of a pipeline as JSON text: one line of actions per rank."""

from __future__ import annotations

import json
import re

import msgspec

from autoshard.errors import VerificationError
from autoshard.ir.decode import Number, decoded
from autoshard.program.manifest import RECOMPILE
from autoshard.program.program import PipelineStages
from autoshard.schedules.check import check
from autoshard.schedules.schedule import Action, Schedule

_ACTION = re.compile(r"^([FBIW])(\d{1,6})\.(\d{1,6})(?:/(\d{1,6}))?$")


class _ScheduleFile(msgspec.Struct, forbid_unknown_fields=True):
    """actions: of every rank, with blanks between."""

    name: str
    microbatches: Number
    slices: Number
    position: Number
    owner: tuple[Number, ...]
    actions: list[str]


def schedule_to_json(stages: PipelineStages) -> str:
    """The same schedule gives the same text."""
    new = stages.schedule
    actions = [" ".join(map(str, row)) for row in new.actions]
    file = _ScheduleFile(new.name, new.microbatches, new.slices, stages.position, new.owner, actions)
    return json.dumps(msgspec.to_builtins(file), indent=1) + "\n"


def schedule_from_json(text: str) -> PipelineStages:
    """Raises VerificationError if the text is no schedule, or its ranks would wait for each other forever."""
    try:
        file = decoded(
            json.loads(text), _ScheduleFile, "schedule.json", fail=VerificationError, hint=RECOMPILE
        )
        actions = tuple(tuple(_action(word) for word in line.split()) for line in file.actions)
    except (ValueError, RecursionError) as error:
        raise VerificationError(f"not a schedule: {error}", hint=RECOMPILE) from None
    schedule = Schedule(file.name, file.microbatches, file.owner, actions, file.slices)
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
    return PipelineStages(schedule, file.position)


def _action(word: str) -> Action:
    match = _ACTION.match(word)
    if match is None:
        raise ValueError(f"{word!r} is no action")
    kind, stage, microbatch, part = match.groups()
    return Action(kind, int(stage), int(microbatch), int(part or 0))  # type: ignore[arg-type]
