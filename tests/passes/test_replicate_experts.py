"""Experts that many tokens choose are computed on every rank for its own tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from architecture_runner import errors_of
from lockstep_check import RTOL
from slow_links import without_latency
from test_chunk_experts import _nodes, _program, _small
from typer.testing import CliRunner

from autoshard.capture.capture import capture
from autoshard.cli.main import app
from autoshard.errors import UsageError
from autoshard.ir.routing import Routing, most_chosen, of_replicas, parse_replicas
from autoshard.planner.analysis import Analysis, analyse
from autoshard.report.routing import routed_steps
from autoshard.search.plan.plan_json import plan_from_json
from autoshard.simulate.step import estimate_step
from autoshard.verify.static import verify_static

pytest.importorskip("transformers")
#: of two layers
ROWS = {"mixtral": "1,7;0,15", "gpt-oss": "1,7;0,2", "deepseek": "1,7;0,2"}


def _analysed(name: str = "mixtral", rows: str = "", chunks: int = 1) -> Analysis:
    model, inputs = _small(name)
    return analyse(capture(model, (), inputs), replicate_experts=rows or ROWS[name], expert_chunks=chunks)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *(("mixtral", mesh) for mesh in ("ep=4", "ep=2,tp=2", "fsdp=2,ep=2", "tp=2")),
        ("gpt-oss", "ep=4"),
        ("deepseek", "ep=2,tp=2"),
    ],
)
def test_equal_to_eager(name: str, mesh: str) -> None:
    model, inputs = _small(name)
    program = _program(_analysed(name), mesh)
    # one text for both layers, each with other experts
    assert {tuple(s.shape) for k, s in program.constants.items() if k.endswith("numbers")} == {(2,)}
    assert verify_static(program).ok
    assert max(errors_of(model, inputs, program).values()) < RTOL


def test_other_tokens_travel_in_chunks() -> None:
    model, inputs = _small("mixtral")
    program = _program(_analysed(chunks=2), "ep=4")
    assert len(_nodes(program, "comm.expert_dispatch.")) == 4
    assert max(errors_of(model, inputs, program).values()) < RTOL


@pytest.mark.parametrize("expert", [0, 7])
def test_all_tokens_choose_a_replicated_expert_or_none_does(expert: int) -> None:
    model, inputs = _small("mixtral")
    with torch.no_grad():
        for parameter in (p for n, p in model.named_parameters() if n.endswith("gate.weight")):
            # the first two experts are chosen, by tokens of either sign
            parameter.zero_()
    program = _program(_analysed(rows=f"{expert}"), "ep=4")
    assert max(errors_of(model, inputs, program).values()) < RTOL


def test_tokens_of_replicated_experts_do_not_travel() -> None:
    """Those of others are exchanged as before: slots of 16 experts."""
    program = _program(_analysed(), "ep=4")
    assert {n.types[0].shape[0] for n in _nodes(program, "comm.expert_dispatch.")} == {16 * 32}  # type: ignore[union-attr]
    assert {n.types[0].shape[0] for n in _nodes(program, "autoshard.dispatch.")} == {2 * 32}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("1,1", "no different experts"),
        ("16", "no different experts"),
        ("1;2;3", "3 rows, and 2 layers"),
        ("1;2,3", "unlike many"),
        ("one", "no experts of layers"),
        (",".join(map(str, range(16))), "some but not all"),
    ],
)
def test_rows_that_are_none(rows: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        _analysed(rows=rows)


@pytest.mark.parametrize("products", ["float8-rowwise", "float8-tensorwise"])
def test_casts_of_all_experts_are_refused(products: str) -> None:
    model, inputs = _small("mixtral")
    with pytest.raises(UsageError, match="takes all experts of a layer at once"):
        analyse(capture(model, (), inputs), replicate_experts="1,7", products=products)


def test_a_model_without_experts() -> None:
    joint = capture(torch.nn.Linear(4, 4), (torch.randn(4, 4),), {})
    with pytest.raises(UsageError, match="no experts that tokens can be exchanged for"):
        analyse(joint, replicate_experts="0")


def test_loads_with_replicas() -> None:
    counts = (8.0, 6.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0)
    routing = Routing((counts,), replicas=((0, 1),))
    # others: 0 of 24 on the first of four ranks, 4 on the last
    assert routing.load(2, 8, 4) == pytest.approx(4 * 4 / 24)
    assert routing.load(2, 8, 1) == pytest.approx(10 / 24)
    # 14 of 24 choose one of the two, which is as many as 14 / 24 * 8 / 2 times those of even routing
    assert routing.load(*of_replicas(2, 8, 2), 1) == pytest.approx(14 / 24 * 8 / 2)
    both = replace(routing, layers=(counts, (1.0,) * 8))
    assert both.fullest_layer(4) == replace(routing, layers=((1.0,) * 8,))
    assert most_chosen([counts, counts[::-1]], 2) == "0,1;6,7"
    assert parse_replicas("0,1;6,7") == ((0, 1), (6, 7))


def test_skewed_routing_takes_less_with_replicas(tmp_path: Path) -> None:
    counts = [[60, 50, *range(15, 1, -1)], [1] * 16]
    (tmp_path / "load.json").write_text(json.dumps(counts))
    file, cluster = str(tmp_path / "load.json"), without_latency()
    loads = []
    for rows in ("", most_chosen(counts, 2)):
        model, inputs = _small("mixtral")
        analysis = analyse(capture(model, (), inputs), replicate_experts=rows)
        program = _program(analysis, "ep=4", replicate_experts=rows)
        assert plan_from_json(program.plan).replicate_experts == rows
        result = routed_steps(program, cluster, estimate_step(program, cluster), [file])
        assert [r.name for r in result] == ["even", file, f"{file}, experts placed by load"][: 2 + (not rows)]
        loads.append(result[1].load)
    assert loads[1] < loads[0]


def test_the_command_takes_those_that_are_chosen_most(tmp_path: Path) -> None:
    (tmp_path / "load.json").write_text(json.dumps([[9, 1, 8, 2] * 4, [1, 9, 2, 8] * 4]))
    model = tmp_path / "model.py"
    model.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_chunk_experts import _small\n"
        "def model():\n    built, inputs = _small('mixtral')\n    return built, inputs\n"
    )
    folder = tmp_path / "program"
    args = ["compile", f"{model}:model", "--mesh", "ep=4", "--cluster", "cpu-gloo", "-o", str(folder)]
    told = CliRunner().invoke(app, [*args, "--replicate-experts", f"{tmp_path / 'load.json'}:2"])
    assert told.exit_code == 0, told.output
    plan = plan_from_json((folder / "plan.json").read_text())
    assert plan.replicate_experts == "0,4;1,5"
    wrong = CliRunner().invoke(app, [*args, "--replicate-experts", f"{tmp_path / 'load.json'}:no"])
    assert wrong.exit_code == 2 and "'no' is no number of experts" in wrong.output
