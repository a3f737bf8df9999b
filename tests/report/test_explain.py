"""`autoshard explain`: reasons that fit the plan, chains that end where it was decided, alternatives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pipelines import pipeline
from planned import analysed, planned, program
from slow_links import slow_cluster
from typer.testing import CliRunner

from autoshard.api import compile_analysed
from autoshard.cli.main import app
from autoshard.cli.why_not import alternative_of, check_axes, pin_for
from autoshard.cluster import Mesh, load_cluster
from autoshard.errors import UsageError
from autoshard.ir.placement import R, Shard
from autoshard.options import PlanOptions
from autoshard.planner.planning import plan_analysed
from autoshard.program.program import Program
from autoshard.program.store import load_program, save_program
from autoshard.program.text import program_text
from autoshard.report.chain import Chains
from autoshard.report.decided import Decisions, starred_label
from autoshard.report.document import document
from autoshard.report.dot import dot_text
from autoshard.report.explain import explain_name
from autoshard.report.explain_text import chain_lines, explanation_lines
from autoshard.report.html import page
from autoshard.report.lookup import Place, ProgramIndex
from autoshard.report.what_if import Solver
from autoshard.search.plan.plan import why_key
from autoshard.search.problem.pins import Pin

CPU = load_cluster("cpu-gloo")
MESH = "dp=2,tp=2"
Invoke = Callable[..., Any]


def llama() -> Program:
    return program("llama", MESH, reasons=True)


# -- decisions under their names ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mixtral"])
def test_ops_of_the_dump_are_those_of_the_plan(name: str) -> None:
    found, folded = Decisions.of(program(name, MESH, reasons=True)), analysed(name).folded
    assert set(found.ops) == set(found.plan.nodes)
    counts = folded.counts()
    for (segment, number), op in found.ops.items():
        node = folded.segments[segment].nodes[number]
        assert (op.name, op.module, op.source) == (node.name, node.origin.fqn, node.origin.source)
        assert op.calls == counts[segment]


def test_classes_of_ports_survive_the_folder(tmp_path: Path) -> None:
    made = llama()
    save_program(made, tmp_path / "program")
    read = load_program(tmp_path / "program")
    assert read.classes == made.classes and len(read.classes) == len(made.signature.ports)
    flow = analysed("llama").flow
    for port in analysed("llama").folded.joint.ports:
        names = {p.target: p.name for p in made.signature.ports if p.kind == port.kind}
        assert read.classes[names[port.target]] == flow.class_of[port.name][1]


def test_reasons_of_ops_are_exact() -> None:
    found = Decisions.of(llama())
    notes = {
        (segment, node.name): note.why
        for segment, lowered in llama().lowered.segments.items()
        for node, note in zip(lowered.graph.nodes, llama().notes[segment], strict=True)
    }
    checked = 0
    for (segment, number), op in found.ops.items():
        note = notes.get((segment, op.name))
        if note:
            assert found.why_of_op(segment, op.name, note) == found.plan.why[why_key("node", segment, number)]
            checked += 1
    assert checked > 100
    # a note that the plan does not know is repeated, not replaced
    assert found.why_of_op("layers_fwd", "no_such_value", "because").reason == "because"


def test_the_last_number_of_a_label_is_that_of_the_layer() -> None:
    assert starred_label("model.layers.3") == "model.layers.*"
    assert starred_label("blocks.1.layers.3") == "blocks.1.layers.*"
    assert starred_label("head") == "head"


# -- names --------------------------------------------------------------------------------------------------


def test_what_names_mean() -> None:
    index = ProgramIndex(llama())
    weight = "model.layers.1.self_attn.q_proj.weight"
    assert index.find(weight).kind == "parameter"
    assert index.find("layers.1.self_attn.q_proj.weight").name == weight
    assert index.find("model.layers.1.mlp").kind == index.find("layers.*.mlp").kind == "module"
    assert index.find("input_ids").kind == "input"
    assert index.find("q_proj").name == "model.layers.0.self_attn.q_proj"  # all layers decide alike
    segment = next(iter(llama().lowered.segments))
    value = llama().lowered.segments[segment].graph.nodes[0].name
    assert index.find(f"{segment}/{value}").kind == "value"
    with pytest.raises(UsageError, match="nothing in the program") as error:
        index.find("layers.0.self_attn.q_prj")
    assert "q_proj" in error.value.hint
    with pytest.raises(UsageError, match="more than one thing"):
        index.find("weight")


# -- explanations -------------------------------------------------------------------------------------------


def test_a_parameter() -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    found = explain_name(llama(), CPU, name)
    plan, flow = planned("llama", MESH, reasons=True).plan, analysed("llama").flow
    key = next(k for k, c in flow.classes.items() if any(p.target == name for p in c.ports))
    why = plan.why[why_key("param", key[1])]
    (choice,) = found.parameters
    assert (choice.reason, choice.alternative, choice.margin) == (why.reason, why.alternative, why.margin)
    assert set(found.equivalent) == {p.target for p in flow.classes[key].ports} and choice.count == 2
    assert ".py:" in found.source
    assert any(
        move.axis == "dp" and "all_reduce" in move.kind for move in found.collectives
    )  # of its gradient


@pytest.mark.parametrize("name, mesh", [("llama", MESH), ("gpt2", "fsdp=2,tp=2"), ("t5", MESH)])
def test_chains_end_where_a_placement_begins(name: str, mesh: str) -> None:
    """Every link is a value whose placement is what the link says; the last one is an origin."""
    made = program(name, mesh)
    chains = Chains(Decisions.of(made), ProgramIndex(made))
    names = Mesh.parse(mesh).names
    seen = 0
    for number, item in enumerate(made.lowered.main):
        segment = made.lowered.segments.get(getattr(item, "segment", ""))
        for node in [] if segment is None else segment.graph.nodes:
            place = Place(number, node.name)
            for axis, chain in enumerate(chains.of(place)):
                assert chain.axis == names[axis] and chain.end and chain.links
                assert chain.placement == str(chains.layout(place)[axis]) == chain.links[0].placement
                assert list(chain_lines(chain))[-1].strip()
                seen += 1
    assert seen > 200


def test_the_batch_axis_leads_to_the_input() -> None:
    found = explain_name(llama(), CPU, "layers.1.mlp.down_proj")
    chain = next(c for c in found.chains if c.axis == "dp")
    assert chain.links[-1].value == "input_ids" and chain.end == "dp shards the batch"
    assert all(link.placement.startswith("S(0") for link in chain.links if not link.times)


def test_a_deep_model_is_told_once() -> None:
    made = program("llama-deep", "dp=2")
    chain = explain_name(made, CPU, "lm_head").chains[0]
    assert [link for link in chain.links if link.times] and len(chain.links) < 30
    assert chain.links[-1].value == "input_ids"


def test_a_value_is_named_as_the_plan_names_it() -> None:
    """So that it can be pinned, however passes cut its segment."""
    decided, index = Decisions.of(llama()), ProgramIndex(llama())
    op = next(o for o in decided.ops.values() if o.module.endswith("mlp.up_proj") and o.op == "mm")
    for name in (op.name, f"{op.segment}/{op.name}"):
        assert index.find(name).kind == "value"
        found = explain_name(llama(), CPU, name)
        assert found.name == f"{op.segment}/{op.name}"
    assert pin_for(found, (("tp", R),)).glob == found.name


def test_a_module_in_words() -> None:
    text = "\n".join(explanation_lines(explain_name(llama(), CPU, "layers.0.self_attn")))
    assert "same decision in 2 layers: model.layers.*.self_attn" in text
    for word in ("reason: ", "is propagated from", "modeling_llama.py:", "dp shards the batch"):
        assert word in text


def test_a_pipeline() -> None:
    made = pipeline("llama-deep", 2, "dp=2", "1f1b", 4)
    found = explain_name(made, CPU, "layers.3.mlp.up_proj")
    assert found.parameters and found.chains[0].links[-1].value == "input_ids"


def by_level() -> Program:
    """Collectives level by level, fewer bits and kernels: axes and ops that the plan does not name."""
    cluster = slow_cluster(nodes_of=2)
    found = plan_analysed(analysed("llama"), [Mesh.parse("fsdp=4")], cluster)
    return compile_analysed(found, hierarchy="levels", allow="int8-weights,int8-gradients", kernels=True)


def test_a_program_whose_axes_were_taken_apart() -> None:
    made = by_level()
    assert made.mesh != "fsdp=4" and "q_bucket" in program_text(made)
    names = Mesh.parse(made.mesh).names
    for name in ("layers.0.mlp.up_proj.weight", "layers.0.mlp", "input_ids", "lm_head"):
        found = explain_name(made, CPU, name)
        assert "\n".join(explanation_lines(found))
        assert found.kind == "parameter" or [c.axis for c in found.chains] == list(names)
    weight = explain_name(made, CPU, "layers.0.mlp.up_proj.weight")
    assert {axis for move in weight.collectives for axis in move.axis.split("+")} <= set(
        names
    ) and weight.parameters[0].layout
    found = document(made, CPU)
    assert dot_text(found) and page(found)
    assert {axis for row in found["collectives"] for axis in row["axis"].split("+")} <= set(names)


# -- alternatives -------------------------------------------------------------------------------------------


def test_how_alternatives_are_written() -> None:
    assert alternative_of("tp=Replicate", "x") == (("tp", R),)
    assert alternative_of("dp=R, tp=Shard(1)", "x") == (("dp", R), ("tp", Shard(1)))
    assert alternative_of("tp:S(0,outer=8)", "x") == (("tp", Shard(0, 8)),)
    assert alternative_of("mesh=dp=2,tp=4", None) == Mesh.parse("dp=2,tp=4")
    for text in ("tp", "tp=Whole", "=R"):
        with pytest.raises(UsageError, match="cannot be read"):
            alternative_of(text, "x")
    with pytest.raises(UsageError, match="needs a name"):
        alternative_of("tp=R", None)


def solver(name: str = "llama", mesh: str = MESH) -> Solver:
    found = planned(name, mesh, reasons=True)
    return Solver(found.analysis, found.plan, found.cluster, PlanOptions(), lambda _: None)


def test_the_next_best_choice_costs_its_margin() -> None:
    """A margin is what the search says that the next best choice costs; forced, it does."""
    found = Decisions.of(llama())
    of_layer = [
        (why.margin, op, why.alternative)
        for key, op in found.ops.items()
        if op.segment.endswith("layers_fwd") and (why := found.plan.why[why_key("node", *key)]).margin > 1e-6
    ]
    margin, op, alternative = max(of_layer, key=lambda row: row[0])
    wanted = alternative_of(",".join(alternative.split()), "x")
    assert not isinstance(wanted, Mesh)
    answer = solver().pinned(Pin(f"{op.segment}/{op.name}", wanted))
    assert answer.same_as_stored and answer.seconds == pytest.approx(margin, rel=1e-6)
    assert any(row.what.startswith(f"{op.segment}/{op.name} ") for row in answer.changed)


def test_what_is_chosen_already_changes_nothing() -> None:
    found = explain_name(llama(), CPU, "input_ids")
    answer = solver().pinned(pin_for(found, (("dp", Shard(0)),)))
    assert answer.seconds == 0 and not answer.changed and answer.same_as_stored


def test_what_cannot_be_is_said() -> None:
    found = explain_name(llama(), CPU, "model.layers.0.mlp.up_proj.weight")
    answer = solver().pinned(pin_for(found, (("dp", Shard(0)),)))
    assert answer.forced is None and "is infeasible" in answer.why_not and answer.seconds is None
    with pytest.raises(UsageError, match="no axis"):
        check_axes((("xx", R),), Mesh.parse(MESH))


def test_another_mesh() -> None:
    answer = solver().on_mesh(Mesh.parse("dp=4"))
    assert answer.forced is not None and answer.forced.mesh == "dp=4"
    assert any(row.what == "mesh" for row in answer.changed)


# -- the command --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("explain") / "program"
    save_program(llama(), place)
    return str(place)


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["explain", *words])


def test_the_command_on_a_program(folder: str) -> None:
    result = invoke(folder, "layers.0.self_attn.q_proj")
    assert result.exit_code == 0, result.output
    assert "tp:" in result.stdout and "reason: " in result.stdout
    found = json.loads(invoke(folder, "layers.0.self_attn.q_proj", "--json").stdout)
    assert found["version"] == 2 and found["explanation"]["kind"] == "module"
    assert invoke(folder, "no.such.thing").exit_code == 2
    assert invoke(folder).exit_code == 2
    assert invoke(str(Path(folder).parent), "x").exit_code == 2
    # compiled from Python: there is no model to plan again
    result = invoke(folder, "layers.0.mlp", "--why-not", "tp=R")
    assert result.exit_code == 2 and "which model" in result.stderr


def test_the_command_on_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)\n\n"
        "    def forward(self, x):\n"
        "        return self.down(torch.relu(self.up(x))).square().mean()\n\n\n"
        "def net():\n    return Net(), torch.randn(8, 16)\n"
    )
    made = CliRunner().invoke(
        app, ["plan", "t.py:net", "--mesh", MESH, "--pin", "down.weight=tp:R", "-o", "plan"]
    )
    assert made.exit_code == 0, made.output
    result = invoke("plan", "up", "--why-not", "tp=Replicate", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert "t.py:11" in found["explanation"]["source"]
    assert found["why_not"]["feasible"] and found["why_not"]["same_as_stored"]  # the pin was not forgotten
    text = invoke("plan", "up.weight", "--why-not", "tp=Replicate").stdout
    assert "why not up.weight=tp:R?" in text and "step " in text
