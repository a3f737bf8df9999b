"""Plan folders: what is written is read again, and damage is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autoshard.cli.folders import Request, read_plan, write_plan
from autoshard.errors import VerificationError
from autoshard.options import PlanOptions
from autoshard.search.plan.plan_json import plan_from_json, plan_to_json

PLAN = Path(__file__).parents[1] / "golden" / "beside-messages.plan.json"
REQUEST = Request("t.py", {"batch": 4}, PlanOptions(pins=("a=tp:S(0)",), memory=5), "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_plan(tmp_path / "p", plan_from_json(PLAN.read_text()), REQUEST, overwrite=False)
    return tmp_path / "p"


def test_what_is_written_is_read_again(folder: Path) -> None:
    plan, request = read_plan(folder)
    assert request == REQUEST and plan_to_json(plan) == PLAN.read_text()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"schema": 1}, "schema 1, this version reads 2"),
        ({"inputs": {"batch": "4"}}, "batch is '4'"),
        ({"options": {"memry": 5}}, "did you mean 'memory'"),
        ({"options": {"chunks": True}}, "chunks is True"),
        ({"options": {"devices": 0}}, "devices is 0"),
        ({"target": None}, "target is None"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_damaged_requests_are_refused(folder: Path, changed: dict[str, Any], words: str) -> None:
    path = folder / "request.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(VerificationError) as caught:
        read_plan(folder)
    assert words in str(caught.value)


@pytest.mark.parametrize("change", ["nodes", "why", "optimality", "budget_bytes", "recompute", "mesh"])
def test_damaged_plans_are_refused(change: str) -> None:
    raw = json.loads(PLAN.read_text())
    for value in ({"a": []}, [[1]], "", True):
        if value == "" and change == "mesh":
            continue
        with pytest.raises(VerificationError):
            plan_from_json(json.dumps({**raw, change: value}))
    del raw[change]
    with pytest.raises(VerificationError, match=f"missing: {change}"):
        plan_from_json(json.dumps(raw))
