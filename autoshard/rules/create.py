"""Ops that make tensors from nothing, and dropout, whose mask is a function of global positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from autoshard.errors import UsageError
from autoshard.ir import Arg, Dtype, Node, TensorType
from autoshard.rules.core import Builder, Factored, RuleFn, broadcast
from autoshard.rules.local import LocalCall, shape_arg


def filled(node: Node, ins: Sequence[TensorType]) -> Factored:
    """A constant of any shape: every dim may be split, each rank makes its own part."""
    out = node.types[0]
    assert out is not None
    build = Builder()
    dims = build.dims(out.shape)
    return Factored(tuple(build.sizes), (), (dims,), kind="create", local=shape_arg(0))


def whole(node: Node, ins: Sequence[TensorType]) -> Factored:
    """A sequence of numbers: made whole on every rank; a shard of it is a free slice."""
    out = node.types[0]
    assert out is not None
    build = Builder()
    dims = build.dims(out.shape)
    return Factored(tuple(build.sizes), (), (dims,), frozenset(range(len(build.sizes))), kind="create")


def like(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Memory of a shape and on the device of another tensor, which may be sharded if it has that shape."""
    out = node.types[0]
    assert out is not None
    build = Builder()
    dims = build.dims(out.shape)
    source = dims if ins[0].shape == out.shape else ((),) * len(ins[0].shape)
    return Factored(tuple(build.sizes), (source,), (dims,), kind="create", local=_local_empty)


def _local_empty(call: LocalCall) -> Node:
    out = call.node.types[0]
    assert out is not None
    kwargs = (("dtype", Dtype(out.dtype)),)
    return replace(call.node, op="aten.empty.memory_format", args=(call.out_shape(0),), kwargs=kwargs)


def dropout(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Input [...] and a seed: linear, since the mask depends on positions only."""
    rule = broadcast(ins, node.types, linear=((0,),), local=_local_dropout)
    return replace(rule, contiguous=frozenset(range(len(rule.sizes))))


def _local_dropout(call: LocalCall) -> Node:
    before = call.node.args[4]
    return call.with_args({4: tuple(_moved(x, call.in_offset(0, d)) for d, x in enumerate(before))})


def _moved(before: Arg, offset: Arg) -> Arg:
    """The offset of a part of what begins at ``before`` already, being a slice itself."""
    if before == 0 or offset == 0:
        return before or offset
    if isinstance(before, int) and isinstance(offset, int):
        return before + offset
    raise UsageError(
        "dropout cannot be divided along one dim over an axis of the mesh and into slices at once",
        hint="pin what it takes whole on that axis, or use a schedule without slices",
    )


RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        "aten.full.default": filled,
        "aten.zeros.default": filled,
        "aten.ones.default": filled,
        "aten.empty.memory_format": filled,
        "aten.new_empty.default": like,
        "aten.new_empty_strided.default": like,
        "aten.eye.default": whole,
        "aten.eye.m": whole,
        "aten.tril_indices.default": whole,
        "aten.triu_indices.default": whole,
        "aten.scalar_tensor.default": whole,
        "aten.arange.default": whole,
        "aten.arange.start": whole,
        "aten.arange.start_step": whole,
        "aten.linspace.default": whole,
        "autoshard.dropout.default": dropout,
    }
)
