"""Random arguments for tests and benchmarks of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

#: None for the device "meta"
Generator: TypeAlias = "torch.Generator | None"


def normal(
    g: Generator, shape: Sequence[int], dtype: torch.dtype, device: torch.device, size: float = 1.0
) -> torch.Tensor:
    """Normal values of standard deviation ``size``, made where the generator lives."""
    home = g.device if g is not None else device
    new = torch.randn(*shape, generator=g, dtype=torch.float32, device=home)
    return (new.mul_(size) if size != 1 else new).to(device=device, dtype=dtype)


def whole(g: Generator, low: int, high: int, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 from ``low`` to below ``high``."""
    home = g.device if g is not None else device
    return torch.randint(low, high, tuple(shape), generator=g, device=home).to(device)


def eighths(g: Generator, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Multiples of 1/8: sums of two are exact in every type, and what comes after starts from the same."""
    return (normal(g, shape, torch.float32, device, 16.0).round() / 8).to(dtype)
