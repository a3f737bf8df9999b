"""Questions whether numbers are finite, in the code of a model that would mend them if they were not.

They are taken to be finite. In a step in which they are not, a program goes on with infinities and NaNs,
where the model would have clamped them.

Run with torch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: element by element, what these say of finite numbers
_OF_FINITE = {"isfinite": True, "isinf": False, "isnan": False}
_ANSWERS = frozenset(("__bool__", "item"))


class Finite(TorchFunctionMode):
    """Answers ``torch.isfinite(x).all()``, ``isinf(x).any()`` and the like where Python asks."""

    def __init__(self) -> None:
        super().__init__()
        # with the tensor, lest another one gets its identity
        self._answers: dict[int, tuple[torch.Tensor, bool]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        known = None if first is None else self._answers.get(id(first))
        if known is not None and name in _ANSWERS and first is not None and first.dim() == 0:
            return known[1]
        out = func(*args, **(kwargs or {}))
        answer = None if first is None else _OF_FINITE.get(name)
        if known is not None and name in ("all", "any"):
            answer = known[1]
        if answer is not None and isinstance(out, torch.Tensor):
            self._answers[id(out)] = out, answer
        return out
