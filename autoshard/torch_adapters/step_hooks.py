"""Hooks around the steps of all optimizers, for as long as their owner lives.

torch iterates over its table of hooks while it calls them, and the garbage collector may free an owner in
the middle of that: taking the owner's hook out of the table then would end the user's step. So a hook whose
owner is gone does nothing from then on, and leaves the table when the next one is registered.

Tried with torch 2.11 to 2.13: `RemovableHandle.hooks_dict_ref`, an ordered dict.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

#: takes the optimizer, and the positional and keyword arguments of its step
StepHook = Callable[[Optimizer, Any, Any], None]


class _OwnedHook:
    def __init__(self, owner: object, call: StepHook) -> None:
        self.call: StepHook | None = call
        weakref.finalize(owner, self._forget)

    @torch.compiler.disable
    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.call is not None:
            self.call(optimizer, args, kwargs)

    def _forget(self) -> None:
        self.call = None


def before_steps(owner: object, call: StepHook, *, first: bool = False) -> None:
    """Call it before every optimizer step of the process while `owner` lives, which it must not refer to.

    first: ahead of all that are not, as those of other models may take the gradients.
    """
    _register(register_optimizer_step_pre_hook, owner, call, first=first)


def after_steps(owner: object, call: StepHook) -> None:
    """Call it after every optimizer step of the process while `owner` lives, which it must not refer to."""
    _register(register_optimizer_step_post_hook, owner, call)


def _register(register: Callable[[Any], Any], owner: object, call: StepHook, *, first: bool = False) -> None:
    handle = register(_OwnedHook(owner, call))
    hooks = handle.hooks_dict_ref()
    if first:
        hooks.move_to_end(handle.id, last=False)
    for key, hook in list(hooks.items()):
        if isinstance(hook, _OwnedHook) and hook.call is None:
            del hooks[key]
