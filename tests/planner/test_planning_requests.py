"""Plans beside those made by hand, the same every time, stopped early; and what is refused."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import BATCH, family
from planned import analysed
from typer.testing import CliRunner

import autoshard
from autoshard.cli.folders import read_plan
from autoshard.cli.main import app
from autoshard.cli.output import Progress
from autoshard.cluster import Mesh, load_cluster, mesh_candidates
from autoshard.errors import InfeasibleError, UsageError
from autoshard.ir.placement import Placement, Shard
from autoshard.options import PlanOptions
from autoshard.planner.candidates import candidate_meshes
from autoshard.planner.planning import plan_analysed
from autoshard.planner.source import Source
from autoshard.search.plan.plan_json import plan_to_json
from autoshard.search.problem.decisions import ValueVar
from autoshard.search.select.baselines import _whole_between_layers
from autoshard.search.select.choose import Searches, _Search, choose
from autoshard.search.select.request import CandidateSolution, SearchRequest
from autoshard.search.solve.configuration import Staged
from autoshard.search.solve.formulate import formulate, layer_calls
from autoshard.search.solve.solve_placements import PlacementSolution, place
from autoshard.search.solve.step_config import StepConfig
from autoshard.search.solve.tune import tune

CLUSTER = "cpu-gloo"
MESH = "dp=2,tp=2"


# -- baselines
# ------------------------------------------------------------------------------------------------


@functools.cache
def _against(name: str, cluster: str) -> CandidateSolution:
    machine = load_cluster(cluster)
    return choose(
        analysed(name).model, mesh_candidates(machine, 4), machine, SearchRequest(batch=BATCH, baselines=True)
    )


@pytest.mark.parametrize(
    ("name", "cluster"), [("llama", "cpu-gloo"), ("gpt2", "h100-dgx"), ("vit", "h100-dgx")]
)
def test_no_baseline_is_faster(name: str, cluster: str) -> None:
    found = _against(name, cluster)
    assert [r.name for r in found.baselines] == ["data parallel", "FSDP2", "Megatron-LM (SC'21)"]
    assert [r.mesh for r in found.baselines] == ["dp=4", "fsdp=4", "dp=4"]
    for baseline in found.baselines:
        assert baseline.seconds is not None
        assert baseline.seconds / found.placements.seconds >= 1 - 1e-9
        assert baseline.seconds >= found.bound


class _Large:
    """A judge to whom nothing fits but data parallelism, or not even that; what it was asked of."""

    def __init__(self, *fit: str) -> None:
        self.fit_, self.asked = fit, list[str]()

    def seconds(self, found: CandidateSolution) -> float:
        return found.placements.seconds

    def fit(
        self, found: CandidateSolution, limit: float, spent: Callable[[], bool] = bool
    ) -> CandidateSolution:
        self.asked.append(found.configuration.name)
        if found.configuration.name not in self.fit_:
            raise InfeasibleError("too large")
        return found

    def waits(self, found: CandidateSolution) -> float:
        return 0.0

    def measured(self, found: CandidateSolution) -> float | None:
        return None


def test_a_baseline_that_seems_faster_has_to_fit() -> None:
    """What the plan had to give up for its program to fit is asked of others, too."""
    machine = load_cluster("h100-dgx")
    meshes, ask = mesh_candidates(machine, 4), SearchRequest(batch=BATCH, baselines=True)
    judge = _Large("tp=4")
    found = choose(analysed("gpt2").model, meshes, machine, ask, evaluator=judge)
    assert found.configuration.name == "tp=4"
    assert _against("gpt2", "h100-dgx").placements.seconds < found.placements.seconds
    assert {"dp=4", "fsdp=4"} <= set(judge.asked)
    # at another microbatch, or not at all
    for baseline in found.baselines:
        assert baseline.seconds is None or baseline.seconds >= found.placements.seconds


def test_a_plan_on_the_mesh_of_a_baseline_may_be_the_better_one() -> None:
    """One that the search did not look at is taken if it was given, fits and is faster."""
    machine, ask = load_cluster("h100-dgx"), SearchRequest(batch=BATCH, baselines=True)
    looked_at = [Staged(Mesh.parse("tp=4"))]
    search = _Search(analysed("gpt2").model, machine, ask, lambda _: None, None, 4, Searches())
    alone = search.many(looked_at)
    told = search.baselines(4, alone)
    found = search.better(alone, [*looked_at, *(Staged(m) for m in mesh_candidates(machine, 4))])
    assert found.configuration.name in ("dp=4", "fsdp=4")
    assert found.placements.seconds < alone.placements.seconds
    assert found.bound <= found.placements.lower_bound <= found.placements.seconds
    former = found.rejected[0]
    assert former.solved and former.seconds == alone.placements.seconds
    for baseline in told:
        assert baseline.seconds is None or baseline.seconds >= (1 - 1e-9) * found.placements.seconds
    assert search.better(alone, looked_at) is alone


@pytest.mark.parametrize("batch", [None, BATCH])
def test_a_mesh_that_was_given_stays_however_fast_a_baseline_is(batch: int | None) -> None:
    machine = load_cluster("h100-dgx")
    found = choose(
        analysed("gpt2").model, [Mesh.parse("tp=4")], machine, SearchRequest(batch=batch, baselines=True)
    )
    assert found.configuration.name == "tp=4"
    assert any(r.seconds is not None and r.seconds < found.placements.seconds for r in found.baselines)


def test_megatron_keeps_what_travels_between_layers_whole() -> None:
    """Where the plan itself splits it: over the sequence."""
    model = analysed("llama").model
    formulated = formulate(
        model,
        Mesh.parse("tp=4"),
        load_cluster(CLUSTER),
        StepConfig(1, layer_calls(model.folded)),
    )
    allowed = _whole_between_layers(formulated)
    kept = place(formulated.problem, formulated.free.setting, None, allowed=allowed)
    assert kept.seconds > formulated.free.seconds

    def between(states: tuple[int, ...]) -> list[Placement]:
        backward = formulated.model.folded.is_backward()
        found = []
        for source, target in formulated.model.flow.edges:
            both = {source[0], target[0]} == {"layers_fwd"}
            if both and not backward[target[0]]:
                variable = formulated.problem.variables[formulated.problem.index[target]]
                assert isinstance(variable, ValueVar)
                found.append(variable.states[states[formulated.problem.index[target]]][0])
        return found

    assert between(kept.states) and all(not isinstance(p, Shard) for p in between(kept.states))


# -- the same every time -----------------------------------------------------------------------------------

FRESH = """
import sys
from test_planning_requests import limited_plan
sys.stdout.write(limited_plan())
"""


def limited_plan() -> str:
    """A plan with everything in it: one of two meshes, microbatches, recomputation."""
    meshes = [Mesh.parse("fsdp=2,tp=2"), Mesh.parse("tp=4")]
    machine, ask = load_cluster("h100-dgx"), SearchRequest(batch=BATCH)
    made = plan_analysed(analysed("gpt2"), meshes, machine, memory=240_000, request=ask)
    assert made.plan.microbatches > 1 and made.plan.recompute
    return plan_to_json(made.plan)


def test_plans_are_the_same_byte_for_byte() -> None:
    """Twice in a process, and in a fresh one that hashes otherwise."""
    text = limited_plan()
    assert limited_plan() == text
    here = Path(__file__).parent
    env = {
        **os.environ,
        "PYTHONHASHSEED": "12345",
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run([sys.executable, "-c", FRESH], env=env, cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == text


def test_megatron_has_a_pipeline_where_a_node_of_tensor_ranks_is_not_enough() -> None:
    """With as few stages as fit, by a schedule that it has; without, where pipelines are not asked for."""
    machine, model = load_cluster("h100-dgx"), analysed("llama-deep").model
    meshes = candidate_meshes(machine, 16, 4, 16, PlanOptions())
    for budget, wanted in ((300_000, "dp=2,tp=8"), (180_000, "pp=2,tp=8")):
        found = choose(model, meshes, machine, SearchRequest(batch=16, baselines=True, budget=budget))
        megatron = found.baselines[-1]
        assert megatron.mesh == wanted and megatron.seconds is not None
        assert megatron.seconds > found.placements.seconds
    alone = choose(
        model, mesh_candidates(machine, 16), machine, SearchRequest(batch=16, baselines=True, budget=180_000)
    ).baselines[-1]
    assert alone.mesh == "dp=2,tp=8" and alone.seconds is None


# -- stopping early ----------------------------------------------------------------------------------------


def _interrupting(prefix: str, nth: int, seen: list[str]) -> Callable[[str], None]:
    """A progress callback that is Ctrl-C at the nth text with this beginning."""

    def say(text: str) -> None:
        seen.append(text)
        if text.startswith(prefix) and sum(t.startswith(prefix) for t in seen) == nth:
            raise KeyboardInterrupt

    return say


def _interrupted(nth: int) -> tuple[CandidateSolution, list[str]]:
    """At the nth shape of four ranks."""
    machine, seen, ask = load_cluster(CLUSTER), list[str](), SearchRequest(batch=BATCH, baselines=True)
    meshes = mesh_candidates(machine, 4)
    found = choose(analysed("llama").model, meshes, machine, ask, _interrupting("searching", nth, seen))
    return found, seen


def test_interrupted_after_the_first_shape() -> None:
    """The plan is the best of what was known by then."""
    found, seen = _interrupted(2)
    assert found.interrupted and not found.baselines
    assert sum(t.startswith("solving") for t in seen) == 1
    whole = _against("llama", CLUSTER)
    assert not whole.interrupted and found.placements.seconds >= whole.placements.seconds


def _two_solved(say: Callable[[str], None]) -> CandidateSolution:
    """A search that solves two configurations."""
    # of two meshes that are far apart only one is solved
    machine = replace(load_cluster("h100-dgx"), collectives="mpi")
    meshes = [Mesh.parse(m) for m in ("dp=2,tp=2", "fsdp=4")]
    return choose(analysed("llama").model, meshes, machine, SearchRequest(batch=BATCH), say)


@pytest.mark.parametrize("nth", [1, 2])
def test_interrupted_while_solving(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nth configuration is not solved; without any, the best estimate is placed at once."""
    solved: list[PlacementSolution] = []

    def tune_some(*args: Any, **kwargs: Any) -> PlacementSolution:
        if len(solved) == nth - 1:
            raise KeyboardInterrupt
        solved.append(tune(*args, **kwargs))
        return solved[-1]

    whole = _two_solved(lambda _: None)
    monkeypatch.setattr("autoshard.search.select.refine.tune", tune_some)
    found = _two_solved(lambda _: None)
    assert found.interrupted and not whole.interrupted and len(solved) == nth - 1
    assert found.bound <= whole.placements.seconds <= found.placements.seconds
    if solved:
        assert found.placements.states == solved[0].states


@pytest.mark.parametrize("nth", [1, 2])
def test_interrupted_between_two_solutions(nth: int) -> None:
    try:
        found = _two_solved(_interrupting("solving", nth, []))
    except KeyboardInterrupt:  # pytest would stop, too
        pytest.fail("shapes are known, and yet there is no plan")
    assert found.interrupted


def test_interrupted_before_anything_is_known() -> None:
    with pytest.raises(KeyboardInterrupt):
        _interrupted(1)


@pytest.fixture
def target(tmp_path: Path) -> str:
    """A small llama as the command line takes it."""
    sizes = {"hidden_size": 32, "intermediate_size": 88, "vocab_size": 96, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **heads}
    (tmp_path / "llama.json").write_text(json.dumps(config))
    return f"hf:{tmp_path / 'llama.json'}"


def test_the_command_writes_what_it_has(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C: the folder is complete, the exit code that of an interrupt."""
    say = _interrupting("searching", 2, [])
    monkeypatch.setattr(Progress, "__call__", lambda self, text: say(text))
    options = [
        "--cluster",
        CLUSTER,
        "--gpus",
        "4",
        "--global-batch",
        "8",
        "--seq",
        "12",
        "-o",
        str(tmp_path / "p"),
    ]
    done = CliRunner().invoke(app, ["plan", target, *options])
    assert done.exit_code == 130, done.output
    assert "interrupted" in done.output
    plan, request = read_plan(tmp_path / "p")
    assert any("interrupted" in w for w in plan.warnings) and request.target == target


# -- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--mesh", MESH, "--batch", "8", "--global-batch", "8"], "exclude each other"),
        (["--mesh", MESH, "--optimizer", "adam"], "did you mean 'adamw'"),
        (["--cluster", CLUSTER, "--gpus", "4", "--tactics", "auto"], "tactics need a mesh"),
        (["--mesh", MESH, "--batch", "8", "--tactics", "auto on cp"], "no axis 'cp'"),
        (["--mesh", MESH, "--global-batch", "8", "--tactics", "auto"], "one batch"),
        pytest.param(
            ["--mesh", "dp=4", "--global-batch", "6"],
            "does not divide over 4 batch shards",
        ),
    ],
)
def test_mistakes_are_refused(target: str, options: list[str], what: str) -> None:
    done = CliRunner().invoke(app, ["plan", target, "--seq", "12", *options])
    assert done.exit_code == 2, done.output
    assert what in done.output.replace("\n", " ")


def test_a_batch_that_no_mesh_divides_is_refused() -> None:
    machine = load_cluster(CLUSTER)
    meshes = [Mesh.parse(m) for m in ("dp=4,fsdp=2", "dp=2,fsdp=4")]
    with pytest.raises(UsageError, match="a batch of 7 does not divide over 8 batch shards"):
        choose(analysed("llama").model, meshes, machine, SearchRequest(batch=7))


def test_a_batch_of_nothing_is_refused() -> None:
    model, inputs = family("llama").make()
    with pytest.raises(UsageError, match="global_batch is 0"):
        autoshard.plan(model, MESH, example_inputs=inputs, global_batch=0)


# -- a batch that cannot be followed -----------------------------------------------------------------------


def test_a_model_that_was_captured_with_one_sequence_is_captured_again() -> None:
    """One sequence leaves no dim to follow; the plan is for other microbatches all the same."""
    model, inputs = family("llama").make()
    one = {name: x[:1] for name, x in inputs.items()}
    said: list[str] = []
    machine = load_cluster(CLUSTER)
    made = autoshard.plan(
        model, machine, devices=4, example_inputs=one, global_batch=BATCH, progress=said.append
    )
    assert [s for s in said if s.startswith("capturing again")] == ["capturing again, with 5 sequences"]
    whole = autoshard.plan(model, machine, devices=4, example_inputs=inputs, global_batch=BATCH)
    assert (made.plan.mesh, made.plan.batch) == (whole.plan.mesh, whole.plan.batch)
    assert made.plan.fingerprint == whole.plan.fingerprint
    sizes = {n for p in made.analysis.folded.joint.ports for n in p.type.shape}
    assert 5 in sizes and all(n % 5 for n in sizes if n != 5)
    # in one piece it is what it was captured as
    with pytest.raises(UsageError, match="microbatches of"):
        plan_analysed(
            Source(model, (), one).analysed(said.append),
            mesh_candidates(machine, 4),
            machine,
            request=SearchRequest(batch=BATCH),
        )
