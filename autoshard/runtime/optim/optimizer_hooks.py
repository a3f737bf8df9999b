"""What optimizers of parallel models have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from autoshard.torch_adapters.blocks import is_described, plain_local
from autoshard.torch_adapters.dtensor import dtensor_like

#: optimizers whose loaded state gets to know its blocks
_watched: WeakSet[torch.optim.Optimizer] = WeakSet()


def local(x: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor; without gradients, and sharing its version."""
    with torch.no_grad():
        return plain_local(x.to_local() if isinstance(x, DTensor) else x)


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure given to a step returns, called with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def keep_blocks(parameters: Iterable[torch.Tensor]) -> None:
    """Let states of optimizers know the blocks that parameters are (`torch_adapters.blocks`).

    What an optimizer makes like a parameter knows them; what torch distributes when whole states are loaded
    does not, and is replaced after the load, or after the first step of an optimizer that took none before.
    """
    if any(is_described(p) for p in parameters):
        _watch_steps()


@cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_after_step)


@torch.compiler.disable
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if optimizer in _watched or not any(is_described(p) for g in optimizer.param_groups for p in g["params"]):
        return
    _watched.add(optimizer)
    optimizer.register_load_state_dict_post_hook(_know_blocks)
    _know_blocks(optimizer)


def _know_blocks(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        if not is_described(parameter):
            continue
        for name, value in state.items():
            if not isinstance(value, DTensor) or is_described(value):
                continue
            if (value.shape, value.placements) == (parameter.shape, parameter.placements):
                state[name] = dtensor_like(parameter, local(value))
