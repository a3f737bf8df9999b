"""The modes that Python code runs under: what changes the meaning of the same calls.

Leans on private queries of ``torch.overrides`` and ``torch.utils._python_dispatch``, and on the guard that
torch's own ops call others under. Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autoshard.torch_adapters.replaced import replaced


def autocast_state(device: str) -> tuple[bool, torch.dtype | None]:
    """Whether autocast is on for a type of device, and to which dtype."""
    on = torch.is_autocast_enabled(device)
    return on, torch.get_autocast_dtype(device) if on else None


def below_autograd() -> AbstractContextManager[None]:
    """Inside, ops record no gradients and skip autograd's layer: a seventh of the host's time of a sharded
    step of small layers."""
    guard: AbstractContextManager[None] = torch._C._AutoDispatchBelowAutograd()
    return guard


@contextmanager
def grad_mode_noted(note: Callable[[], None]) -> Iterator[None]:
    """Call ``note`` where code that is not torch's asks whether gradients are recorded."""
    with ExitStack() as stack:
        for name in ("is_grad_enabled", "is_inference_mode_enabled"):
            stack.enter_context(replaced(torch, name, _noting(getattr(torch, name), note)))
        yield


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs code that is neither torch's nor ours."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in ("torch", "autoshard")


def _noting(asked: Callable[[], bool], note: Callable[[], None]) -> Callable[[], bool]:
    def ask() -> bool:
        if is_users(sys._getframe(1)):
            note()
        return asked()

    return ask


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
