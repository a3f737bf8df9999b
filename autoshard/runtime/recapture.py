"""Whether a model, as it is now, is still captured as the graph that its program was made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.capture.captured_state import graph_digest
from autoshard.errors import CaptureError
from autoshard.ir import Joint
from autoshard.passes.capture import capture
from autoshard.passes.capture_function import Differentiate
from autoshard.program.program import Program
from autoshard.runtime.call_guard import Captured

#: elements of an integer tensor that a capture may look at
_SMALL = 1024


def captured_of(
    joint: Joint,
    inputs: tuple[Any, Any],
    differentiate: Differentiate,
    compiled: Callable[[nn.Module, tuple[Any, Any]], Program],
) -> Captured:
    """What calls are compared with: ``joint``, which was captured with these inputs, kept without their data.

    compiled: the program for the gradients of all outputs of a model, given its example inputs.
    """
    args, kwargs = pytree.tree_map(_without_data, inputs)

    def same_graph(module: nn.Module) -> bool:
        try:
            now = capture(module, args, kwargs, differentiate=differentiate)
        except CaptureError:
            return False  # what cannot be captured is no graph that was
        if now.captured_state.grad_mode and not torch.is_grad_enabled():
            return False  # the code asks for gradients, which captures always record
        return graph_digest(now) == graph_digest(joint)

    return Captured(joint.captured_state, same_graph, lambda module: compiled(module, (args, kwargs)))


def _without_data(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor) or (not leaf.is_floating_point() and leaf.numel() <= _SMALL):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta").requires_grad_(leaf.requires_grad)
