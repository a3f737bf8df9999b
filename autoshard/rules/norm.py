"""Normalisations: the normalised dims stay whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.rules.core import Builder, Dims, Factored, RuleFn


def layer_norm(node: Node, ins: Sequence[TensorType]) -> Factored:
    """(out, mean, rstd) of input [..., n], optional weight and bias [n]."""
    rank = len(node.args[1])
    build = Builder()
    dims = build.dims(ins[0].shape)
    lead, own = dims[: len(dims) - rank], dims[len(dims) - rank :]
    stats: Dims = lead + ((),) * rank
    fixed = frozenset(f for d in own for f in d)
    return Factored(tuple(build.sizes), (dims, *([own] * (len(ins) - 1))), (dims, stats, stats), fixed)


def layer_norm_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """(input gradient, weight gradient, bias gradient) from gradient, input, mean, rstd, weight, bias."""
    rank = len(node.args[2])
    build = Builder()
    dims = build.dims(ins[0].shape)
    lead, own = dims[: len(dims) - rank], dims[len(dims) - rank :]
    stats: Dims = lead + ((),) * rank
    inputs = (dims, dims, stats, stats, *([own] * (len(ins) - 4)))
    outs = tuple(None if t is None else laid for t, laid in zip(node.types, (dims, own, own), strict=True))
    fixed = frozenset(f for d in own for f in d)
    reduce = tuple((f, "sum") for d in lead for f in d)
    return Factored(tuple(build.sizes), inputs, outs, fixed, reduce, ((0,),))


RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        "aten.native_layer_norm.default": layer_norm,
        "aten.native_layer_norm_backward.default": layer_norm_backward,
    }
)
