"""Products of 8-bit rows and matrices of experts, and casts of rows that are summed over (`ir.scaled`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.ir.scaled import (
    AMAX_BY_EXPERT,
    CAST_BY_EXPERT,
    SCALED_EXPERT_MM,
    SCALED_EXPERT_OUTER,
    expert_copies,
    rate_of,
)
from autoshard.rules.core import Builder, Dim, Factored, RuleFn
from autoshard.rules.experts import by_expert, told_experts


def amax_by_expert(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x [(e t), n], slots [(e t)] -> [e, n]: the largest of the scales of parts, as in `rules.scaled`."""
    x, slots = ins
    of = by_expert(slots, node.args[2])
    n = of.build.new(x.shape[1])
    rule = of.rule(((of.slots, n), (of.slots,)), (of.experts, n), local=told_experts(2))
    return replace(rule, reduce=tuple((f, "max") for f in of.tokens))


def cast_by_expert(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x [(e t), n], scale [e, n], slots [(e t)] -> [(e t), n]."""
    x, scale, slots = ins
    of = by_expert(slots, scale.shape[0])
    n = of.build.new(x.shape[1])
    return of.rule(((of.slots, n), (of.experts, n), (of.slots,)), (of.slots, n))


def scaled_expert_mm(node: Node, ins: Sequence[TensorType]) -> Factored:
    """scale_x, scale_weight, x [(e t), k], slots [(e t)], weight [e, k, n] (or [e, n, k]) -> [(e t), n]; a
    dim of scales along which all elements share one has size 1."""
    scale_x, scale_weight, x, slots, weight = ins
    transposed = node.args[5]
    across = 1 if transposed else 2
    of = by_expert(slots, weight.shape[0])
    k, blocks, inside = _blocks(of.build, x.shape[1], scale_x.shape[1])
    n = of.build.new(weight.shape[across])
    per_column = n if scale_weight.shape[across] > 1 else ()
    of_weight = of.experts if scale_weight.shape[0] > 1 else (), blocks, per_column
    matrix = of.experts, k, n
    if transposed:
        of_weight, matrix = ((e, b, a) for e, a, b in (of_weight, matrix))
    of_x = of.slots if scale_x.shape[0] > 1 else (), blocks
    inputs = of_x, of_weight, (of.slots, k), (of.slots,), matrix
    flops = 2.0 * x.numel * weight.shape[across]
    return _product(of.rule(inputs, (of.slots, n), fixed=inside, flops=flops), node, scale_x)


def scaled_expert_outer(node: Node, ins: Sequence[TensorType]) -> Factored:
    """scales [e, k] and [e, n] or one, x [(e t), k], gradient [(e t), n], slots [(e t)] -> [e, k, n] (or
    [e, n, k])."""
    scale_x, _, x, grad, slots = ins
    count, transposed = node.args[5:7]
    of = by_expert(slots, count)
    k, n = of.build.new(x.shape[1]), of.build.new(grad.shape[1])
    one = scale_x.shape[1] == 1
    of_x, of_grad = (((), ()), ((), ())) if one else ((of.experts, k), (of.experts, n))
    matrix = (of.experts, n, k) if transposed else (of.experts, k, n)
    inputs = of_x, of_grad, (of.slots, k), (of.slots, n), (of.slots,)
    flops = 2.0 * x.numel * grad.shape[1]
    return _product(of.rule(inputs, matrix, flops=flops, local=told_experts(5)), node, scale_x)


def _blocks(build: Builder, size: int, scales: int) -> tuple[Dim, Dim, Dim]:
    """(a dim that is summed over, that of its scales, the elements of a block)."""
    if scales == 1:
        return build.new(size), (), ()
    blocks, inside = build.new(scales), build.new(size // scales)
    return (*blocks, *inside), blocks, inside


def _product(rule: Factored, node: Node, scale: TensorType) -> Factored:
    rate = rate_of(scale.dtype)
    return replace(rule, rate=rate, copies=expert_copies(node, rate))


PRODUCTS: Mapping[str, RuleFn] = MappingProxyType(
    {SCALED_EXPERT_MM: scaled_expert_mm, SCALED_EXPERT_OUTER: scaled_expert_outer}
)
RULES: Mapping[str, RuleFn] = MappingProxyType(
    {AMAX_BY_EXPERT: amax_by_expert, CAST_BY_EXPERT: cast_by_expert, **PRODUCTS}
)
