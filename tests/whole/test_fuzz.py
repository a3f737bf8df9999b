"""A bounded set of random cases; ``make fuzz`` runs thousands. And what they found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fuzz import damage, module_case
from fuzz.case import PLANS, Case, analysed, one_rank_of, randomly_planned
from fuzz.draw import recipe
from fuzz.faults import FAULTS
from fuzz.module_case import ModuleCase
from fuzz.modules import LOSSES, Model
from fuzz.recipe import Body, Recipe, Spec, Statement
from fuzz.shrink import shrunk
from fuzz.shrink_text import shrunk_text
from fuzz.step_runs import run_steps
from fuzz.steps import Steps
from torch import nn

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster
from autoshard.errors import UsageError
from autoshard.ir import Call
from autoshard.ir.placement import Shard
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.planned import Planned
from autoshard.planner.planning import plan_analysed
from autoshard.program.program import Program
from autoshard.search.plan.plan import Cut, Pipeline
from autoshard.verify.lockstep import verify

CASES = 30


@pytest.mark.parametrize("first", range(0, CASES, PLANS))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_random_cases(first: int) -> None:
    case = Case.of(first)
    analysis = analysed(case.recipe)
    for number in range(first, first + PLANS):
        case = Case.of(number)
        outcome = case.run(analysis)
        assert outcome.kind != "failed", f"case {number}, mesh {case.mesh}\n{outcome}\n{case.recipe.source()}"


@pytest.mark.parametrize(
    "number",
    [1350, 50450, 51906, 51705],
    ids=[
        "an output that backward needs in another layout",
        "a parameter that is kept for a backward that does not use it",
        "a layout on the way to another one that is made from a third",
        "a view of attention as only the CPU gives it",
    ],
)
def test_cases_that_failed_once(number: int) -> None:
    assert Case.of(number).run().kind == "equal"


def test_most_cases_suit_their_mesh() -> None:
    """Else little would be tested."""
    kinds = [Case.of(number).run().kind for number in range(CASES, CASES + 8)]
    assert kinds.count("equal") >= 6


def test_recipes_are_reproducible() -> None:
    assert [recipe(k) for k in range(5)] == [recipe(k) for k in range(5)]
    first, second = Case.of(7).program(analysed(recipe(1))), Case.of(7).program(analysed(recipe(1)))
    assert first.lowered == second.lowered


def test_a_wrong_program_is_found_and_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """With reductions that are wrong: the part of the first rank as if it were the sum of all."""
    from autoshard.runtime.lockstep import in_process

    monkeypatch.setattr(in_process, "reduced", lambda rows, op, out=None: rows[0].clone())
    number = next(n for n in range(500) if Case.of(n).run().failure in ("numbers", "VerificationError"))
    case = Case.of(number)
    small, outcome = shrunk(case, case.run(), seconds=10)
    assert outcome.kind == "failed" and len(small.recipe.source()) <= len(case.recipe.source())


def test_damaged_folders() -> None:
    assert not damage.many(150)


# -- modules and scripts -------------------------------------------------------------------------------

MODULES, SCRIPTS = range(60, 90), range(72, 82)


@pytest.mark.filterwarnings("ignore")
def test_modules() -> None:
    """Of one piece each, in lockstep."""
    outcomes = {n: ModuleCase.of(n).run() for n in MODULES}
    failed = {n: o for n, o in outcomes.items() if o.kind == "failed"}
    assert not failed, "\n".join(f"{n}: {o}\n{ModuleCase.of(n).source()}" for n, o in failed.items())
    assert sum(o.kind == "equal" for o in outcomes.values()) >= 20


def test_scripts() -> None:
    """On four processes; eager PyTorch runs them all."""
    outcomes = run_steps([Steps.of(n) for n in SCRIPTS])
    failed = {n: o for n, o in zip(SCRIPTS, outcomes, strict=True) if o.kind not in ("equal", "refused")}
    assert not failed, "\n".join(f"{n}: {o}\n{Steps.of(n).source()}" for n, o in failed.items())
    assert sum(o.kind == "equal" for o in outcomes) >= 7


def test_what_is_wrong_with_scripts_is_found() -> None:
    """Each way to make models parallel that is wrong, by its kind of failure."""
    script = Steps(Model(("float",), (), 0, "dict", LOSSES[0]), "dp=4", ("train", "clip", "train"))
    found = run_steps([script] * len(FAULTS), 10.0, list(FAULTS))
    assert [(o.kind, o.failure) for o in found] == [("failed", f) for f in FAULTS.values()], found


def test_what_is_wrong_with_modules_is_found_and_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with one op changed for another."""

    def wrong(analysis: Analysis, mesh: str, seed: int | str) -> Program:
        program = randomly_planned(analysis, mesh, seed)
        segments = program.lowered.segments
        for name, segment in segments.items():
            nodes = [replace(n, op=n.op.replace("tanh.", "sin.")) for n in segment.graph.nodes]
            graph = replace(segment.graph, nodes=type(segment.graph.nodes)(nodes))
            segments = {**segments, name: replace(segment, graph=graph)}
        return replace(program, lowered=replace(program.lowered, segments=segments))

    monkeypatch.setattr(module_case, "randomly_planned", wrong)
    case = ModuleCase(Model(("linear", "float"), ("conv",), 3, "tuple", LOSSES[1]), "dp=2,tp=2", 0)
    small, outcome = shrunk_text(case, case.run(), ModuleCase.run, seconds=60)
    assert (outcome.kind, outcome.failure) == ("failed", "numbers")
    assert small.model.root == ("linear",) and not small.model.layers


def test_modules_that_capture_changes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def changing(model: nn.Module, *args: object) -> object:
        found = capture(model, *args)  # type: ignore[arg-type]
        model.lin.register_forward_hook(lambda mod, args, out: out)  # type: ignore[union-attr, operator]
        return found

    monkeypatch.setattr(module_case, "capture", changing)
    outcome = ModuleCase(Model(("linear",), (), 0, "dict", LOSSES[0]), "dp=2", 0).run()
    assert (outcome.kind, outcome.failure) == ("failed", "changed by capture")


# -- what was found ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression",
    [
        "F.group_norm(x0.chunk(2, -1)[1], 1, self.p0, self.p0)",
        "F.layer_norm(x0.transpose(1, 3), (4,)).transpose(1, 3) * self.p0[0]",
        "torch._weight_norm(self.p1.t(), self.p2) @ x0[0, 0]",
        "torch.view_as_real(torch.view_as_complex(x0.transpose(2, 3)[..., :2].contiguous()) * self.p0[0])",
    ],
)
def test_kernels_that_need_dense_tensors(expression: str) -> None:
    """Views that eager PyTorch copies before it calls the kernel."""
    made = Recipe(
        0,
        (Spec("x0", (4, 4, 6, 6), batch=True),),
        Body(
            (Spec("p0", (4,)), Spec("p1", (6, 5)), Spec("p2", (5, 1))),
            (Statement(("v0",), expression), Statement(("v1",), "v0.pow(2).mean()")),
        ),
        Body((), ()),
        0,
        "v1",
        (),
    )
    for mesh in ("x=2", "dp=2"):
        for seed in range(3):
            outcome = Case(made, mesh, seed).run()
            assert outcome.kind == "equal", outcome


class _Statistics(nn.Module):
    """A buffer that is updated in the first stage, with an op behind it; again: also read at the end."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.before, self.norm, self.behind = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.norm.running_mean * 2.0
        y = self.behind(self.norm(self.before(x)))
        return ((y * seen if self.again else y) + 1.0).pow(2).mean()


def _staged(model: nn.Module, x: torch.Tensor) -> Planned:
    """Two stages, the new running statistics split over tp behind the last layer."""
    analysis = analyse(capture(model, (x,)))
    found = plan_analysed(analysis, [Mesh.parse("tp=2")], load_cluster("cpu-gloo"))
    results = analysis.folded.joint.results
    split = {k: (Shard(0),) for k, r in enumerate(results) if r.kind == "buffer" and "running" in r.target}
    calls = [c for c in analysis.folded.calls if isinstance(c, Call) and not c.backward]
    nodes = analysis.folded.segments[calls[0].segment].nodes
    last = [n for n in nodes if n.op == "aten.mm.default"][-1]
    pipeline = Pipeline(2, 0, "1f1b", 1, (Cut(0, last.name),))
    plan = replace(found.plan, results={**found.plan.results, **split}, pipeline=pipeline, microbatches=2)
    return replace(found, plan=plan)


def test_buffers_are_updated_where_they_are_made() -> None:
    """Their resharding stands at the end of the program, which is another stage."""
    torch.manual_seed(0)
    model, x = _Statistics(again=False), torch.randn(8, 6)
    program = compile_analysed(_staged(model, x[:4]))
    one = one_rank_of(analyse(capture(model, (x[:4],))), program)
    found = verify(program, model, (x,), {}, steps=1, one_rank=one)
    assert found.ok, found.worst()


def test_buffers_that_another_stage_reads_through_a_copy_are_refused() -> None:
    model, x = _Statistics(again=True), torch.randn(4, 6)
    with pytest.raises(UsageError, match=r"norm\.running_mean is updated in pipeline stage 0"):
        compile_analysed(_staged(model, x))
