"""One rank's part of a script: eager PyTorch in the same process beside the parallel model."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.errors import AutoshardError
from fuzz.case import Outcome
from fuzz.module_case import tolerance
from fuzz.steps import Steps
from fuzz.world import Facts, Wrong, compare, facts, state_of, world


@dataclass
class Seen:
    """What a script showed. error: what ended it. state: Python's, at the end."""

    values: Facts = field(default_factory=dict)
    state: Facts = field(default_factory=dict)
    error: Exception | None = None


def run(steps: Steps, parallelize: Any = autoshard.parallelize) -> Outcome:
    """On every rank: what became of the case here."""
    wanted = _script(world(steps.source()))
    if wanted.error is not None:
        return Outcome("dropped", detail=f"{type(wanted.error).__name__}: {wanted.error}")
    large = [k for k, v in wanted.values.items() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    if any(wanted.values[k].numel() and not wanted.values[k].abs().max() < 1e5 for k in large):
        return Outcome("dropped", detail="values explode, and rounding errors with them")
    try:
        return _beside(steps, wanted, parallelize)
    except Wrong as error:
        return Outcome("failed", error.failure, error.detail)
    except Exception as error:
        return Outcome("failed", type(error).__name__, f"{type(error).__name__}: {error}"[:2000])


def _beside(steps: Steps, wanted: Seen, parallelize: Any) -> Outcome:
    limit = max(tolerance(steps.model), 1e-6)  # clipping is in float32
    here = world(steps.source())
    model = here.make()
    try:
        parallel = parallelize(model, steps.mesh, example_inputs=here.batch(0))
    except AutoshardError as error:
        found = _script(here, model)
        if found.error is not None:
            raise Wrong("changed by a refusal", f"{error}\n{found.error}") from None
        if not steps.model.random:
            compare(found.values, wanted.values, limit, "changed by a refusal")
        return Outcome("refused", f"parallelize: {type(error).__name__}", str(error))
    found = _script(here, parallel)
    if steps.model.random:
        other = world(steps.source())
        again = _script(other, parallelize(other.make(), steps.mesh, example_inputs=other.batch(0)))
        compare(again.values, found.values, 0.0, "another seed")
    refused = isinstance(found.error, AutoshardError)
    if found.error is not None and not refused:
        raise found.error
    known = {k: v for k, v in wanted.values.items() if k in found.values or not refused}
    worst = 0.0
    if not steps.model.random:
        worst = compare(found.values, known, limit, "numbers")
    if refused:
        return Outcome("refused", f"call: {type(found.error).__name__}", str(found.error))
    state = {
        k: v for k, v in wanted.state.items() if not isinstance(v, torch.Tensor) or not steps.model.random
    }
    compare(
        {k: v for k, v in found.state.items() if k in state or k not in wanted.state}, state, limit, "state"
    )
    return Outcome("equal", error=worst)


def _script(here: types.ModuleType, model: nn.Module | None = None) -> Seen:
    """Run the script of a world. model: None for a new one."""
    seen = Seen()
    try:
        model = here.make() if model is None else model
        torch.manual_seed(0)  # the same numbers, whether the model was made now or before
        shown: nn.Module = model
        here.script(model, _clip(model), lambda name, *x: seen.values.update(_shown(here, shown, name, x)))
        seen.state = state_of(here, model)
    except Wrong:
        raise
    except Exception as error:
        seen.error = error
    return seen


def _clip(model: nn.Module) -> Any:
    split = any(isinstance(p, DTensor) for p in model.parameters())
    return autoshard.clip_grad_norm_ if split else nn.utils.clip_grad_norm_


def _shown(here: types.ModuleType, model: nn.Module, name: str, values: tuple[Any, ...]) -> Facts:
    """Values, gradients (one of zeros is as good as none), parameters and buffers."""
    found: Facts = {}
    for k, value in enumerate(values):
        found |= facts(value, f"{name}: out{k}", here)
    for key, p in model.named_parameters():
        if p.grad is not None:
            grad = facts(p.grad, f"{name}: {key}.grad", here)
            found |= {k: v for k, v in grad.items() if v.any()}
        found |= facts(p, f"{name}: {key}", here)
    for key, b in model.named_buffers():
        found |= facts(b, f"{name}: {key}", here)
    return found
