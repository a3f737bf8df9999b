"""Hooks of modules and tensors, where torch offers no public way to see them. Tried on torch 2.13.

Leans on the hook tables of ``nn.Module`` and of ``torch.nn.modules.module``, on ``_backward_hooks`` and
``_post_accumulate_grad_hooks`` of tensors, and on the counter of ``torch.utils.hooks.RemovableHandle``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.hooks import RemovableHandle

FORWARD_TABLES = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD_TABLES = ("_backward_pre_hooks", "_backward_hooks")
#: numbers of hooks that are called in another way
_NOTED = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_GLOBAL = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


def registrations() -> int:
    """How many hooks were registered in this process so far: another number says that some were added."""
    return RemovableHandle.next_id


def module_hooks(module: nn.Module, tables: tuple[str, ...]) -> list[Any]:
    """The hooks of a module."""
    return [hook for table in tables for hook in getattr(module, table).values()]


def global_hooks() -> list[Any]:
    """Hooks registered for all modules of the process."""
    return [hook for table in _GLOBAL for hook in getattr(nn_module, table).values()]


def hook_tables(module: nn.Module) -> Iterator[Mapping[int, Any]]:
    """The tables of a module's hooks on calls."""
    for table in (*FORWARD_TABLES, *BACKWARD_TABLES):
        yield getattr(module, table)


def clear_hooks(module: nn.Module) -> None:
    """Take a module's hooks away; whoever calls this puts them back."""
    for table in hook_tables(module):
        table.clear()  # type: ignore[attr-defined]  # an OrderedDict


def drop_hooks(module: nn.Module, kind: type) -> None:
    """Take a module's forward hooks of a class away, and what is noted of them; whoever calls this puts them
    back."""
    for name in FORWARD_TABLES:
        table = getattr(module, name)
        for number in [k for k, hook in table.items() if isinstance(hook, kind)]:
            for noted in (table, *(getattr(module, n, {}) for n in _NOTED)):
                noted.pop(number, None)


def carry_tensor_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Give a new leaf the gradient hooks of the one it replaces; their handles remove them from both."""
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks
    after = getattr(old, "_post_accumulate_grad_hooks", None)
    if after:
        new._post_accumulate_grad_hooks = after


def has_gradient_hooks(leaf: torch.Tensor) -> bool:
    """Whether code of the user's runs when a gradient arrives at a leaf."""
    return bool(leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None))


def run_gradient_hooks(leaf: torch.Tensor, grad: Any) -> Any:
    """What autograd would do with a gradient that arrives at a leaf: its gradient hooks, in order."""
    for hook in (leaf._backward_hooks or {}).values():
        replaced = hook(grad)
        grad = grad if replaced is None else replaced
    return grad


def run_post_accumulate_hooks(leaf: torch.Tensor) -> None:
    """What autograd would do once ``grad`` of a leaf has been added to."""
    for hook in (getattr(leaf, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(leaf)
