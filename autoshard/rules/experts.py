"""Mixture of experts: rows that each meet the matrix of their own expert.

Rows (of a token and one of its experts) may be split like any other dim; so may both dims of the matrices.
If the experts are split, a rank computes the rows of its own experts and zeros for all others: the results
are terms of a sum. If an axis splits rows and experts at once, rows travel to the rank of their expert and
results back (expert parallelism: Lepikhin et al., "GShard", 2020, section 3). Models that bring their own
kernel for sorted rows have rules here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.ir.collectives import EXPERT_MM, EXPERT_OUTER
from autoshard.ir.placement import Layout, Shard
from autoshard.rules.core import Builder, Dim, Factored, RuleFn, einsum, opaque
from autoshard.rules.local import LocalCall
from autoshard.rules.matmul import aligned_grouped_mm, grouped_mm


def expert_mm(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x [r, k], expert [r], weight [e, k, n] (or [e, n, k]) -> [r, n]."""
    (r, k), transposed = ins[0].shape, node.args[3]
    n = ins[2].shape[1 if transposed else 2]
    rule = einsum(
        f"r k, r, {'e n k' if transposed else 'e k n'} -> r n",
        ins,
        node.types,
        linear=((0,), (2,)),
        kind="matmul",
        flops=2.0 * r * k * n,
        local=_local_mm,
        contiguous="e",
    )
    return _exchanging(rule, rule.inputs[1][0], rule.inputs[2][0])


def _exchanging(rule: Factored, rows: Dim, experts: Dim) -> Factored:
    """The rule with rows that may go to their experts, where there are several of both."""
    pairs = tuple((r, e) for r in rows for e in experts)
    return replace(rule, exchange=pairs)


def _exchange_axis(call: LocalCall, rows: Layout, experts: Layout | None) -> str | None:
    """The axis that splits the first dims of both layouts."""
    assert experts is not None
    for name, *placed in zip(call.mesh.names, rows, experts, strict=True):
        if all(isinstance(p, Shard) and p.dim == 0 for p in placed):
            return name
    return None


def _local_mm(call: LocalCall) -> Node:
    """A rank is told the number of its first expert, or the axis over which rows find theirs."""
    axis = _exchange_axis(call, call.in_layouts[0], call.in_layouts[2])
    if axis is not None:
        x, expert, weight, transposed = call.node.args
        moved = ((x, expert, weight), axis, transposed, call.ins[2].shape[0])
        return replace(call.node, op=EXPERT_MM.op, args=moved)
    if not call.in_split(2, 0):
        return call.node
    args = (*call.node.args, call.in_offset(2, 0))
    return replace(call.node, op="autoshard.expert_mm_part.default", args=args)


def expert_outer(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x [r, k], gradient [r, n], expert [r] -> [e, k, n] (or [e, n, k])."""
    (r, k), n, transposed = ins[0].shape, ins[1].shape[1], node.args[4]
    rule = einsum(
        f"r k, r n, r -> {'e n k' if transposed else 'e k n'}",
        ins,
        node.types,
        linear=((0,), (1,)),
        kind="matmul",
        flops=2.0 * r * k * n,
        local=_local_outer,
        contiguous="e",
    )
    out = rule.outputs[0]
    assert out is not None
    return _exchanging(rule, rule.inputs[2][0], out[0])


def _local_outer(call: LocalCall) -> Node:
    x, grad, expert, count, transposed = call.node.args
    axis = _exchange_axis(call, call.in_layouts[0], call.out_layouts[0])
    if axis is not None:
        moved = ((x, grad, expert), axis, transposed, count)
        return replace(call.node, op=EXPERT_OUTER.op, args=moved)
    experts = call.out_shape(0)[0]
    if experts == count:
        return call.node
    args = (x, grad, expert, experts, transposed, call.out_offset(0, 0))
    return replace(call.node, op="autoshard.expert_outer_part.default", args=args)


def _opaque(node: Node, ins: Sequence[TensorType]) -> Factored:
    return opaque(ins, node.types)


def histc(node: Node, ins: Sequence[TensorType]) -> Factored:
    """How many elements fall into each of ``bins`` equal ranges -> [bins]: counts of parts add up.

    Without bounds of its own, the ranges depend on the smallest and largest element of the whole tensor.
    """
    if node.arg(2, "min", 0) >= node.arg(3, "max", 0):
        return opaque(ins, node.types)
    build = Builder()
    dims, bins = build.dims(ins[0].shape), build.new(node.arg(1, "bins", 100))
    reduce = tuple((f, "sum") for d in dims for f in d)
    return Factored(tuple(build.sizes), (dims,), ((bins,),), frozenset(bins), reduce)


def _grouped_mm_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """rows [t, k], weights [e, k, n], ends [e], gradient [t, n] -> gradients of rows and weights."""
    (t, k), n = ins[0].shape, ins[1].shape[2]
    return einsum(
        "t k, e k n, e, t n -> t k, e k n",
        ins,
        node.types,
        fixed="t e",
        linear=((3,),),
        kind="matmul",
        flops=4.0 * t * k * n,
    )


#: what lowering makes of these ops, with the rule of the whole op that it was
LOWERED: Mapping[str, RuleFn] = MappingProxyType(
    {
        "autoshard.expert_mm_part.default": expert_mm,
        "autoshard.expert_outer_part.default": expert_outer,
    }
)
RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        "autoshard.expert_mm.default": expert_mm,
        "autoshard.expert_outer.default": expert_outer,
        "transformers.grouped_mm_fallback.default": grouped_mm,
        "transformers.grouped_mm_fallback_backward.default": _grouped_mm_backward,
        "aten._grouped_mm.default": aligned_grouped_mm,
        "aten.bincount.default": _opaque,
        "aten.histc.default": histc,
    }
)
