"""How an architecture is compared with eager: all ranks in lockstep on a 2 x 2 mesh."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from lockstep_check import RTOL, lockstep_step, relative_error
from torch import nn

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster
from autoshard.planner.analysis import analyse
from autoshard.planner.planning import plan_analysed
from autoshard.program.program import Program

if TYPE_CHECKING:
    from architectures import Architecture


def program_of(model: nn.Module, inputs: dict[str, Any], mesh: str = "dp=2,tp=2") -> Program:
    analysis = analyse(capture(model, (), inputs))
    return compile_analysed(plan_analysed(analysis, [Mesh.parse(mesh)], load_cluster("h100-dgx")))


def errors_of(model: nn.Module, inputs: dict[str, Any], program: Program | None = None) -> dict[str, float]:
    """Relative error of the loss, of every gradient and of every buffer that a step changes."""
    program = program or program_of(model, inputs)
    lockstep, env = lockstep_step(program, model, inputs)
    out = model(**inputs)
    out["loss"].backward()
    params = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    errors: dict[str, float] = {}
    for result in program.signature.results:
        found = lockstep.whole(env[result.value], result.value)
        if result.kind == "grad":
            grad = params[result.target].grad
            if grad is None:  # of an expert that no token chose
                grad = torch.zeros_like(params[result.target])
            errors[result.target] = relative_error(found, grad)
        elif result.kind == "buffer":
            errors[result.target] = relative_error(found.double(), buffers[result.target].double())
        elif result.kind == "output" and found.dim() == 0 and "loss" not in errors:
            errors["loss"] = relative_error(found, out["loss"].detach())
    return errors


def print_table(architectures: Sequence[Architecture]) -> None:
    """Print a table in markdown, a row per architecture."""
    warnings.simplefilter("ignore")
    print(f"{len(architectures)} architectures on dp=2,tp=2: loss, gradients and buffers beside eager.\n")
    print("| family | architecture | worst relative error |\n| --- | --- | --- |")
    for architecture in architectures:
        model, inputs = architecture.make()
        worst = max(errors_of(model, inputs).values())
        mark = "" if worst < RTOL else " (too large)"
        print(f"| {architecture.family} | {architecture.name} | {worst:.1e}{mark} |", flush=True)
