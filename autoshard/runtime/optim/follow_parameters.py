"""Optimizers that were made before the model was parallelized go on with the parameters that it has now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.errors import UsageError
from autoshard.torch_adapters.step_hooks import before_steps


def follow_parameters(model: nn.Module, replaced: Mapping[nn.Parameter, nn.Parameter | None]) -> None:
    """Before the step of any optimizer that holds a replaced parameter, give it the new one.

    replaced: old parameter of the model -> the one that stands in its place, None for one that other ranks
    hold. Uses torch's hook before optimizer steps, which goes away with the model.
    """
    table = WeakTensorKeyDictionary()
    for old, new in replaced.items():
        table[old] = new

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not len(table):
            return
        for group in optimizer.param_groups:
            params: list[torch.Tensor] = group["params"]
            if any(p in table for p in params):
                _check_fresh(optimizer, [p for p in params if p in table])
                params[:] = [q for q in (table.get(p, p) for p in params) if q is not None]

    before_steps(model, before_step, first=True)


def _check_fresh(optimizer: Optimizer, old: list[torch.Tensor]) -> None:
    if any(optimizer.state.get(p) for p in old):
        raise UsageError(
            f"this {type(optimizer).__name__} has made steps with the model before it was parallelized",
            why="its moments are those of whole parameters, which ranks no longer hold",
            hint="make the optimizer after parallelize, or load its state with torch.distributed.checkpoint",
        )
