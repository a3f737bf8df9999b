"""The modes that Python code runs under: what changes the meaning of the same calls.

Leans on private queries of ``torch.overrides`` and ``torch.utils._python_dispatch``. Tried on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def autocast_state(device: str) -> tuple[bool, torch.dtype | None]:
    """Whether autocast is on for a type of device, and to which dtype."""
    on = torch.is_autocast_enabled(device)
    return on, torch.get_autocast_dtype(device) if on else None


def ambient_modes() -> Hashable:
    """Equal where the same code does the same: gradients recorded, autocast, modes on functions and ops."""
    functions = tuple(map(id, _get_current_function_mode_stack()))
    dispatch = tuple(map(id, _get_current_dispatch_mode_stack()))
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast_state("cpu"),
        autocast_state("cuda"),
        torch.get_default_dtype(),
        functions,
        dispatch,
    )
