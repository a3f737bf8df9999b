"""Plan folders: ``plan.json`` and ``request.json``, written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from autoshard.errors import UsageError, VerificationError
from autoshard.ir.decode import decoded
from autoshard.options import PlanOptions, chosen_of
from autoshard.program.store import replaced_full
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.plan_json import plan_from_json, plan_to_json

_SCHEMA = 2
_FILES = frozenset(("plan.json", "request.json"))


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was asked for, so far as the plan does not say it.

    inputs: sizes of the target's example inputs. rules: path of the user's own rules, "" for none.
    """

    target: str
    inputs: dict[str, int]
    options: PlanOptions
    rules: str


def check_plan_folder(folder: Path, *, overwrite: bool) -> None:
    """UsageError if something other than an older plan would be lost."""
    if not folder.exists():
        return
    present = {p.name for p in folder.iterdir()} if folder.is_dir() else {""}
    if present and not (overwrite and present <= _FILES):
        raise UsageError(
            f"{folder} exists already",
            why="only a folder that holds nothing but an older plan is ever overwritten",
            hint="choose another folder, or pass --overwrite for a plan folder",
        )


def write_plan(folder: Path, plan: Plan, request: Request, *, overwrite: bool) -> None:
    """Write both files; the folder appears complete or not at all."""
    check_plan_folder(folder, overwrite=overwrite)
    document = {"schema": _SCHEMA, **msgspec.structs.asdict(request), "options": chosen_of(request.options)}
    with replaced_full(folder) as staging:
        (staging / "plan.json").write_text(plan_to_json(plan), encoding="utf-8")
        (staging / "request.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read_plan(folder: Path) -> tuple[Plan, Request]:
    """Raises UsageError if the folder holds no plan, VerificationError if what it holds is damaged."""
    try:
        plan_text = (folder / "plan.json").read_text(encoding="utf-8")
        request_text = (folder / "request.json").read_text(encoding="utf-8")
    except OSError as error:
        why = f"{error.strerror}: {error.filename}"
        raise UsageError(
            f"{folder} is not a plan folder", why=why, hint="autoshard plan ... -o DIR"
        ) from None
    try:
        raw = json.loads(request_text)
        if (schema := raw.pop("schema", None)) != _SCHEMA:
            raise ValueError(f"schema {schema}, this version reads {_SCHEMA}")
        request = decoded(raw, Request, "request.json")
    except (ValueError, TypeError, AttributeError, RecursionError, UsageError) as error:
        raise VerificationError(
            f"{folder}/request.json cannot be read", why=str(error), hint="plan again"
        ) from None
    return plan_from_json(plan_text), request
