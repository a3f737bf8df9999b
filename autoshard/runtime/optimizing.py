"""What optimizers of parallel models have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def local(x: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor; without gradients, and sharing its version."""
    with torch.no_grad():
        found: torch.Tensor = x.to_local() if isinstance(x, DTensor) else x
    return found.detach()


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure given to a step returns, called with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
