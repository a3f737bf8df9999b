"""Recurrent layers: the batch may be split, the rest of a layer stays whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.rules.core import Factored, RuleFn, einsum

_FIXED = "t i k d n m"


def recurrent(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x [t, b, i], states [d, b, n], weights [m] -> out [t, b, d * n] and the new states."""
    spec = "t b i, d b n, d b n, m -> t b k, d b n, d b n"
    return einsum(spec, ins, node.types, fixed=_FIXED, kind="matmul", flops=_flops(ins[0], ins[3]))


def recurrent_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Gradients of the results, and all inputs -> gradients of the inputs; those of the weights are sums."""
    spec = "t b k, d b n, d b n, t b i, d b n, d b n, m -> t b i, d b n, d b n, m"
    flops = 3 * _flops(ins[3], ins[6])
    return einsum(spec, ins, node.types, fixed=_FIXED, linear=((0, 1, 2),), kind="matmul", flops=flops)


def _flops(x: TensorType, weights: TensorType) -> float:
    """Every weight is multiplied once for each step and row."""
    return 2.0 * x.shape[0] * x.shape[1] * weights.numel


RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        "autoshard.recurrent.default": recurrent,
        "autoshard.recurrent_backward.default": recurrent_backward,
    }
)
