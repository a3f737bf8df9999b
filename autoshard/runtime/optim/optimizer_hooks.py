"""What optimizers of parallel models have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from autoshard.torch_adapters.blocks import is_described, part_of, plain_local
from autoshard.torch_adapters.dtensor import dtensor_like
from autoshard.torch_adapters.step_hooks import after_steps


def local(x: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor; without gradients, and sharing its version."""
    return plain_local(part_of(x))


def parameters_in(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Those of all its groups."""
    return (p for group in optimizer.param_groups for p in group["params"])


def options_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """Rates and the like of a group."""
    return {name: x for name, x in group.items() if name not in ("params", "param_names")}


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure given to a step returns, called with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def keep_blocks(model: nn.Module) -> None:
    """Let states of optimizers know the blocks that a model's parameters are (`torch_adapters.blocks`).

    What an optimizer makes like a parameter knows them; what torch distributes when full states are loaded
    does not, and is replaced after the load, or after the first step of an optimizer that took none before.
    """
    if not any(is_described(p) for p in model.parameters()):
        return
    known: WeakSet[Optimizer] = WeakSet()

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        if optimizer not in known and any(map(is_described, parameters_in(optimizer))):
            known.add(optimizer)
            optimizer.register_load_state_dict_post_hook(_know_blocks)
            _know_blocks(optimizer)

    after_steps(model, after_step)


def _know_blocks(optimizer: Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        if not is_described(parameter):
            continue
        for name, value in state.items():
            if not isinstance(value, DTensor) or is_described(value):
                continue
            if (value.shape, value.placements) == (parameter.shape, parameter.placements):
                state[name] = dtensor_like(parameter, local(value))
