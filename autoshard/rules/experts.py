"""Mixtures of experts: tokens are dispatched to slots of the experts that they chose, and combined.

A dim of slots is (experts, tokens), see `autoshard.ops.experts`; either may be split. A rank that has some
experts and all tokens makes its slots from its copy of the tokens, and gives terms of the combined sum. If an
axis splits the tokens where they come from and the experts in the slots, tokens travel to the ranks of their
experts and sums travel back (expert parallelism: Lepikhin et al., "GShard", 2020, section 3). Models that
bring their own kernel for sorted rows have rules here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.ir.collectives import EXPERT_EXCHANGES
from autoshard.ir.placement import R, Shard
from autoshard.rules.core import Builder, Dim, Dims, Factored, Localizer, RuleFn, einsum, opaque, opaque_rule
from autoshard.rules.local import LocalCall, symbolic_extent, symbolic_offset
from autoshard.rules.matmul import aligned_grouped_mm, grouped_mm

#: op that exchanges tokens where an axis splits them -> its collective
_EXCHANGES = {spec.product: spec.op for spec in EXPERT_EXCHANGES}


@dataclass(frozen=True)
class _Routed:
    """Factors of a call on tokens and slots, with those that only some of its tensors have."""

    build: Builder
    tokens: Dim
    experts: Dim

    @property
    def slots(self) -> Dim:
        return (*self.experts, *self.tokens)

    def rule(
        self,
        inputs: tuple[Dims, ...],
        output: Dims,
        linear: tuple[tuple[int, ...], ...] = (),
        fixed: Dim = (),
        local: Localizer | None = None,
        flops: float = 0.0,
    ) -> Factored:
        lacked = {f for dim in inputs for part in dim for f in part} - {f for part in output for f in part}
        return Factored(
            tuple(self.build.sizes),
            inputs,
            (output,),
            frozenset(fixed),
            tuple((f, "sum") for f in sorted(lacked) if f not in fixed),
            linear,
            "matmul" if flops else "pointwise",
            flops,
            local,
            contiguous=frozenset(self.experts),
        )


def _routed(tokens: int, slots: TensorType) -> _Routed:
    """slots: type of a value of slots, of so many tokens."""
    build = Builder()
    return _Routed(build, build.new(tokens), build.new(slots.shape[0] // tokens))


def by_expert(slots: TensorType, num_experts: int) -> _Routed:
    """Factors of a call on slots of so many experts."""
    return _routed(slots.shape[0] // num_experts, slots)


def choices(node: Node, ins: Sequence[TensorType]) -> Factored:
    """expert [t, k] -> [t, k]."""
    return einsum("t k -> t k", ins, node.types, fixed="k")


def route(node: Node, ins: Sequence[TensorType]) -> Factored:
    """chosen [t, k] -> slots [(e t)]."""
    (tokens, each), out = ins[0].shape, node.types[0]
    assert out is not None
    of = _routed(tokens, out)
    k = of.build.new(each)
    rule = of.rule(((of.tokens, k),), (of.slots,), fixed=k, local=_local_route)
    return _exchanging(rule, of)


def route_one(node: Node, ins: Sequence[TensorType]) -> Factored:
    """chosen [t, k] -> slots [t] of one expert."""
    return einsum("t k -> t", ins, node.types, fixed="k")


def _exchanging(rule: Factored, of: _Routed) -> Factored:
    """The rule with tokens that may go to their experts, where there are several of both."""
    return replace(rule, exchange=tuple((t, e) for t in of.tokens for e in of.experts))


def _exchange_axes(call: LocalCall, chosen: int, slots: Sequence[object]) -> str | tuple[str, ...]:
    """The axis that splits the tokens (of the input ``chosen``) and, in the slots, their experts; several,
    outermost first, if more than one does; () if none does."""
    laid = zip(call.mesh.names, call.in_layouts[chosen], slots, strict=True)
    # slots that are split by tokens have all experts as outer blocks
    axes = tuple(
        name
        for name, tokens, placed in laid
        if isinstance(tokens, Shard) and isinstance(placed, Shard) and placed.outer == 1
    )
    return axes[0] if len(axes) == 1 else axes


def _local_route(call: LocalCall) -> Node:
    """A rank is told its experts, or the axis over which tokens find theirs."""
    chosen, count = call.node.args
    layout, type_ = call.out_layouts[0], call.node.types[0]
    assert layout is not None and type_ is not None
    axes = _exchange_axes(call, 0, layout)
    if axes:
        return replace(call.node, op=_EXCHANGES[call.node.op], args=((chosen,), axes, count))
    experts = tuple(Shard(0) if isinstance(p, Shard) and p.outer == 1 else R for p in layout)
    if all(p == R for p in experts):
        return call.node
    held = symbolic_extent(count, experts, 0, call.mesh)
    first = symbolic_offset(count, experts, 0, call.mesh)
    return replace(call.node, op="autoshard.route_part.default", args=(chosen, held, first))


def _local_exchange(call: LocalCall) -> Node:
    """x, chosen, slots: as it stands, or with the axis over which tokens travel."""
    experts = call.ins[2].shape[0] // call.ins[1].shape[0]
    axes = _exchange_axes(call, 1, call.in_layouts[2])
    if experts == 1 or not axes:
        return call.node
    args = (call.node.args, axes, experts)
    return replace(call.node, op=_EXCHANGES[call.node.op], args=args)


def dispatch(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x [t, h], chosen [t, k], slots [(e t)] -> [(e t), h]."""
    of, k, h = _of_tokens(ins, ins[0].shape[1])
    inputs = ((of.tokens, h), (of.tokens, k), (of.slots,))
    return _exchanging(of.rule(inputs, (of.slots, h), ((0,),), k, _local_exchange), of)


def combine(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x [(e t), h], chosen [t, k], slots [(e t)] -> [t, h]."""
    of, k, h = _of_tokens(ins, ins[0].shape[1])
    inputs = ((of.slots, h), (of.tokens, k), (of.slots,))
    return _exchanging(of.rule(inputs, (of.tokens, h), ((0,),), k, _local_exchange), of)


def dispatch_weights(node: Node, ins: Sequence[TensorType]) -> Factored:
    """weights [t, k], chosen [t, k], slots [(e t)] -> [(e t)]."""
    of, k, _ = _of_tokens(ins)
    inputs = ((of.tokens, k), (of.tokens, k), (of.slots,))
    return _exchanging(of.rule(inputs, (of.slots,), ((0,),), k, _local_exchange), of)


def combine_weights(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x [(e t)], chosen [t, k], slots [(e t)] -> [t, k]."""
    of, k, _ = _of_tokens(ins)
    inputs = ((of.slots,), (of.tokens, k), (of.slots,))
    return _exchanging(of.rule(inputs, (of.tokens, k), ((0,),), k, _local_exchange), of)


def _of_tokens(ins: Sequence[TensorType], width: int = 1) -> tuple[_Routed, Dim, Dim]:
    """(factors, choices, columns) of a call with chosen and slots as its last inputs."""
    (tokens, each), slots = ins[1].shape, ins[2]
    of = _routed(tokens, slots)
    return of, of.build.new(each), of.build.new(width)


def expert_mm(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x [(e t), k], slots [(e t)], weight [e, k, n] (or [e, n, k]) -> [(e t), n]."""
    x, slots, weight = ins
    transposed = node.args[3]
    of = by_expert(slots, weight.shape[0])
    k, n = of.build.new(x.shape[1]), of.build.new(weight.shape[1 if transposed else 2])
    matrix = (of.experts, n, k) if transposed else (of.experts, k, n)
    flops = 2.0 * x.numel * weight.shape[1 if transposed else 2]
    inputs = ((of.slots, k), (of.slots,), matrix)
    return of.rule(inputs, (of.slots, n), ((0,), (2,)), flops=flops)


def expert_outer(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x [(e t), k], gradient [(e t), n], slots [(e t)] -> [e, k, n] (or [e, n, k])."""
    x, grad, slots = ins
    count, transposed = node.args[3:5]
    of = by_expert(slots, count)
    k, n = of.build.new(x.shape[1]), of.build.new(grad.shape[1])
    matrix = (of.experts, n, k) if transposed else (of.experts, k, n)
    flops = 2.0 * x.numel * grad.shape[1]
    inputs = ((of.slots, k), (of.slots, n), (of.slots,))
    return of.rule(inputs, matrix, ((0,), (1,)), flops=flops, local=told_experts(3))


def told_experts(argument: int) -> Localizer:
    """Tells the op how many experts the rank has."""
    return lambda call: call.with_args({argument: call.out_shape(0)[0]})


def expert_rows(node: Node, ins: Sequence[TensorType]) -> Factored:
    """table [e, n], slots [(e t)] -> [(e t), n]."""
    table, slots = ins
    of = by_expert(slots, table.shape[0])
    n = of.build.new(table.shape[1])
    return of.rule(((of.experts, n), (of.slots,)), (of.slots, n), ((0,),))


def expert_sum(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x [(e t), n], slots [(e t)] -> [e, n]."""
    x, slots = ins
    of = by_expert(slots, node.args[2])
    n = of.build.new(x.shape[1])
    return of.rule(((of.slots, n), (of.slots,)), (of.experts, n), ((0,),), local=told_experts(2))


def scale_rows(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x [s, n], weights [s] -> [s, n]."""
    return einsum("s n, s -> s n", ins, node.types, linear=((0,), (1,)))


def row_dropout(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x [s, n], key [s] -> [s, n]."""
    return einsum("s n, s -> s n", ins, node.types, linear=((0,),), contiguous="n", local=_local_columns)


def _local_columns(call: LocalCall) -> Node:
    return call.with_args({3: call.in_offset(0, 1)})


def row_dots(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x, y [s, n] -> [s]."""
    return einsum("s n, s n -> s", ins, node.types, linear=((0,), (1,)))


def put_columns(node: Node, ins: Sequence[TensorType]) -> Factored:
    """grad [s, ..., m] -> [s, ..., size]."""
    out = node.types[0]
    assert out is not None
    build = Builder()
    dims = build.dims(out.shape)
    given = (*dims[:-1], build.new(ins[0].shape[-1]))
    return Factored(tuple(build.sizes), (given,), (dims,), frozenset((*dims[-1], *given[-1])), linear=((0,),))


def histc(node: Node, ins: Sequence[TensorType]) -> Factored:
    """How many elements fall into each of ``bins`` equal ranges -> [bins]: counts of parts add up.

    Without bounds of its own, the ranges depend on the smallest and largest element of the full tensor.
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


RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        "autoshard.choices.default": choices,
        "autoshard.route.default": route,
        "autoshard.route_one.default": route_one,
        "autoshard.dispatch.default": dispatch,
        "autoshard.combine.default": combine,
        "autoshard.dispatch_weights.default": dispatch_weights,
        "autoshard.combine_weights.default": combine_weights,
        "autoshard.expert_mm.default": expert_mm,
        "autoshard.expert_outer.default": expert_outer,
        "autoshard.expert_rows.default": expert_rows,
        "autoshard.expert_sum.default": expert_sum,
        "autoshard.scale_rows.default": scale_rows,
        "autoshard.row_dropout.default": row_dropout,
        "autoshard.row_dots.default": row_dots,
        "autoshard.put_columns.default": put_columns,
        "transformers.grouped_mm_fallback.default": grouped_mm,
        "transformers.grouped_mm_fallback_backward.default": _grouped_mm_backward,
        "aten._grouped_mm.default": aligned_grouped_mm,
        "aten.bincount.default": opaque_rule,
        "aten.histc.default": histc,
    }
)
