"""The schedule of a pipeline as JSON text: one line of actions per rank."""

from __future__ import annotations

import json
import re
from typing import Any

from autoshard.errors import VerificationError
from autoshard.program.program import PipelineStages
from autoshard.schedules.check import check
from autoshard.schedules.schedule import Action, Schedule

_ACTION = re.compile(r"^([FBIW])(\d{1,6})\.(\d{1,6})(?:/(\d{1,6}))?$")


def schedule_to_json(stages: PipelineStages) -> str:
    """The same schedule gives the same text."""
    schedule = stages.schedule
    document = {
        "name": schedule.name,
        "microbatches": schedule.microbatches,
        "slices": schedule.slices,
        "position": stages.position,
        "owner": list(schedule.owner),
        "actions": [" ".join(map(str, actions)) for actions in schedule.actions],
    }
    return json.dumps(document, indent=1) + "\n"


def schedule_from_json(text: str) -> PipelineStages:
    """Raises VerificationError if the text is no schedule, or its ranks would wait for each other forever."""
    try:
        raw: dict[str, Any] = json.loads(text)
        actions = tuple(tuple(_action(word) for word in line.split()) for line in raw["actions"])
        owner = tuple(_number(rank) for rank in raw["owner"])
        schedule = Schedule(
            str(raw["name"]), _number(raw["microbatches"]), owner, actions, _number(raw["slices"])
        )
        position = _number(raw["position"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise VerificationError(f"not a schedule: {error}", hint="compile the program again") from None
    if idle := set(range(schedule.ranks)) - set(owner):
        raise VerificationError(
            f"rank {min(idle)} owns no stage",
            where=f"schedule {schedule.name}",
            hint="compile the program again",
        )
    # before anything is made for each of them
    if schedule.microbatches * schedule.slices * schedule.stages > sum(map(len, actions)):
        raise VerificationError(
            f"the schedule has too few actions for {schedule.microbatches} microbatches",
            hint="compile the program again",
        )
    check(schedule)
    return PipelineStages(schedule, position)


def _number(raw: object) -> int:
    """A whole number that counts something."""
    if not isinstance(raw, int) or isinstance(raw, bool) or raw < 0:
        raise ValueError(f"{raw!r} is no number")
    return raw


def _action(word: str) -> Action:
    match = _ACTION.match(word)
    if match is None:
        raise ValueError(f"{word!r} is no action")
    kind, stage, microbatch, part = match.groups()
    return Action(kind, int(stage), int(microbatch), int(part or 0))  # type: ignore[arg-type]
