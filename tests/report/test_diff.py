"""`autoshard diff`: what differs between two programs, and that nothing is said to differ that does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pipelines import pipeline
from planned import analysed, program
from typer.testing import CliRunner

from autoshard.api import compile_analysed
from autoshard.cli.main import app
from autoshard.cluster import Mesh, load_cluster
from autoshard.planner.planning import plan_analysed
from autoshard.program.program import Program
from autoshard.program.store import save_program
from autoshard.report.diff import Side, diff_of
from autoshard.search.plan.plan_json import plan_from_json
from autoshard.search.problem.pins import Pin
from autoshard.search.select.request import SearchRequest
from autoshard.simulate.step import estimate_step

CPU = load_cluster("cpu-gloo")
MESH = "dp=2,tp=2"


def side(name: str, made: Program) -> Side:
    return Side(name, made, CPU)


def pinned(*pins: str) -> Program:
    found = plan_analysed(
        analysed("llama"), [Mesh.parse(MESH)], CPU, request=SearchRequest(pins=tuple(map(Pin.parse, pins)))
    )
    return compile_analysed(found)


def test_the_same_program() -> None:
    made = program("llama", MESH)
    found = diff_of(side("a", made), side("b", made))
    assert found.identical and not found.notes and not found.model_wide and found.ops == ()
    assert all(row.a == row.b for row in (*found.figures, *found.payloads))
    plan = plan_from_json(made.plan)
    assert found.identical_decisions == len(plan.nodes) + sum(p.kind == "param" for p in made.signature.ports)


def test_a_pin_is_all_that_differs() -> None:
    glob = "model.layers.*.mlp.up_proj.weight"
    base, other = program("llama", MESH), pinned(f"{glob}=tp:S(1)")
    found = diff_of(side("a", base), side("b", other))
    assert not found.identical and found.same_model and found.same_axes and not found.model_wide
    row = next(r for r in found.parameters if r.what == glob)
    assert row.count == 2 and "tp:S(1)" in row.b and row.a != row.b
    one, two = plan_from_json(base.plan), plan_from_json(other.plan)
    differing = {k for k in one.nodes if one.nodes[k].outputs != two.nodes[k].outputs}
    assert found.ops is not None and len(found.ops) == len(differing) > 0
    steps = [estimate_step(p, CPU).seconds for p in (base, other)]
    assert (found.figures[0].name, found.figures[0].a, found.figures[0].b) == ("step time", *steps)
    # and the other way round
    back = diff_of(side("b", other), side("a", base))
    assert [(r.what, r.b, r.a) for r in back.parameters] == [(r.what, r.a, r.b) for r in found.parameters]


def test_parts_of_the_step_add_up() -> None:
    found = diff_of(side("a", program("llama", MESH)), side("b", program("llama", "fsdp=4")))
    for which in ("a", "b"):
        parts = [getattr(r, which) or 0.0 for r in found.figures if r.unit == "s" and r.name[0] == " "]
        whole = getattr(found.figures[0], which)
        assert sum(parts) == pytest.approx(whole)


def test_another_mesh_and_another_model() -> None:
    found = diff_of(side("a", program("llama", MESH)), side("b", program("llama", "fsdp=4")))
    assert found.same_model and not found.same_axes and found.ops is None
    assert [r.what for r in found.model_wide][:1] == ["mesh"] and any(
        "different axes" in n for n in found.notes
    )
    found = diff_of(side("a", program("llama", MESH)), side("b", program("gpt2", MESH)))
    assert not found.same_model and found.ops is None and not found.parameters
    assert any("graphs differ" in n for n in found.notes)
    assert sum("parameters are only in" in n for n in found.notes) == 2


def test_pipelines() -> None:
    one, two = (pipeline("llama-deep", 2, "dp=2", s, 4) for s in ("1f1b", "gpipe"))
    found = diff_of(side("a", one), side("b", two))
    assert [r.what for r in found.model_wide] == ["pipeline"] and not found.parameters
    alone = diff_of(side("a", one), side("b", program("llama-deep", "dp=2")))
    passes = next(r for r in alone.model_wide if r.what == "passes")
    assert "scatter_sends" in passes.a and "overlap_grad_reduce" in passes.b
    assert "1f1b" in found.model_wide[0].a and "gpipe" in found.model_wide[0].b


def test_the_command(tmp_path: Path) -> None:
    save_program(program("llama", MESH), tmp_path / "a")
    save_program(replace(pinned("*.up_proj.weight=tp:S(1)")), tmp_path / "b")

    def invoke(*words: str) -> Any:
        return CliRunner().invoke(app, ["diff", *words])

    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    result = invoke(a, b)
    assert result.exit_code == 0, result.output
    for word in ("step", "b - a", "parameter placement", "op placement", "identical: "):
        assert word in result.stdout
    assert "identical: all" in invoke(a, a).stdout and "placement" not in invoke(a, a).stdout
    found = json.loads(invoke(a, b, "--json").stdout)
    assert found["version"] == 2 and found["identical"] is False and found["parameters"]
    assert len(invoke(a, b, "--all").stdout.splitlines()) >= len(result.stdout.splitlines())
    assert invoke(a, str(tmp_path)).exit_code == 2


TWO_OUTPUTS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        h = self.first(x).relu()
        return self.last(h).pow(2).mean(), h


def make():
    return Net(), (torch.randn(4, 8),)
"""


def test_plans_of_one_model_captured_in_several_ways(tmp_path: Path) -> None:
    """Each is opened as it was captured: in its precision, and with gradients of the outputs it says."""
    (tmp_path / "net.py").write_text(TWO_OUTPUTS)
    runner, folders = CliRunner(), []
    for name, words in (("plain", ""), ("narrow", "--precision bf16"), ("all", "--differentiate all")):
        folders.append(str(tmp_path / name))
        made = f"plan {tmp_path}/net.py:make --mesh dp=2 -o {folders[-1]} {words}"
        assert runner.invoke(app, made.split()).exit_code == 0
    plain, narrow, both = folders
    for other, word in ((narrow, "parameters"), (both, "identical")):
        compared = runner.invoke(app, ["diff", plain, other])
        assert compared.exit_code == 0 and word in compared.stdout, compared.output
    assert runner.invoke(app, ["explain", both, "first.weight"]).exit_code == 0
    program = str(tmp_path / "program")
    refused = runner.invoke(app, ["compile", both, "-o", program])
    assert refused.exit_code == 2 and f"compile --plan {both}" in refused.stderr
    assert runner.invoke(app, ["compile", "--plan", both, "-o", program]).exit_code == 0
