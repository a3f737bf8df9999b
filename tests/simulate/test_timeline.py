"""The simulated step of programs: priced from their parts, compared with what ranks really send and hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from pipelines import analysed, model_and_batch, pipeline, planned
from stage_run import StageRun
from typer.testing import CliRunner

from autoshard.api import compile_analysed
from autoshard.cli.main import app
from autoshard.cluster import load_cluster
from autoshard.cluster.cluster import Cluster, Level
from autoshard.cost.kernel_time import traffic_seconds
from autoshard.program.layers import layers_of_stages
from autoshard.program.messages import moves_of
from autoshard.program.program import Program
from autoshard.program.store import save_program
from autoshard.schedules.check import in_flight_of_stages
from autoshard.schedules.named import NAMED
from autoshard.schedules.schedule import Schedule
from autoshard.schedules.timeline import StageCosts, peak_bytes, simulate
from autoshard.search.plan.plan import Cut, Pipeline, Recompute
from autoshard.search.problem.problem import model_flop
from autoshard.simulate.estimate import Estimator
from autoshard.simulate.saved_for_backward import SavedBytes, kept_by
from autoshard.simulate.stage_costs import StagePrices, stage_costs
from autoshard.simulate.step import estimate_step

CPU = load_cluster("cpu-gloo")
Invoke = Callable[..., Any]


def paired(far: float = 1e9, latency: float = 0.0) -> Cluster:
    """Devices in pairs: 10 GB/s inside a pair, ``far`` bytes/s between pairs."""
    levels = (Level("near", 2, latency, 1e10), Level("far", None, latency, far))
    return Cluster("pairs", None, CPU.device, levels)


def whole_cuts(name: str, mesh: str, ranks: int, schedule: str, microbatches: int) -> Program:
    """A program cut behind whole calls of the forward pass."""
    found = planned(name, mesh)
    calls = [c for c in found.analysis.folded.calls if not c.backward]
    cuts = tuple(Cut(len(calls) * k // ranks - 1, "", "") for k in range(1, ranks))
    made = Pipeline(ranks, 0, schedule, 1, cuts)
    return compile_analysed(
        replace(found, plan=replace(found.plan, pipeline=made, microbatches=microbatches))
    )


def one_stage(name: str, mesh: str, microbatches: int) -> Program:
    found = planned(name, mesh)
    return compile_analysed(replace(found, plan=replace(found.plan, microbatches=microbatches)))


# -- time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2", "tp=2"])
def test_one_stage_runs_its_microbatches_and_reduces_once(mesh: str, microbatches: int) -> None:
    made = Estimator(one_stage("llama", mesh, microbatches), CPU)
    lowered = made.program.lowered
    parts = {p.phase: made.priced(lowered.of(p)) for p in lowered.parts}
    once = [c for phase, c in parts.items() if phase in ("gather", "reduce")]
    each = [c for phase, c in parts.items() if phase not in ("gather", "reduce")]
    # gradients that stay whole are reduced once: all of them, those of norms at most, and those of norms; in
    # backward, if that runs once
    if mesh == "fsdp=2" or microbatches == 1:
        assert parts["reduce"].wire < 0.1 * parts["backward"].wire
    else:
        assert parts["reduce"].collectives > 0
    total = made.step().compute + made.step().comm
    single, repeated = (sum(c.compute + c.comm for c in some) for some in (once, each))
    assert total == pytest.approx(microbatches * repeated + single)
    if "count" in parts:  # labels are counted before the actions that the timeline is of
        total -= microbatches * (parts["count"].compute + parts["count"].comm)
    if microbatches > 1:  # each gradient is read, and its sum read and written
        gradients = StagePrices(made.program, CPU).gradients_of[0]
        total += microbatches * traffic_seconds(3 * sum(gradients.values()), CPU.device)
    assert made.pipeline.seconds == pytest.approx(total + made.pipeline.spent.update)
    assert made.pipeline.spent.bubble == pytest.approx(0.0, abs=1e-12)
    sent, sent_once = (sum(c.collectives for c in some) for some in (each, once))
    assert sum(t.count for t in made.traffic()) == microbatches * sent + sent_once


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("name", ["gpt2-deep", "llama-deep", "t5-deep"])
def test_the_flop_of_a_pipeline_are_those_of_the_model(name: str, schedule: str) -> None:
    program = whole_cuts(name, "dp=2", 2, schedule, 4)
    found = estimate_step(program, CPU)
    flop, dtype = model_flop(planned(name, "dp=2").analysis.model)
    assert found.model_flop == pytest.approx(4 * flop)
    peak = CPU.device.peak_flops[dtype]
    assert found.mfu == pytest.approx(4 * flop / (found.seconds * 4 * peak))


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_what_runs_again_takes_time_and_is_no_flop_of_the_model(policy: Any) -> None:
    plain, again = recomputed("none", "zb-h1"), recomputed(policy, "zb-h1")
    before, after = estimate_step(plain, CPU), estimate_step(again, CPU)
    assert before.model_flop == after.model_flop
    assert after.spent.compute > before.spent.compute
    assert sum(after.costs.held) < sum(before.costs.held)


def recomputed(policy: Any, schedule: str) -> Program:
    found = planned("llama-deep", "dp=1")
    segments = [c.segment for c in found.analysis.folded.calls if not c.backward and c.label]
    chosen = {} if policy == "none" else {s: Recompute(policy, segments.count(s)) for s in segments}
    calls = [c for c in found.analysis.folded.calls if not c.backward]
    made = Pipeline(2, 0, schedule, 1, (Cut(len(calls) // 2 - 1),))
    plan = replace(found.plan, pipeline=made, microbatches=1, recompute=chosen)
    return compile_analysed(replace(found, plan=plan))


@pytest.mark.parametrize("name", list(NAMED))
def test_the_parts_of_the_time_add_up(name: str) -> None:
    chunks = NAMED[name].chunks or 2
    found = estimate_step(pipeline("llama-deep", 2, "dp=2", name, 4, chunks), CPU)
    spent, timeline = found.spent, found.timeline
    assert spent.total == pytest.approx(found.seconds) and sum(spent.axes.values()) == pytest.approx(
        spent.exposed
    )
    assert min(spent.compute, spent.exposed, spent.p2p, spent.bubble, spent.update) >= 0
    assert spent.p2p > 0 and spent.exposed > 0 and spent.update > 0
    assert (spent.p2p + spent.bubble) / found.seconds == pytest.approx(timeline.bubble)
    for row in found.ranks:
        assert row.busy + row.idle == pytest.approx(found.seconds)


def test_backward_in_two_parts_takes_as_long_as_both() -> None:
    split, whole = (stage_costs(pipeline("llama-deep", 2, "dp=2", s, 4), CPU) for s in ("zb-h1", "gpipe"))
    assert split.forward == pytest.approx(whole.forward)
    both = [a + b for a, b in zip(split.backward_input, split.backward_weight, strict=True)]
    assert split.backward == pytest.approx(both)
    assert max(whole.backward_weight) == 0
    assert split.backward_weight[0] == 0 < split.backward_weight[1]  # the first stage sends nothing back


# -- messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("zb-v", 2), ("interleaved", 2)])
@pytest.mark.parametrize("name", ["gpt2-deep", "t5-deep"])
def test_bytes_that_cross_are_those_that_are_sent(name: str, schedule: str, chunks: int) -> None:
    """Each message of the runtime once, whatever the number of stages that it skips."""
    program = pipeline(name, 2, "dp=2", schedule, 4, chunks)
    prices = StagePrices(program, CPU)
    sent = {"up": 0.0, "down": 0.0}
    for moves in moves_of(program):
        for move in moves:
            for message in move.sends:
                sent["up" if move.action.kind == "F" else "down"] += prices.size(message.value) / 4
    up, down = prices.crossing
    assert (sum(up), sum(down)) == pytest.approx((sent["up"], sent["down"]))
    owner = prices.schedule.owner
    for s in range(len(owner) - 1):
        assert (up[s] > 0) == (down[s] > 0) == (owner[s] != owner[s + 1])
        assert (prices.costs.send_forward[s] > 0) == (owner[s] != owner[s + 1])


def test_a_hop_has_the_link_of_the_ranks_it_joins() -> None:
    program = pipeline("llama-deep", 4, "dp=1", "gpipe", 4)
    prices = StagePrices(program, paired())
    (up, _), costs = prices.crossing, prices.costs
    bandwidths = [size / seconds for size, seconds in zip(up, costs.send_forward, strict=True)]
    assert bandwidths == pytest.approx([1e10, 1e9, 1e10])  # ranks 0 and 1, 2 and 3 are pairs


def test_the_place_of_pp_in_the_mesh_decides_who_is_near() -> None:
    first = pipeline("llama-deep", 2, "dp=2", "gpipe", 4)
    assert first.stages is not None
    last = replace(first, stages=replace(first.stages, position=1))
    assert (first.full_mesh, last.full_mesh) == ("pp=2,dp=2", "dp=2,pp=2")
    far, near = (StagePrices(p, paired()) for p in (first, last))
    slow, fast = far.costs.send_forward[0], near.costs.send_forward[0]
    assert slow == pytest.approx(10 * fast)
    # and what dp has is the other way round
    assert sum(far.ends[0].axes) * 9 < sum(near.ends[0].axes)


def test_gradients_that_stages_share_are_reduced_over_them() -> None:
    tied = StagePrices(whole_cuts("gpt2-deep", "dp=1", 2, "gpipe", 2), paired(latency=1e-3))
    owners = {n: r for n, r in tied.holders.items() if len(r) > 1 and "wte" in n}
    assert len(owners) == 1
    assert all(end.shared > 1e-4 for end in tied.ends)
    size = tied.size(next(iter(owners)))
    both = sum(state.parameters for state in tied.states)
    assert both == pytest.approx(sum(model_bytes("gpt2-deep")) + size)
    plain = StagePrices(whole_cuts("llama-deep", "dp=1", 2, "gpipe", 2), paired(latency=1e-3))
    assert all(end.shared == 0 for end in plain.ends)


def model_bytes(name: str) -> list[int]:
    model, _ = model_and_batch(name, 1)
    return [p.numel() * p.element_size() for p in model.parameters()]


# -- bytes --------------------------------------------------------------------------------------------------


def test_what_is_kept_of_one_stage() -> None:
    """What the estimate of a whole program counts is what its one stage keeps."""
    for name in ("gpt2", "llama"):
        program = one_stage(name, "dp=1", 1)
        estimator = Estimator(program, CPU)
        found = kept_by(program, (0,), estimator.bytes_of)[0]
        assert found == SavedBytes(estimator.held().activations, 0.0, 0.0)
        assert found.held > 0


CASES = {
    "inside layers": lambda: pipeline("llama-deep", 2, "dp=1", "gpipe", 1),
    "encoder and decoder": lambda: pipeline("t5-deep", 4, "dp=1", "gpipe", 1),
    "two parts": lambda: pipeline("gpt2-deep", 2, "dp=1", "zb-h1", 1),
    "two stages each": lambda: pipeline("llama-deep", 2, "dp=1", "zb-v", 1, 2),
    "selective": lambda: recomputed("selective", "zb-h1"),
    "full": lambda: recomputed("full", "zb-h1"),
}
FAMILY = {"encoder and decoder": "t5-deep", "two parts": "gpt2-deep"}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_what_its_costs_say(case: str) -> None:
    """The storage alive after the forwards of a rank, and after its input gradients, run for real."""
    program = CASES[case]()
    prices = StagePrices(program, CPU)
    run = StageRun(program, prices, *model_and_batch(FAMILY.get(case, "llama-deep"), 1))
    run.all()
    for rank, stages in enumerate(prices.stages_of):
        kept = [prices.kept[s] for s in stages]
        assert run.forward[rank] == pytest.approx(sum(k.held for k in kept)), rank
        if len(stages) == 1 and rank in run.split:
            assert run.split[rank] == pytest.approx(kept[0].weight + kept[0].made), rank
    assert bool(run.split) == prices.schedule.splits_backward


def test_peaks_count_what_backward_makes_for_the_weights() -> None:
    costs = replace(StageCosts.uniform(2), held=(3.0, 3.0), held_weight=(1.0, 1.0), made_weight=(4.0, 5.0))
    schedule = Schedule("by hand", 2, (0, 1), tuple(_row(s, "F0 I0 F1 I1 W0 W1") for s in range(2)))
    assert peak_bytes(schedule, costs) == (10.0, 12.0)  # after both input gradients
    assert [b for _, b in simulate(schedule, costs).curve[0]] == [0.0, 3.0, 5.0, 8.0, 10.0, 5.0, 0.0]


def _row(stage: int, text: str) -> tuple[Any, ...]:
    from autoshard.schedules.schedule import Action

    return tuple(Action(word[0], stage, int(word[1:])) for word in text.split())  # type: ignore[arg-type]


def test_gradients_of_half_precision_are_summed_in_float32() -> None:
    program = whole_cuts("llama-deep", "dp=1", 2, "gpipe", 2)
    grads = [h.gradients for h in StagePrices(program, CPU).states]
    values = {
        n: replace(p, type=replace(p.type, dtype="bf16")) if p.type.dtype == "f32" else p
        for n, p in program.lowered.values.items()
    }
    narrow = replace(program, lowered=replace(program.lowered, values=values))
    assert [h.gradients for h in StagePrices(narrow, CPU).states] == grads
    single = replace(narrow, microbatches=1)
    assert [h.gradients for h in StagePrices(single, CPU).states] == [g / 2 for g in grads]


def test_memory_is_that_of_the_fullest_rank() -> None:
    program = pipeline("llama-deep", 4, "dp=1", "1f1b", 8)
    estimator = Estimator(program, CPU)
    found = estimator.pipeline
    assert estimator.held() == found.fullest.held
    assert found.fullest.held.total == pytest.approx(max(found.timeline.peak))
    assert [row.in_flight for row in found.stages] == [4, 3, 2, 1]
    for row, stage in zip(found.ranks, found.stages, strict=True):
        assert row.held.activations == pytest.approx(stage.in_flight * stage.kept)


def test_in_flight_ends_with_the_input_gradient() -> None:
    schedule = Schedule("by hand", 3, (0,), (_row(0, "F0 F1 I0 F2 I1 I2 W0 W1 W2"),))
    assert in_flight_of_stages(schedule, "BI") == (2,)


# -- words --------------------------------------------------------------------------------------------------


def test_layers_of_stages() -> None:
    layers = layers_of_stages(whole_cuts("llama-deep", "dp=1", 2, "gpipe", 2))
    depth = len({c.label for c in analysed("llama-deep").folded.calls if c.label})
    assert layers[0].startswith("model.embed_tokens, model.layers.0")
    assert layers[1].endswith(f"-{depth - 1}, model.norm, lm_head") and "part of" not in "".join(layers)
    inside = layers_of_stages(pipeline("llama-deep", 2, "dp=1", "gpipe", 2))
    assert inside[0].split(", ")[-1].startswith("part of model.layers.")
    assert inside[1].split(", ")[0] == inside[0].split(", ")[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("timelines")
    save_program(pipeline("llama-deep", 2, "dp=2", "1f1b", 4), place / "two")
    save_program(one_stage("llama-deep", "dp=2", 1), place / "one")
    return place


@pytest.fixture
def invoke(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.chdir(folder)
    return lambda *args: CliRunner().invoke(app, ["inspect", *args], catch_exceptions=False)


def test_inspect_shows_the_timeline(invoke: Invoke, folder: Path) -> None:
    shown = invoke("two", "--timeline", "--svg", "two.svg", "--perfetto", "two.json").stdout
    found = estimate_step(pipeline("llama-deep", 2, "dp=2", "1f1b", 4), CPU)
    lines = shown.splitlines()
    assert lines[0] == "pp=2,dp=2  4 microbatches, cost model of cpu-gloo"
    assert sum("│" in line for line in lines) == 2
    assert [line.split()[:2] for line in lines if "model.layers" in line] == [["0", "0"], ["1", "1"]]
    assert f"MFU {found.mfu:.1%}" in shown and "pipeline rank" in shown
    titles = ElementTree.parse(folder / "two.svg").iter("{http://www.w3.org/2000/svg}title")
    assert sum("microbatch" in (t.text or "") for t in titles) == 16
    events = json.loads((folder / "two.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == 16 + 2
    # either file alone asks for the timeline, too
    assert invoke("two", "--svg", "again.svg").stdout.startswith(lines[0])


def test_inspect_timeline_json(invoke: Invoke) -> None:
    document = json.loads(invoke("two", "--timeline", "--json").stdout)
    found = estimate_step(pipeline("llama-deep", 2, "dp=2", "1f1b", 4), CPU)
    timeline = document["timeline"]
    assert document["mesh"] == "pp=2,dp=2" and document["written"] == {}
    assert timeline["makespan_seconds"] == pytest.approx(found.seconds)
    assert timeline["bubble"] == pytest.approx(found.timeline.bubble)
    assert [r["peak_bytes"] for r in timeline["ranks"]] == [int(p) for p in found.timeline.peak]
    assert sum(timeline["breakdown_seconds"].values()) == pytest.approx(found.seconds)
    whole = json.loads(invoke("two", "--json").stdout)
    assert whole["timeline"] == timeline and whole["mesh"] == "pp=2,dp=2"


def test_prices_of_another_cluster(invoke: Invoke) -> None:
    cheap, dear = (
        json.loads(invoke("two", "--timeline", "--json", "--cluster", name).stdout)["timeline"]
        for name in ("h100-dgx", "cpu-gloo")
    )
    assert cheap["makespan_seconds"] < dear["makespan_seconds"]
    assert cheap["ranks"][0]["peak_bytes"] == dear["ranks"][0]["peak_bytes"]


def test_one_stage_is_one_row(invoke: Invoke) -> None:
    shown = invoke("one", "--timeline").stdout
    assert sum("│" in line for line in shown.splitlines()) == 1
    assert shown.startswith("dp=2  1 microbatch, ") and "bubble 0.0 %" in shown
    assert "timeline" not in json.loads(invoke("one", "--json").stdout)
    text = invoke("one").stdout
    assert "# step    " in text and " without overlap: compute " in text and "# stages" not in text


def test_inspect_one_stage_of_two(invoke: Invoke) -> None:
    whole, second = invoke("two").stdout, invoke("two", "--stage", "1").stdout
    compile(second, "program", "exec")
    assert "def forward_0():" in whole and "def forward_0():" not in second
    assert "def forward_1():" in second and "def backward_1():" in second and "def reduce_1():" in second
    assert "lm_head.weight" in second and "embed_tokens.weight" not in second
    assert "embed_tokens.weight" in invoke("two", "--stage", "0").stdout
    assert "# stages  1f1b, 4 microbatches" in second
    names = [s["name"] for s in json.loads(invoke("two", "--stage", "1", "--json").stdout)["segments"]]
    assert names and all(f"def {n}(" in second for n in names)
    assert sum(line.startswith("def ") for line in second.splitlines()) == len(names) + 4


def test_inspect_one_rank_of_four(invoke: Invoke) -> None:
    """Ranks are those of the whole mesh, and each has its stages."""
    text = invoke("two", "--rank", "3").stdout
    assert "rank 3 of 4 at pp=1 dp=1 | parameters" in text
    assert "def forward_1():" in text and "def forward_0():" not in text
    found = json.loads(invoke("two", "--rank", "3", "--json").stdout)
    ranks = found["timeline"]["ranks"]
    assert found["resident_bytes"] == ranks[1]["resident_bytes"] != ranks[0]["resident_bytes"]


def test_what_inspect_refuses(invoke: Invoke) -> None:
    for words, expected in (
        (("two", "--stage", "2"), "one of 0, 1"),
        (("one", "--stage", "1"), "has no stage 1"),
        (("two", "--rank", "0", "--stage", "1"), "rank 0 has no stage 1"),
        (("two", "--rank", "4"), "ranks are 0 to 3"),
        (("two", "--timeline", "--rank", "0"), "--timeline and --rank"),
        (("two", "--svg", "x.svg", "--stage", "0"), "--timeline and --stage"),
        (("two", "--after", "010", "--stage", "0"), "--after and --stage"),
        (("two", "--svg", "no/such/folder.svg"), "cannot be written"),
    ):
        result = invoke(*words)
        assert result.exit_code == 2, words
        assert expected in result.stderr and "Traceback" not in result.stderr, words
