"""Whether a model, as it is now, is still captured as the graph that its program was made of."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.capture.capture import capture
from autoshard.capture.precision import MixedPrecision
from autoshard.capture.python_state.captured_state import CapturedState
from autoshard.capture.size_conditions import size_conditions
from autoshard.errors import CaptureError
from autoshard.options import Differentiate
from autoshard.program.program import Program, Signature
from autoshard.runtime.checks.call_guard import Captured, Compiling, Inputs
from autoshard.runtime.compile_once import CompilingRanks, SharedConditions
from autoshard.torch_adapters.dtypes import torch_dtype

#: elements of an integer tensor that a capture may look at
_SMALL = 1024


def captured_of(
    state: CapturedState,
    digest: str,
    inputs: Inputs,
    differentiate: Differentiate,
    precision: str,
    compiled: Compiling,
    resized: Callable[[nn.Module, Inputs, int], Program | None],
    ranks: CompilingRanks,
    batched: Sequence[int] = (),
) -> Captured:
    """What calls are compared with: a capture, which was made with these inputs, kept without their data.

    digest: of its graph. compiled, resized: see `Captured`. ranks: of which one finds conditions on sizes.
    batched: positions of arguments with a batch.
    """
    args, kwargs = pytree.tree_map(_without_data, inputs)
    return Captured(
        state,
        (args, kwargs),
        lambda module: _digest_now(module, args, kwargs, differentiate, precision) == digest,
        compiled,
        resized,
        lambda module: SharedConditions.of(
            ranks, lambda: size_conditions(module, args, kwargs, batched, MixedPrecision(precision))
        ),
    )


def with_inputs(captured: Captured, inputs: Inputs) -> Captured:
    """The same of a program for inputs of other sizes."""
    args, kwargs = pytree.tree_map(_without_data, inputs)
    return replace(captured, inputs=(args, kwargs))


def same_graph_as_stored(program: Program) -> Callable[[nn.Module], bool]:
    """Whether a model is captured as the graph of a stored program, with inputs of its types."""

    def same_graph(module: nn.Module) -> bool:
        inputs = example_of(program.signature)
        if inputs is None:
            return False
        return _digest_now(module, *inputs, precision=program.precision.name) == program.state.graph

    return same_graph


def _digest_now(
    module: nn.Module, args: Any, kwargs: Any, differentiate: Differentiate = "auto", precision: str = ""
) -> str | None:
    """Of the graph that a model is captured as; None where no graph stands for its calls as they are now."""
    try:
        now = capture(module, args, kwargs, differentiate=differentiate, precision=precision).captured_state
    except CaptureError:
        return None
    # code that asks for gradients: captures always record them
    return None if now.grad_mode and not torch.is_grad_enabled() else str(now.digest)


def example_of(signature: Signature) -> Inputs | None:
    """Arguments of the types that a program takes, without data; None where one has no literal."""
    types = {int(p.target): p.type for p in signature.ports if p.kind == "input" and p.target != "seed"}
    leaves: list[Any] = []
    for position, (kind, text) in enumerate(signature.in_leaves):
        if kind == "static":
            try:
                leaves.append(ast.literal_eval(text))
            except (ValueError, SyntaxError):
                return None
        elif position in types:
            type_ = types[position]
            leaves.append(torch.empty(type_.shape, dtype=torch_dtype(type_.dtype), device="meta"))
        else:
            leaves.append(torch.empty(0, device="meta"))  # nothing is asked of it
    args, kwargs = pytree.tree_unflatten(leaves, pytree.treespec_loads(signature.in_tree))
    return args, kwargs


def _without_data(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor) or (not leaf.is_floating_point() and leaf.numel() <= _SMALL):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta").requires_grad_(leaf.requires_grad)
