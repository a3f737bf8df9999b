"""Tensors whose values are known while a model is traced, such as tables of image sizes given as an input.

What is computed from them alone is computed at once, on real data, so that Python code may ask for it.

Leans on the private ``torch.utils._python_dispatch._disable_current_modes``. Run with torch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

_FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.arange)


class KnownValues(TorchFunctionMode):
    """Runs functions whose tensors are all known on their data, outside of the trace."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a real tensor that counts as known."""
        with _disable_current_modes():
            copy = tensor.detach().clone().cpu()
        self._known[id(copy)] = copy
        return copy

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._known:
            return func(*args, **kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = [t for t in tensors if id(t) in self._known]
        if len(known) < len(tensors) or not (tensors or func in _FROM_NUMBERS):
            if known and _changes(func, kwargs, tensors[0]) and tensors[0] is known[0]:
                raise RuntimeError("a tensor whose values are known is changed in place by one that is not")
            return func(*args, **kwargs)
        with _disable_current_modes():
            out = func(*args, **kwargs)
        for t in pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self._known[id(t)] = t
        return out


def _changes(func: Any, kwargs: dict[str, Any], first: torch.Tensor) -> bool:
    """Whether a function changes its first tensor in place."""
    name = getattr(func, "__name__", "")
    named = name.endswith("_") and not name.endswith("__")
    return named or name == "__setitem__" or kwargs.get("out") is first
