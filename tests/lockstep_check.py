"""Run a program in lockstep beside the eager model, and compare everything."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoshard.program.program import Program
from autoshard.runtime.lockstep.op_lockstep import Lockstep

#: fp32: relative to the largest element, with a floor for gradients that are zero in exact arithmetic
RTOL, FLOOR = 1e-4, 2e-5


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference relative to the largest element (or to the floor, if all are tiny)."""
    scale = max(float(wanted.abs().max()) if wanted.numel() else 0.0, FLOOR / RTOL)
    return float((found - wanted).abs().max()) / scale if wanted.numel() else 0.0


def lockstep_step(
    program: Program, model: nn.Module, inputs: dict[str, Any], seed: int = 0
) -> tuple[Lockstep, dict[str, Any]]:
    """Forward and backward of all ranks on the model's parameters."""
    lockstep = Lockstep(program)
    params = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    leaves, _ = torch.utils._pytree.tree_flatten(((), inputs))
    env: dict[str, list[torch.Tensor]] = {}
    for port in program.signature.ports:
        source: Any
        if port.kind == "param":
            source = params[port.target].detach()
        elif port.kind == "buffer":
            source = buffers[port.target]
        elif port.kind == "const":
            source = program.constants[port.target]
        elif port.kind == "tangent":
            source = torch.ones(port.type.shape)
        else:
            source = torch.tensor(seed) if port.target == "seed" else leaves[int(port.target)]
        env[port.name] = lockstep.shards(source, port.name)
    lockstep.run(env, False)
    lockstep.run(env, True)
    return lockstep, env


def results_of(
    program: Program, model: nn.Module, inputs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[float]]:
    """All results of a step, whole, and what each rounding lost."""
    lockstep, env = lockstep_step(program, model, inputs)
    results = [lockstep.whole(env[r.value], r.value) for r in program.signature.results]
    return results, [r.error for r in lockstep.rounding]


def compare_step(program: Program, model: nn.Module, inputs: dict[str, Any]) -> dict[str, float]:
    """Relative error of the loss, of all outputs and of all gradients against the eager model."""
    lockstep, env = lockstep_step(program, model, inputs)
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    params = dict(model.named_parameters(remove_duplicate=False))
    errors: dict[str, float] = {}
    for result in program.signature.results:
        found = lockstep.whole(env[result.value], result.value)
        if result.kind == "grad":
            grad = params[result.target].grad
            assert grad is not None
            errors[result.target] = relative_error(found, grad)
        elif result.kind == "output" and found.dim() == 0:
            errors["loss"] = relative_error(found, out.loss.detach())
    return errors
