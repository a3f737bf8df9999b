"""Models of which parts, or all, were given to torch.compile: planned as they are written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compiled_nets import Net, in_place, inside
from ranks import HERE, run_ranks
from torch import nn

import autoshard
from autoshard.verify.lockstep import verify


def whole(model: Net) -> nn.Module:
    return torch.compile(model)  # type: ignore[return-value]


def layers(model: Net) -> nn.Module:
    model.layers = nn.ModuleList(torch.compile(layer) for layer in model.layers)  # type: ignore[misc]
    return model


def forwards(model: Net) -> nn.Module:
    for each in (model, *model.layers):
        each.forward = torch.compile(each.forward)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("way", [whole, layers, inside, in_place, forwards])
def test_compiled_modules_are_planned_as_written(way: Callable[[Net], nn.Module]) -> None:
    model, x = way(Net()), torch.randn(4, 8)
    before = list(model.state_dict())
    planned = autoshard.plan(model, "dp=2,tp=2", example_inputs=(x,))
    program = autoshard.compile(model, planned).program
    assert list(model.state_dict()) == before, "the model is left as it was"
    assert planned.analysis.fingerprint == autoshard.plan(Net(), "tp=2", example_inputs=(x,)).plan.fingerprint
    names = [p.target for p in program.signature.ports if p.kind == "param"]
    assert sorted(names) == sorted(name for name, _ in Net().named_parameters())
    assert verify(program, model, (x,), {}).ok
    assert verify(program, Net(), (x,), {}).ok


def test_processes_take_them_and_refuse_alike() -> None:
    """Compiled models, ops without a rule, and pipelines on four processes: see `parallelize_worker`."""
    run_ranks([str(HERE / "parallelize_worker.py")])
