"""Causal depthwise convolutions: split by batch, channels and chunks of the sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.rules.core import Builder, Dim, Dims, Factored, RuleFn


@dataclass(frozen=True)
class _Laid:
    """Dims of the sequence [b, c, t], of the halo of each of its chunks [b, c, n, h], if it has some, and of
    the weight [c, 1, k]. chunks: the factor n. fixed: factors that no axis may split."""

    sizes: tuple[int, ...]
    x: Dims
    halos: tuple[Dims, ...]
    weight: Dims
    chunks: Dim
    fixed: frozenset[int]


def _laid(x: TensorType, halo: TensorType | None, weight: TensorType) -> _Laid:
    build = Builder()
    b, c = build.dims(x.shape[:2])
    n = () if halo is None else build.new(halo.shape[2])
    inside = build.new(x.shape[2] if halo is None else x.shape[2] // halo.shape[2])
    h = () if halo is None else build.new(halo.shape[3])
    k = build.new(weight.shape[2])
    halos = () if halo is None else ((b, c, n, h),)
    return _Laid(
        tuple(build.sizes), (b, c, (*n, *inside)), halos, (c, (), k), n, frozenset((*inside, *h, *k))
    )


def causal_conv(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x, halo before each chunk, weight, bias [c] -> [b, c, t]."""
    halo = None if node.args[1] is None else ins[1]
    laid = _laid(ins[0], halo, ins[1 if halo is None else 2])
    inputs = (laid.x, *laid.halos, laid.weight, laid.weight[:1])[: len(ins)]
    linear = (tuple(range(1 + len(laid.halos))),) if node.args[3] is None else ()
    return Factored(laid.sizes, inputs, (laid.x,), laid.fixed, linear=linear)


def causal_conv_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Gradient, x, halos before and after each chunk, weight -> gradients of x, weight and bias."""
    halos = len(ins) - 3
    laid = _laid(ins[1], ins[2] if halos else None, ins[-1])
    outs = laid.x, laid.weight, laid.weight[:1]
    after = (1 + halos,) if node.args[3] is not None else ()
    return Factored(
        laid.sizes,
        (laid.x, laid.x, *laid.halos * halos, laid.weight),
        tuple(None if t is None else dims for dims, t in zip(outs, node.types, strict=True)),
        laid.fixed,
        tuple((f, "sum") for f in (*laid.x[0], *laid.chunks)),
        ((0, *after),),
    )


RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        "autoshard.causal_conv.default": causal_conv,
        "autoshard.causal_conv_backward.default": causal_conv_backward,
    }
)
