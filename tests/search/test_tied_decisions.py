"""Steps of loops and layers that differ in numbers decide together, and everything else stays as it is."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from lockstep_check import RTOL, relative_error, results_of
from torch import nn

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster
from autoshard.cost.step_time import Exposure
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.planning import plan_analysed
from autoshard.search.problem.cost_terms import profile
from autoshard.search.problem.problem import Model
from autoshard.search.problem.tied_decisions import TiedDecisions
from autoshard.search.solve.formulate import ShardingProblem, formulate, layer_calls
from autoshard.search.solve.step_config import StepConfig

HEADS, WIDTH, STEPS = 4, 8, 40


class Recurrent(nn.Module):
    """A cell run step by step, as recurrent layers of transformers are without their kernels."""

    def __init__(self) -> None:
        super().__init__()
        wide = HEADS * WIDTH
        self.q, self.k, self.v, self.out = (nn.Linear(wide, wide, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = x.shape[0]
        q, k, v = (
            part(x).view(batch, STEPS, HEADS, WIDTH).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        state = x.new_zeros(batch, HEADS, WIDTH, WIDTH)
        given = []
        for step in range(STEPS):
            state = state * 0.9 + k[:, :, step, :, None] * v[:, :, step, None, :]
            given.append((q[:, :, step, :, None] * state).sum(-2).tanh())
        mixed = torch.stack(given, dim=2).transpose(1, 2).reshape(batch, STEPS, HEADS * WIDTH)
        return x + self.out(mixed)


class Scaled(nn.Module):
    """A layer with a number of its own."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.up, self.down, self.rate = nn.Linear(32, 64), nn.Linear(64, 32), rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu()) * self.rate


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(layers), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


MODELS = {
    "loop": lambda: Stack([Recurrent(), Recurrent(), Recurrent()]),
    "numbers": lambda: Stack([Scaled(1.0 - 0.1 * k) for k in range(5)]),
}
INPUT = (8, STEPS, 32)


@functools.cache
def made(name: str) -> tuple[nn.Module, torch.Tensor, Analysis]:
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(INPUT)
    return model, x, analyse(capture(model, (), {"x": x}))


def formulated_of(model: Model, mesh: str) -> tuple[ShardingProblem, StepConfig]:
    setting = StepConfig(2, layer_calls(model.folded), overlap=0.8)
    return formulate(model, Mesh.parse(mesh), load_cluster("h100-dgx"), setting), setting


def apart(model: Model) -> Model:
    """The same model, every op of which decides for itself."""
    loose = replace(model)
    loose.__dict__["alike"] = TiedDecisions({}, {}, across=False)
    return loose


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "fsdp=4", "tp=4"])
@pytest.mark.parametrize("name", MODELS)
def test_costs_are_those_of_ops_that_decide_apart(name: str, mesh: str) -> None:
    """All kinds of seconds and bytes of the same choice, counted op by op."""
    model = made(name)[2].model
    tied, setting = formulated_of(model, mesh)
    loose, _ = formulated_of(apart(model), mesh)
    assert len(tied.problem.variables) < 0.6 * len(loose.problem.variables)
    assert tied.problem.index.keys() == loose.problem.index.keys()
    assert tied.strict == loose.strict
    states = [-1] * len(loose.problem.variables)
    for key, number in loose.problem.index.items():
        there = tied.problem.index[key]
        chosen = tied.problem.variables[there].states[tied.free.states[there]]
        states[number] = loose.problem.variables[number].states.index(chosen)
    found = profile(tied.problem.terms, tied.free.states)
    wanted = profile(loose.problem.terms, states)
    for kind, seconds in wanted.seconds.items():
        assert found.seconds.get(kind, 0.0) == pytest.approx(seconds, rel=1e-9), kind
    for held, size in wanted.bytes.items():
        assert found.bytes.get(held, 0.0) == pytest.approx(size, rel=1e-9), held
    network = setting.network(loose.problem.terms, Exposure(0.3, 0.5, 0.7, 1.0), loose.allowed)
    assert np.isfinite(network.seconds_of(states))


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "fsdp=2,tp=2"])
@pytest.mark.parametrize("name", MODELS)
def test_a_program_computes_what_the_model_does(name: str, mesh: str) -> None:
    """Every op is in the plan, and its program gives the loss and gradients of the eager model."""
    model, x, analysis = made(name)
    model.zero_grad()
    loss = model(x=x)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    planned = plan_analysed(analysis, [Mesh.parse(mesh)], load_cluster("cpu-gloo"))
    segments = analysis.folded.segments
    assert planned.plan.nodes.keys() == {(n, k) for n, g in segments.items() for k in range(len(g.nodes))}
    program = compile_analysed(planned)
    results, _ = results_of(program, model, {"x": x})
    assert len(results) == 1 + len(gradients)
    for result, found in zip(program.signature.results, results, strict=True):
        wanted = gradients[result.target] if result.kind == "grad" else loss.detach()
        assert wanted is not None
        assert relative_error(found, wanted) < RTOL, result


def test_what_differs_in_more_than_numbers_decides_alone() -> None:
    """Layers of other sizes, too few of them, and small segments."""
    layers: list[Any] = [Scaled(0.9), Scaled(0.8), nn.Linear(32, 32), nn.Linear(32, 32, bias=False)]
    folded = analyse(capture(Stack(layers), (torch.randn(INPUT),), {})).folded
    found = TiedDecisions.of(folded)
    assert not found.ops
    assert not found.inputs
    assert not found.across
