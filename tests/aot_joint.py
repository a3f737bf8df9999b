"""The joint graph of a captured function as AOTAutograd makes it, to compare ours with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

from autoshard.capture import tracing
from autoshard.capture.traced_function import Function
from autoshard.ir import Origin


class _Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._function(*args)


def aot_trace(function: Function, tensors: Sequence[torch.Tensor]) -> list[tuple[object, ...]]:
    """One row per node (see `rows`) of the joint graph of a function on tensors like these."""
    mode = tracing.fake_mode()
    with ExitStack() as stack:
        stack.enter_context(tracing.compiling())
        stack.enter_context(fx_traceback.preserve_node_meta())
        fakes = tuple(tracing.fake_like(t, mode) for t in tensors)
        module = aot_export_joint_with_descriptors(stack, _Module(function), fakes).graph_module
    inputs = [_end(n.meta["desc"]) for n in module.graph.nodes if n.op == "placeholder"]
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    outputs = [_end(d) for d in output.meta["desc"]]
    return rows(module.graph, inputs, outputs, function.recorder.origins)


def _end(desc: object) -> tuple[str, int]:
    match desc:
        case None:
            return "nothing", -1
        case PlainAOTInput():
            return "plain", desc.idx
        case TangentAOTInput(output=PlainAOTOutput() as output):
            return "tangent", output.idx
        case PlainAOTOutput():
            return "output", desc.idx
        case GradAOTOutput(grad_of=PlainAOTInput() as argument):
            return "grad", argument.idx
        case InputMutationAOTOutput(mutated_input=PlainAOTInput() as argument):
            return "mutation", argument.idx
    raise AssertionError(desc)


def rows(
    graph: torch.fx.Graph,
    inputs: Iterable[tuple[str, int]],
    outputs: Iterable[tuple[str, int]],
    origins: Sequence[Origin],
) -> list[tuple[object, ...]]:
    """Per node: name (or end), op, arguments, type and strides, module and its call, whether of the backward.

    Lines are left out: code without lines of its own has those of whoever traces it.
    """
    ends, names, found = iter(inputs), {}, []
    for node in graph.nodes:
        names[node] = str(next(ends)) if node.op == "placeholder" else node.name
        args = (tuple(node.args[0]),) if node.op == "output" else node.args
        arguments = torch.fx.node.map_arg((args, node.kwargs), lambda n: _Name(names[n]))
        target = "" if node.op == "placeholder" else str(node.target)
        found.append(
            (
                names[node],
                target,
                repr(arguments),
                _type(node.meta.get("val")),
                None if (mark := tracing.mark_of(node)) is None else (origins[mark].fqn, origins[mark].call),
                tracing.is_tagged_backward(node),
            )
        )
    return [*found, tuple(outputs)]


class _Name(str):
    """Stands for a node in arguments."""

    def __repr__(self) -> str:
        return f"%{self}"


def _type(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.stride(), value.device
    return [_type(v) for v in value] if isinstance(value, tuple | list) else value
