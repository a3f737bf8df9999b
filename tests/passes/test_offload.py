"""Values in host memory: the same numbers as eager, less on the device, and every mistake is found."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pipelines
import pytest
import sliced
import torch
from families import _gpt2, family
from planned import planned, program
from ranks import HERE, run_ranks
from sampling import running
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from typer.testing import CliRunner

import autoshard
from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cli.main import app
from autoshard.cluster import Cluster, Mesh, load_cluster, usable_memory
from autoshard.cluster.host import Host
from autoshard.cluster.load import parse_cluster
from autoshard.cluster.write import cluster_text
from autoshard.errors import InfeasibleError, UsageError, VerificationError
from autoshard.ir import Call, Ref
from autoshard.ir.graph import substitute
from autoshard.ir.lowered import Instruction
from autoshard.ir.offload import LOAD, STORE, Offload
from autoshard.options import PassOptions
from autoshard.passes.pipeline import NUMBERED, lower, lower_by_share
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.lowering import lowering_of
from autoshard.planner.planning import plan_analysed
from autoshard.program.program import Program
from autoshard.program.store import load_program, save_program
from autoshard.program.text import program_text
from autoshard.runtime.executor import RankProgram
from autoshard.runtime.host import CudaHost, HostValue, PlainHost
from autoshard.runtime.optim import host_optimizer
from autoshard.runtime.optim.host_optimizer import HostOptimizer
from autoshard.runtime.profile.device import CallTimer
from autoshard.runtime.profile.host import measure_host
from autoshard.search.plan.plan import Pipeline, Recompute
from autoshard.simulate.step import estimate_step
from autoshard.torch_adapters.dtypes import torch_dtype
from autoshard.verify.lockstep import verify
from autoshard.verify.static import verify_static
from benchmarks.live_bytes import LiveBytes

ALL = "activations,parameters,optimizer"
KINDS = ("activations", "parameters", ALL)


@functools.cache
def exchanged(mesh: str) -> Program:
    """A mixture, all of whose activations are stored: also rows that were sent to their experts."""
    found = planned("mixtral", mesh)
    return compile_analysed(replace(found, plan=replace(found.plan, budget=1)), offload="activations")


@functools.cache
def offloaded(name: str, mesh: str, kinds: str, again: str = "", pieces: int = 1) -> Program:
    """A program with some of it in host memory; again: what its layers compute again in backward."""
    found = planned(name, mesh)
    plan = replace(found.plan, microbatches=pieces)
    if again:
        plan = replace(plan, recompute={_layers(found.analysis): Recompute(again, 2)})  # type: ignore[arg-type]
    return compile_analysed(replace(found, plan=plan), offload=kinds)


def _layers(analysis: Analysis) -> str:
    """The forward segment of the model's layers."""
    return next(c.segment for c in analysis.folded.calls if c.label and not c.backward)


@functools.cache
def staged(name: str, kinds: str, schedule: str = "1f1b", mesh: str = "dp=2", slices: int = 1) -> Program:
    """A pipeline on two ranks, each of a mesh, with four microbatches and all of its activations stored."""
    found = (sliced if slices > 1 else pipelines).planned(name, mesh)
    chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    cuts = pipelines.cuts_of(found.analysis.folded, 2 * chunks)
    made = Pipeline(2, 0, schedule, chunks, cuts, slices)
    plan = replace(found.plan, pipeline=made, microbatches=4, budget=1)
    return compile_analysed(replace(found, plan=plan), offload=kinds)


def ops_of(made: Program) -> list[str]:
    """Ops of all calls, each as often as it is called."""
    lowered = made.lowered
    calls = [lowered.segments[i.segment].graph.nodes for i in lowered.main if isinstance(i, Call)]
    return [node.op for nodes in calls for node in nodes]


# -- the same numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("mesh", ["fsdp=4", "dp=2,tp=2"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_lockstep_equals_eager(name: str, mesh: str, kinds: str) -> None:
    """Loss, all gradients, and parameters after three AdamW steps; and it is proved statically."""
    made = offloaded(name, mesh, kinds)
    assert {STORE, LOAD} <= set(ops_of(made))
    model, inputs = family(name).make()
    found = verify(made, model, (), inputs, steps=3)
    assert found.ok, found.worst()
    assert {"output", "gradient", "state after 3 steps"} <= set(found.kinds())
    report = verify_static(made)
    assert report.ok, report.findings


@pytest.mark.parametrize("mesh", ["ep=4", "fsdp=2,ep=2"])
def test_rows_of_experts_wait_there_too(mesh: str) -> None:
    made = exchanged(mesh)
    segments = [made.lowered.segments[i.segment] for i in made.lowered.main if isinstance(i, Call)]
    rows = {t.shape[0] for s in segments for n in s.graph.nodes if "expert_mm" in n.op for t in n.types if t}
    stored = {t.shape[0] for s in segments for n in s.graph.nodes if n.op == STORE for t in n.types if t}
    assert stored & rows
    model, inputs = family("mixtral").make()
    found = verify(made, model, (), inputs, steps=2)
    assert found.ok, found.worst()
    assert verify_static(made).ok


@pytest.mark.parametrize("again", ["full", "selective"])
@pytest.mark.parametrize("mesh", ["fsdp=4", "dp=2,tp=2"])
def test_with_recompute_and_microbatches(mesh: str, again: str) -> None:
    """What layers are computed again from waits in host memory; gradients are stored once a step."""
    made = offloaded("llama", mesh, ALL, again, 2)
    reduce = next(p for p in made.lowered.parts if p.phase == "reduce")
    ends = [made.lowered.segments[i.segment] for i in made.lowered.of(reduce) if isinstance(i, Call)]
    assert any(n.op == STORE for s in ends for n in s.graph.nodes)
    model, inputs = family("llama").make()
    inputs["labels"] = inputs["labels"].clamp(min=3)
    piece = {k: x[: len(x)] for k, x in inputs.items()}
    found = verify(made, model, (), piece, steps=2)
    assert found.ok, found.worst()
    assert verify_static(made).ok


@pytest.mark.parametrize(
    ("schedule", "mesh", "slices"),
    [("1f1b", "fsdp=2", 1), ("zb-h1", "dp=2", 1), ("zb-v", "dp=2", 1), ("seq1f1b", "dp=2", 2)],
)
def test_pipeline(schedule: str, mesh: str, slices: int) -> None:
    """Also where backward is split, a rank has several stages, or a sequence is cut."""
    made = staged("llama", ALL, schedule, mesh, slices)
    lowered = made.lowered
    moved = {
        (part.phase, kind)
        for part in lowered.parts
        for item in lowered.of(part)
        for kind in ("_store", "_load")
        if isinstance(item, Call) and item.label and kind in item.segment
    }
    assert {("forward", "_store"), ("backward", "_load")} <= moved
    model, batch = (sliced if slices > 1 else pipelines).model_and_batch("llama", 4)
    found = verify(made, model, (), batch, steps=2)
    assert found.ok, found.worst()
    report = verify_static(made)
    assert report.ok, report.findings


#: (program, family, microbatches) that processes train
TRAINED: dict[str, tuple[Callable[[], Program], str, int]] = {
    "llama-fsdp": (lambda: offloaded("llama", "fsdp=4", ALL), "llama", 1),
    "llama-again": (lambda: offloaded("llama", "dp=2,tp=2", "activations", "full"), "llama", 1),
    "llama-tp": (lambda: offloaded("llama", "dp=2,tp=2", "parameters"), "llama", 1),
    "gpt2-fsdp": (lambda: offloaded("gpt2", "fsdp=4", "activations,optimizer"), "gpt2", 1),
    "gpt2-tp": (lambda: offloaded("gpt2", "dp=2,tp=2", ALL), "gpt2", 1),
    "llama-pp": (lambda: staged("llama", ALL), "llama", 4),
    "mixtral-ep": (lambda: exchanged("fsdp=2,ep=2"), "mixtral", 1),
    "mixtral-alone": (lambda: exchanged("ep=4"), "mixtral", 1),
    "gpt2-pp": (lambda: staged("gpt2", "activations,optimizer"), "gpt2", 4),
}


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, dict[str, float]]:
    """One start of four processes trains all cases that run."""
    folder = tmp_path_factory.mktemp("offload")
    cases = []
    for name in (case["name"] for case in running(request, "test_training_equals_eager")):
        make, of, pieces = TRAINED[name]
        save_program(make(), folder / name)
        cases.append({"family": of, "program": str(folder / name), "microbatches": str(pieces)})
    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks([str(HERE / "offload_worker.py"), str(folder / "cases.json"), str(folder / "results.json")])
    rows = json.loads((folder / "results.json").read_text())
    return {Path(row["program"]).name: row for row in rows}


@pytest.mark.parametrize("name", TRAINED)
def test_training_equals_eager(results: dict[str, dict[str, float]], name: str) -> None:
    row = results[name]
    assert row["error"] < 1e-4, f"{row['worst']} is off by {row['error']:.2e}"


# -- the text ----------------------------------------------------------------------------------------------


def test_nothing_changes_without_it() -> None:
    plain = program("llama", "fsdp=4")
    assert NUMBERED["offload"] not in plain.dumps and "host" not in program_text(plain)
    # the state of the optimizer is nothing that a program names
    made = offloaded("llama", "fsdp=4", "optimizer")
    text = program_text(made).replace("# in host memory: optimizer\n", "")
    assert text == program_text(plain)


def test_a_folder_keeps_it(tmp_path: Path) -> None:
    made = offloaded("llama", "fsdp=4", ALL)
    save_program(made, tmp_path / "program")
    again = load_program(tmp_path / "program")
    assert again.offload == Offload(True, True, True)
    assert program_text(again) == program_text(made)
    assert "host.store" in made.dumps[NUMBERED["offload"]]
    manifest = tmp_path / "program" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"offload": "{ALL}"', '"offload": "disk"'))
    with pytest.raises(VerificationError, match="disk"):
        load_program(tmp_path / "program")


def test_loads_stand_one_call_ahead() -> None:
    """Between a load and its use lies a call that computes."""
    lowered = offloaded("llama", "dp=2,tp=2", "activations").lowered
    loads = {i.outs: k for k, i in enumerate(lowered.main) if isinstance(i, Call) and "_load" in i.segment}
    assert loads
    for outs, k in loads.items():
        user = next(n for n, i in enumerate(lowered.main) if isinstance(i, Call) and set(outs) & set(i.args))
        between = [i.segment for i in lowered.main[k + 1 : user] if isinstance(i, Call)]
        assert any("_load" not in name and "_store" not in name for name in between)


def test_words() -> None:
    assert str(Offload.parse(" optimizer, activations")) == "activations,optimizer"
    assert not Offload.parse("")
    with pytest.raises(UsageError, match="did you mean 'parameters'"):
        Offload.parse("paramters")
    with pytest.raises(UsageError, match="disk"):
        compile_analysed(planned("llama", "fsdp=4"), offload="disk")
    model, inputs = family("llama").make()
    with pytest.raises(UsageError, match="disk"):
        autoshard.plan(model, "fsdp=4", example_inputs=inputs, offload="disk")


@pytest.mark.parametrize("command", ["plan", "compile"])
def test_the_command_line_refuses_an_unknown_word_before_anything_is_built(
    command: str, tmp_path: Path
) -> None:
    words = [command, "no_such_module:make", "--mesh", "dp=2", "--offload", "disk", "-o", str(tmp_path / "o")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "'disk' is nothing that can be offloaded" in done.output


# -- the simulation ----------------------------------------------------------------------------------------


@functools.cache
def deep() -> Analysis:
    """Eight layers."""
    torch.manual_seed(0)
    model = _gpt2(layers=8)
    ids = torch.randint(3, 97, (8, 12))
    return analyse(capture(model, (), {"input_ids": ids, "labels": ids}))


def hosted_cluster(**changes: float) -> Cluster:
    """The CPU cluster with a host link that is in nobody's way."""
    cluster = load_cluster("cpu-gloo")
    host = replace(Host(1e13, 0.0, 2**40, 1e13, 4), **changes)  # type: ignore[arg-type]
    return replace(cluster, device=replace(cluster.device, host=host))


def test_the_peak_falls_by_what_is_stored() -> None:
    """Of eight layers, what at most three keep is on the device at once: one that computes, one on its way
    to the host, and one that was loaded ahead."""
    cluster = hosted_cluster()
    found = plan_analysed(deep(), [Mesh.parse("dp=2,tp=2")], cluster)
    before = estimate_step(compile_analysed(found), cluster)
    after = estimate_step(compile_analysed(found, offload="activations"), cluster)
    (stored,) = after.host
    saved = before.fullest.peak - after.fullest.peak
    assert 0.45 * stored.activations < saved <= stored.activations
    assert after.fullest.at_peak.activations < before.fullest.at_peak.activations
    # nothing waits for a link that fast
    assert after.spent.axes["host"] == pytest.approx(0.0, abs=1e-7)
    assert after.seconds == pytest.approx(before.seconds, rel=1e-6)


@pytest.mark.parametrize("kinds", ["", "activations", "parameters", "activations,parameters"])
def test_live_bytes_are_those_simulated(kinds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that live at once on one rank as its program runs, those in host memory not counted."""
    cluster = hosted_cluster()
    found = plan_analysed(deep(), [Mesh.parse("dp=1")], cluster)
    made = compile_analysed(found, offload=kinds)
    store = PlainHost.store

    def unseen(self: PlainHost, xs: Sequence[torch.Tensor]) -> list[HostValue]:
        with _disable_current_modes():
            return store(self, xs)

    monkeypatch.setattr(PlainHost, "store", unseen)
    values = {**dict(_gpt2(layers=8).named_parameters()), **made.constants}
    rank = RankProgram(made, 0, {}, torch.device("cpu"))
    env, held = rank.start(), []
    for port in made.signature.ports:
        value = values.get(port.target, torch.ones(port.type.shape, dtype=torch_dtype(port.type.dtype)))
        assert isinstance(value, torch.Tensor)
        env[port.name] = value.detach()
        if port.kind == "param" and not made.offload.parameters:
            held.append(env[port.name])
    with torch.no_grad(), LiveBytes(held) as live:
        for phase in ("forward", "backward", "reduce"):
            rank.run(env, (0, phase, 0))
        peak = live.peak
    simulated = estimate_step(made, cluster).fullest
    # the simulation knows nothing of what the CPU kernel of attention makes beside its results
    assert peak == pytest.approx(simulated.peak - simulated.held.optimizer, rel=0.03)


@pytest.mark.parametrize("kinds", ["parameters", "optimizer"])
def test_states_leave_the_device(kinds: str) -> None:
    cluster = hosted_cluster()
    found = plan_analysed(deep(), [Mesh.parse("fsdp=4")], cluster)
    before = estimate_step(compile_analysed(found), cluster).fullest
    after = estimate_step(compile_analysed(found, offload=kinds), cluster)
    held, (host,) = after.fullest.held, after.host
    assert held.optimizer == 0.0 and host.optimizer == before.held.optimizer > 0
    assert held.parameters == (0.0 if kinds == "parameters" else before.held.parameters)
    assert host.parameters == host.gradients == before.held.parameters
    assert after.fullest.peak < before.peak - before.held.optimizer + 1


def test_a_slow_link_keeps_activations_on_the_device() -> None:
    """What a link cannot take beside computing stays, unless memory asks for it."""
    slow = hosted_cluster(bandwidth=1e3)
    found = plan_analysed(deep(), [Mesh.parse("dp=2,tp=2")], slow)
    made = compile_analysed(found, offload="activations")
    assert STORE not in ops_of(made)
    tight = replace(found, plan=replace(found.plan, budget=1))
    forced = compile_analysed(tight, offload="activations")
    assert STORE in ops_of(forced)
    exposed = estimate_step(forced, slow).spent.axes["host"]
    assert exposed > 0.5 * estimate_step(forced, slow).seconds
    # no more of them than memory asks for
    peaks = [estimate_step(each, slow).fullest.peak for each in (made, forced)]
    half = replace(found, plan=replace(found.plan, budget=int(sum(peaks) / 2)))
    some = compile_analysed(half, offload="activations")
    assert 0 < ops_of(some).count(STORE) < ops_of(forced).count(STORE)
    assert estimate_step(some, slow).fullest.peak <= sum(peaks) / 2


def test_what_comes_before_storing_is_the_same_for_every_share() -> None:
    cluster, analysis = hosted_cluster(bandwidth=1e9), deep()
    found = plan_analysed(analysis, [Mesh.parse("fsdp=4")], cluster, reasons=False)
    assert found.solution is not None
    flow, passes = found.solution.formulated.model.flow, PassOptions(offload="activations")
    how = lowering_of(found.plan, flow, analysis, cluster, passes)
    assert how.hosting is not None
    stored = lower_by_share(analysis.folded, how)
    ways = ((1.0, True), (0.0, True), (0.5, True), (1.0, False))
    made = [stored(*way) for way in ways]
    assert made == [
        lower(analysis.folded, replace(how, hosting=replace(how.hosting, share=share, ahead=ahead)))
        for share, ahead in ways
    ]
    assert made[0] != made[1] != made[2] and made[0] != made[3]


def test_plans_see_both_memories() -> None:
    """A budget that nothing fits without, fits with; and the memory of a node is a limit, too."""
    cluster = hosted_cluster()
    mesh = [Mesh.parse("fsdp=4")]
    free = plan_analysed(deep(), mesh, cluster)
    bare = plan_analysed(deep(), mesh, cluster, memory=usable_memory(cluster.device)).peak
    assert bare is not None
    least = estimate_step(compile_analysed(free, offload=ALL), cluster).fullest.peak
    tight = int(least) + 1024
    with pytest.raises(InfeasibleError):
        plan_analysed(deep(), mesh, cluster, memory=tight)
    fits = plan_analysed(deep(), mesh, cluster, memory=tight, offload=Offload(True, True, True))
    assert fits.peak is not None and fits.peak.bytes <= tight
    assert fits.plan.offload == ALL
    assert estimate_step(compile_analysed(fits), cluster).fullest.peak <= tight
    small = hosted_cluster(memory_bytes=100_000)
    with pytest.raises(InfeasibleError, match="host memory"):
        compile_analysed(replace(free, cluster=small), offload="parameters")
    made = compile_analysed(free, offload="parameters")
    report = verify_static(made, cluster=small)
    assert "what is offloaded on a node holds" in report.findings[0].finding.what
    assert verify_static(made, cluster=cluster).ok


def test_a_cluster_file_says_what_was_measured() -> None:
    cluster = hosted_cluster(memory_bytes=123_456_789, latency=2e-6)
    text = cluster_text(cluster, "a test", {}, [{}])
    assert parse_cluster(text, where="a test").device.host == cluster.device.host
    with pytest.raises(UsageError, match="bandwidth is 0"):
        parse_cluster(
            text.replace("[device.host]\nbandwidth = 1e+13", "[device.host]\nbandwidth = 0"), where=""
        )
    clock = CallTimer(torch.device("cpu"), 1, list)
    host, _ = measure_host(clock, 4, 2e10, 1e-6)
    assert (host.bandwidth, host.latency, host.devices, host.memory_bandwidth) == (1e10, 1e-6, 4, 8e10)


def test_a_cluster_must_know_its_host() -> None:
    cluster = load_cluster("cpu-gloo")
    bare = replace(cluster, device=replace(cluster.device, host=None))
    with pytest.raises(UsageError, match=r"\[device.host\]"):
        compile_analysed(replace(planned("llama", "fsdp=4"), cluster=bare), offload="activations")


# -- mistakes ----------------------------------------------------------------------------------------------


def _reading(item: Instruction, same: Mapping[str, str]) -> Instruction:
    """An instruction of main that reads some values under other names."""
    if isinstance(item, Call):
        return replace(item, args=tuple(same.get(a, a) for a in item.args))
    return substitute(item, lambda name: Ref(same.get(name, name)))


def _without(made: Program, op: str) -> Iterator[tuple[str, Program]]:
    """Programs that lack one store or load: whoever reads its results reads what it was given."""
    lowered = made.lowered
    for k, item in enumerate(lowered.main):
        if not isinstance(item, Call):
            continue
        nodes = lowered.segments[item.segment].graph.nodes
        if [n.op for n in nodes] != [op]:
            continue
        same = dict(zip(item.outs, item.args, strict=True))
        main = [_reading(i, same) for n, i in enumerate(lowered.main) if n != k]
        parts = tuple(
            replace(p, start=p.start - (p.start > k), stop=p.stop - (p.stop > k)) for p in lowered.parts
        )
        results = tuple(same.get(r, r) for r in lowered.results)
        named = tuple(replace(r, value=same.get(r.value, r.value)) for r in made.signature.results)
        signature = replace(made.signature, results=named)
        yield (
            item.segment,
            replace(
                made,
                lowered=replace(lowered, main=tuple(main), parts=parts, results=results),
                signature=signature,
            ),
        )


@pytest.mark.parametrize("op", [STORE, LOAD])
@pytest.mark.parametrize("mesh", ["fsdp=4", "dp=2,tp=2"])
def test_what_is_dropped_is_found(mesh: str, op: str) -> None:
    count = 0
    for segment, broken in _without(offloaded("llama", mesh, ALL), op):
        report = verify_static(broken)
        assert "host" in {f.finding.rule for f in report.findings}, segment
        count += 1
    assert count >= 3


# -- the optimizer -----------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)]).to(dtype)
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 16, generator=generator).to(dtype)).backward()
        optimizer.step()


def _adamw(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


@pytest.mark.parametrize("bucket", [1, 1500, 2**20])
def test_the_host_optimizer_is_the_optimizer(bucket: int) -> None:
    """Bit by bit, whatever the buckets; with groups, a scheduler, and parameters without a gradient."""
    plain, hosted = Plain(), Plain()

    def groups(model: Plain) -> list[dict[str, object]]:
        return [
            {"params": [*model.layers[:2].parameters(), model.unused], "weight_decay": 0.1},
            {"params": list(model.layers[2:].parameters()), "lr": 1e-3},
        ]

    one = torch.optim.AdamW(groups(plain), lr=1e-2)
    two = HostOptimizer(groups(hosted), _adamw, bucket=bucket)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (one, two)]
    for _ in range(3):
        for model, optimizer in ((plain, one), (hosted, two)):
            _steps(model, optimizer, 1)
        for schedule in schedules:
            schedule.step()
    for (name, p), q in zip(plain.named_parameters(), hosted.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert two.state.keys() < {*hosted.parameters()}


def test_the_host_optimizer_follows_the_model_and_its_own_state() -> None:
    """Weights loaded into the model count, and a state that was saved goes on with the same numbers."""
    one, two = Plain(), Plain()
    first = HostOptimizer(one.parameters(), _adamw)
    _steps(one, first)
    saved = copy.deepcopy((one.state_dict(), first.state_dict()))
    _steps(one, first, seed=2)
    second = HostOptimizer(two.parameters(), _adamw)
    _steps(two, second, 1, seed=5)
    two.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    _steps(two, second, seed=2)
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(p, q)


def test_parameters_in_host_memory_are_updated_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once a step, whatever the buckets; their gradients stay until they are cleared."""

    def at_home(parameter: torch.Tensor, master: bool) -> host_optimizer._Pair:
        return host_optimizer._Pair(parameter, parameter, parameter)

    monkeypatch.setattr(host_optimizer, "_pair", at_home)
    plain, home = Plain(), Plain()
    two = HostOptimizer(home.parameters(), _adamw, bucket=1)
    _steps(plain, _adamw(list(plain.parameters())))
    _steps(home, two)
    for (name, p), q in zip(plain.named_parameters(), home.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert home.unused.grad is None and home.layers[0].weight.grad is not None
    two.zero_grad()
    assert home.layers[0].weight.grad is None


def test_groups_that_are_added_and_clipping_over_groups() -> None:
    """As torch's optimizer: unfrozen parameters are stepped once a step, and their gradients are cleared."""
    plain, hosted = Plain(), Plain()
    one = _adamw(list(plain.layers[0].parameters()))
    two = HostOptimizer(hosted.layers[0].parameters(), _adamw, bucket=1)
    for model, optimizer in ((plain, one), (hosted, two)):
        _steps(model, optimizer, 1)
        optimizer.add_param_group({"params": list(model.layers[1:].parameters()), "lr": 1e-3})
        for seed in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))).backward()
            held = [p for group in optimizer.param_groups for p in group["params"]]
            assert torch.nn.utils.clip_grad_norm_(held, 1e-3) > 1e-3
            optimizer.step()
    for (name, p), q in zip(plain.named_parameters(), hosted.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert [g["lr"] for g in two.param_groups] == [1e-2, 1e-3]


def test_masters_follow_what_others_change() -> None:
    """Elements written through ``.data`` count, bits that come back do not; states first or last."""

    def slow(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-5, weight_decay=0.0)

    model = Plain(torch.bfloat16)
    optimizer = HostOptimizer(model.parameters(), slow, master=True)
    _steps(model, optimizer)
    weight = model.layers[0].weight
    before = optimizer.state[weight]["master"].clone()
    assert not torch.equal(before, weight.float())
    weight.data[0].fill_(0.5)
    with torch.no_grad():
        model.layers[1].weight.copy_(model.layers[1].weight.clone())
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    _steps(model, optimizer, 1)
    after = optimizer.state[weight]["master"]
    assert (after[0] - 0.5).abs().max() < 1e-4 and (after[1:] - before[1:]).abs().max() < 1e-4
    for order in ((0, 1), (1, 0)):
        other = Plain(torch.bfloat16)
        loaded = HostOptimizer(other.parameters(), slow, master=True)
        for k in order:
            (other, loaded)[k].load_state_dict(copy.deepcopy(saved[k]))
        _steps(other, loaded, 1)
        assert torch.equal(loaded.state[other.layers[0].weight]["master"], after)


def test_a_grad_scaler_scales_what_the_host_steps() -> None:
    model = Plain(torch.bfloat16)
    optimizer = HostOptimizer(model.parameters(), _adamw, master=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(4, 16, dtype=torch.bfloat16))).backward()
    weight = model.layers[0].weight
    scaled, before = weight.grad.clone(), weight.detach().clone()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(weight.grad, scaled / 1024)
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(weight, before)


def test_masters_are_wider() -> None:
    """Steps too small for bf16 add up in float32 copies, which are saved with the state."""
    model = Plain(torch.bfloat16)

    def small(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1e-5)

    wide, narrow = copy.deepcopy(model), copy.deepcopy(model)
    held = HostOptimizer(wide.parameters(), small, master=True)
    for each, optimizer in ((wide, held), (narrow, HostOptimizer(narrow.parameters(), small))):
        for p in each.parameters():
            p.grad = torch.ones_like(p)
        for _ in range(500):
            optimizer.step()
    # next to 1 lie numbers of bf16 in steps of 2 ** -8
    assert torch.equal(narrow.unused, model.unused)
    (number,) = (k for k, p in enumerate(wide.parameters()) if p is wide.unused)
    master = held.state_dict()["state"][number]["master"]
    torch.testing.assert_close(master, torch.full((3,), 1 - 500e-5), atol=1e-5, rtol=0)
    assert torch.equal(wide.unused, master.to(torch.bfloat16)) and not torch.equal(wide.unused, model.unused)


# -- on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_pinned_memory_and_back() -> None:
    """What comes back is what was there when it was stored, though its memory was written anew meanwhile."""
    device = torch.device("cuda")
    host = CudaHost(device)
    xs = [torch.randn(1 << 22, device=device), torch.randn(64, 33, device=device).t()]
    wanted = [x.clone() for x in xs]
    stored = host.store(xs)
    del xs
    noise = [torch.full((1 << 22,), float(k), device=device) for k in range(4)]
    again = host.store(noise)
    found = host.load(stored).results()
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(found, wanted, strict=True))
    assert stored[0].landed().is_pinned() and again[3].landed()[0] == 3.0
    own = torch.ones(8).pin_memory()
    (copy_,) = host.load([own]).results()
    host.settle()
    own.zero_()
    assert bool((copy_ == 1).all())


@pytest.mark.gpu
def test_the_host_optimizer_on_a_gpu() -> None:
    plain, hosted = Plain().cuda(), Plain().cuda()
    one, two = _adamw(list(plain.parameters())), HostOptimizer(hosted.parameters(), _adamw, bucket=600)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(4, 16, generator=generator).cuda()
        for model, optimizer in ((plain, one), (hosted, two)):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
    assert all(x.device.type == "cpu" for s in two.state.values() for x in s.values())
    for p, q in zip(plain.parameters(), hosted.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)
