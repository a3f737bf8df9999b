"""Table look-ups: a rank that holds a range of rows looks up what falls into it; the sum is whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.rules.core import Builder, Factored, RuleFn
from autoshard.rules.local import LocalCall


def embedding(node: Node, ins: Sequence[TensorType]) -> Factored:
    """weight [v, h], indices [...] -> [..., h]."""
    build = Builder()
    v, h = build.new(ins[0].shape[0]), build.new(ins[0].shape[1])
    where = build.dims(ins[1].shape)
    return Factored(
        tuple(build.sizes),
        ((v, h), where),
        ((*where, h),),
        reduce=tuple((f, "sum") for f in v),
        linear=((0,),),
        local=_local_rows,
        contiguous=frozenset(v),
    )


def _local_rows(call: LocalCall) -> Node:
    if not call.in_split(0, 0):
        return call.node
    weight, indices = call.node.args[:2]
    return replace(
        call.node,
        op="autoshard.embedding_part.default",
        args=(weight, indices, call.in_offset(0, 0)),
        kwargs=(),
    )


def embedding_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """gradient [..., h], indices [...] -> [v, h]; scaling by frequency needs all indices and rows."""
    out = node.types[0]
    assert out is not None
    build = Builder()
    v, h = build.new(out.shape[0]), build.new(out.shape[1])
    where = build.dims(ins[1].shape)
    by_frequency = bool(node.arg(4, "scale_grad_by_freq", False))
    return Factored(
        tuple(build.sizes),
        ((*where, h), where),
        ((v, h),),
        frozenset(f for d in (v, *where) for f in d) if by_frequency else frozenset(),
        reduce=tuple((f, "sum") for d in where for f in d),
        linear=((0,),),
        local=_local_scatter,
        contiguous=frozenset(v),
    )


def _local_scatter(call: LocalCall) -> Node:
    rows = call.out_shape(0)[0]
    grad, indices, _, padding = call.node.args[:4]
    if rows == call.node.args[2]:
        return call.node
    return replace(
        call.node,
        op="autoshard.embedding_part_backward.default",
        args=(grad, indices, rows, call.out_offset(0, 0), padding),
        kwargs=(),
    )


RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        "aten.embedding.default": embedding,
        "aten.embedding_dense_backward.default": embedding_backward,
    }
)
