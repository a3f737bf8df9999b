"""Pipelines cut anywhere, with everything else a plan may say: in lockstep equal to eager."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import DEEP, FAMILIES
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pipelines import cuts_of, model_and_batch, planned
from plain_nets import resnet
from sampling import examples
from torch import nn
from torch.nn import functional as F

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster
from autoshard.errors import UsageError
from autoshard.ir import Call, Folded
from autoshard.passes.pipeline import lower, place
from autoshard.passes.stages.unpartitioned import Unpartitioned
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.lowering import lowering_of
from autoshard.planner.planned import Planned
from autoshard.planner.planning import plan_analysed
from autoshard.program.holders import check_holders
from autoshard.program.program import Program
from autoshard.search.plan.plan import Cut, Pipeline, Recompute
from autoshard.verify.lockstep import has_dropout, needs_one_rank, verify

#: name -> stages per rank
SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "breadth-first": 2,
    "zb-h1": 1,
    "zb-v": 2,
    "searched": 1,
}
MESHES = ("dp=1", "dp=2", "tp=2", "fsdp=2", "dp=2,tp=2", "x=2")
#: keep, late
ZERO = {"ZeRO-1": (True, True), "ZeRO-2": (True, False), "ZeRO-3": (False, False)}


def _places(folded: Folded) -> list[Cut]:
    """A cut behind every op of the forward pass."""
    calls = [c for c in folded.calls if not c.backward]
    return [
        Cut(k, node.name, call.label)
        for k, call in enumerate(calls)
        for node in folded.segments[call.segment].nodes
    ]


def _cut(found: Planned, cuts: tuple[Cut, ...], schedule: str, microbatches: int, **changes: Any) -> Program:
    chunks = SCHEDULES[schedule]
    made = Pipeline((len(cuts) + 1) // chunks, 0, schedule, chunks, cuts)
    plan = replace(found.plan, pipeline=made, microbatches=microbatches, **changes)
    program = compile_analysed(replace(found, plan=plan))
    check_holders(program)
    return program


def _check(
    program: Program, model: nn.Module, args: tuple[Any, ...], batch: dict[str, Any], **more: Any
) -> None:
    found = verify(program, model, args, batch, steps=2, **more)
    assert found.ok, found.worst()


@settings(max_examples=examples(14, 3), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_cut_of_any_plan(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([f.name for f in (*DEEP, *FAMILIES)]), "family")
    found = planned(name, data.draw(st.sampled_from(MESHES), "mesh"))
    schedule = data.draw(st.sampled_from(sorted(SCHEDULES)), "schedule")
    places = _places(found.analysis.folded)
    count = data.draw(st.integers(1, 7), "cuts")
    if SCHEDULES[schedule] == 2:
        count = max(3, count | 1)
    at = data.draw(
        st.lists(st.integers(0, len(places) - 2), min_size=count, max_size=count, unique=True), "places"
    )
    microbatches = data.draw(st.integers(1, 5), "microbatches")
    changes: dict[str, Any] = {}
    zero = data.draw(st.sampled_from(["as planned", *ZERO]), "parameters")
    if zero in ZERO:
        keep, late = ZERO[zero]
        lives = {
            k: replace(p, keep=keep and p.stored != p.use, late=late) for k, p in found.plan.params.items()
        }
        changes["params"] = lives
    policy = data.draw(st.sampled_from(["none", "full", "selective"]), "recompute")
    if policy != "none":
        counts = Counter(c.segment for c in found.analysis.folded.calls if not c.backward)
        chosen = {s: data.draw(st.integers(0, n), s) for s, n in counts.items()}
        changes["recompute"] = {s: Recompute(policy, n) for s, n in chosen.items() if n}  # type: ignore[arg-type]
    cuts = tuple(places[k] for k in sorted(at))
    try:
        program = _cut(found, cuts, schedule, microbatches, **changes)
    except UsageError as error:
        # forward does not make what only backward wanted, and now makes for itself
        assume(not (policy != "none" and "does not make" in str(error)))
        raise
    model, batch = model_and_batch(name, microbatches)
    one_rank = None
    if has_dropout(program):
        alone = planned(name, "dp=1")
        one_rank = compile_analysed(replace(alone, plan=replace(alone.plan, microbatches=microbatches)))
    _check(program, model, (), batch, one_rank=one_rank)


# -- unusual models ------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A model whose forward is a function of its parts and of x [batch, 8]."""

    def __init__(self, run: Callable[[Any, torch.Tensor], Any], count: int = 4, **parts: Any) -> None:
        super().__init__()
        self.run, self.layers = run, nn.ModuleList([nn.Linear(8, 8) for _ in range(count)])
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def _stack(m: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        x = torch.tanh(layer(x))
    return x


def _early_loss(m: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    first = torch.tanh(m.layers[0](x))
    loss = m.layers[1](first).square().mean()
    return {"loss": loss, "other": m.layers[3](torch.relu(m.layers[2](first)))}


def _thrice(m: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in (m.layers[0], m.layers[1], m.layers[0], m.layers[2], m.layers[0]):
        x = x + torch.tanh(layer(x))
    return x.square().mean()


def _same_gradients(m: Any, x: torch.Tensor) -> torch.Tensor:
    """The biases of all layers but the first have the same gradient."""
    h = torch.tanh(m.layers[0](x))
    for layer in m.layers[1:]:
        h = h + layer(x)
    return h.square().mean()


def _without_parameters(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.layers[0](x)
    for _ in range(4):
        h = torch.softmax(torch.sin(h) * 2, -1)
    return m.layers[1](h).square().mean()


def _assigned(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A buffer that is written and never read, and one that is both."""
    h = _stack(m, x)
    m.last = h.detach().mean(0)
    loss = (h * m.average).square().mean()
    m.average = 0.5 * m.average + h.detach().mean(0)
    return loss


def _with_buffers(module: nn.Module) -> nn.Module:
    for name in ("last", "average"):
        module.register_buffer(name, torch.ones(8))
    return module


def _frozen(module: nn.Module, name: str) -> nn.Module:
    module.get_parameter(name).requires_grad_(False)
    return module


MODELS: dict[str, Callable[[], nn.Module]] = {
    "the loss comes early": lambda: Odd(_early_loss),
    "two outputs, no loss": lambda: Odd(lambda m, x: (_stack(m, x), m.layers[0](x))),
    "an unused parameter": lambda: Odd(lambda m, x: _stack(m, x).square().mean(), unused=nn.Linear(8, 8)),
    "a layer three times": lambda: Odd(_thrice),
    "parameters with one gradient": lambda: Odd(_same_gradients),
    "stages without parameters": lambda: Odd(_without_parameters),
    "a frozen parameter": lambda: _frozen(Odd(lambda m, x: _stack(m, x).square().mean()), "layers.1.weight"),
    "a frozen first layer": lambda: _frozen(
        _frozen(Odd(lambda m, x: _stack(m, x).square().mean()), "layers.0.weight"), "layers.0.bias"
    ),
    "buffers": lambda: _with_buffers(Odd(_assigned)),
    # in float64: these gradients nearly vanish behind a norm of four rows, and float32 has no digits left
    "running statistics": lambda: Odd(
        lambda m, x: F.relu(m.norm(_stack(m, x))).square().mean(), norm=nn.BatchNorm1d(8)
    ).double(),
    "half precision": lambda: Odd(lambda m, x: _stack(m, x).square().mean()).bfloat16(),
}


def _odd(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    model = MODELS[name]()
    return model, torch.randn(12, 8).to(next(model.parameters()).dtype)


@functools.cache
def _analysed(name: str) -> Analysis:
    model, x = _odd(name)
    return analyse(capture(model, (x[:4],)))


@pytest.mark.parametrize("name", MODELS)
def test_unusual_models(name: str) -> None:
    """Every place for one of two cuts, with other schedules and meshes in turn."""
    model, x = _odd(name)
    alone = plan_analysed(_analysed(name), [Mesh.parse("dp=1")], load_cluster("cpu-gloo"), reasons=False)
    one_rank = compile_analysed(replace(alone, plan=replace(alone.plan, microbatches=3)))
    for number, mesh in enumerate(("dp=1", "dp=2", "tp=2", "fsdp=2")):
        found = plan_analysed(_analysed(name), [Mesh.parse(mesh)], load_cluster("cpu-gloo"), reasons=False)
        places = _places(found.analysis.folded)
        for k in range(number, len(places) - 2, 4):
            schedule = ("1f1b", "zb-h1", "gpipe")[k % 3]
            cuts = (places[k], places[k + 1 + k % (len(places) - 2 - k)])
            try:
                program = _cut(found, cuts, schedule, 3)
            except UsageError as error:
                # no stage may read a buffer that another one updates
                assert name == "buffers" and "is updated in pipeline stage" in str(error), error
                continue
            _check(program, model, (x,), {}, one_rank=one_rank if needs_one_rank(program) else None)


@pytest.mark.parametrize("again", [{}, {"layers_fwd": Recompute("selective", 2)}])
def test_what_was_looked_at_before_is_cut_alike(again: dict[str, Recompute]) -> None:
    found = planned("llama-deep", "tp=2")
    folded = found.analysis.folded
    uncut = replace(found.plan, microbatches=4, recompute=again)
    cut = replace(uncut, pipeline=Pipeline(4, 0, "1f1b", 1, cuts_of(folded, 4)))
    whole, how = (lowering_of(p, found.analysis.flow, found.analysis, found.cluster) for p in (uncut, cut))
    known = Unpartitioned.of(place(folded, whole))
    assert lower(folded, how, uncut=known) == lower(folded, how)
    assert lower(folded, replace(how, split_backward=True), uncut=known) != lower(folded, how)


def test_a_convolutional_net() -> None:
    torch.manual_seed(0)
    model = resnet().train()
    batch = {"pixel_values": torch.randn(6, 3, 16, 16), "labels": torch.randint(0, 6, (6,))}
    one = {k: v[:2] for k, v in batch.items()}
    alone = plan_analysed(analyse(capture(model, (), one)), [Mesh.parse("dp=1")], load_cluster("cpu-gloo"))
    one_rank = compile_analysed(replace(alone, plan=replace(alone.plan, microbatches=3)))
    for mesh, schedule in (("dp=2", "zb-v"), ("dp=1", "interleaved")):
        found = plan_analysed(analyse(capture(model, (), one)), [Mesh.parse(mesh)], load_cluster("cpu-gloo"))
        places = _places(found.analysis.folded)
        for first in (1, 4):
            cuts = tuple(places[len(places) * k // 8 + first] for k in (1, 4, 6))
            _check(_cut(found, cuts, schedule, 3), model, (), batch, one_rank=one_rank)


def test_many_stages_of_many_ranks() -> None:
    """64 stages of 8 ranks each."""
    torch.manual_seed(0)
    model = Odd(lambda m, x: _stack(m, x).square().mean(), count=64)
    x = torch.randn(16, 8)
    found = plan_analysed(
        analyse(capture(model, (x[:8],))), [Mesh.parse("dp=2,tp=4")], load_cluster("cpu-gloo")
    )
    places = _places(found.analysis.folded)
    cuts = tuple(places[len(places) * k // 64] for k in range(1, 64))
    program = _cut(found, cuts, "1f1b", 2)
    assert program.full_mesh == "pp=64,dp=2,tp=4"
    _check(program, model, (x,), {})


@pytest.mark.parametrize("mesh", ["fsdp=2", "dp=2,tp=2"])
def test_gradients_that_stay_whole_are_scattered_once_a_step(mesh: str) -> None:
    """ZeRO-1: nothing is reduced in the microbatches; sums over two axes wait for both."""
    found = planned("llama-deep", mesh)
    params = {k: replace(p, keep=p.stored != p.use, late=True) for k, p in found.plan.params.items()}
    program = compile_analysed(replace(found, plan=replace(found.plan, params=params, microbatches=3)))
    lowered = program.lowered

    def reductions(phase: str) -> int:
        items = [i for p in lowered.parts if p.phase == phase for i in lowered.of(p)]
        nodes = [
            n
            for i in items
            for n in (lowered.segments[i.segment].graph.nodes if isinstance(i, Call) else [i])
        ]
        grads = {
            r.target: lowered.values[v].type
            for r, v in zip(program.signature.results, lowered.results, strict=True)
        }
        shapes = set(grads.values())
        return sum(
            n.op.split(".")[1].startswith(("reduce_scatter", "all_reduce")) and n.types[0] in shapes
            for n in nodes
        )

    assert reductions("backward") == 0
    assert reductions("reduce") > 0
    model, batch = model_and_batch("llama-deep", 3)
    _check(program, model, (), batch)
