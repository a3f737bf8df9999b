"""Mixture of experts as Hugging Face writes it: rows sorted by expert, one product per expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.rules.core import Factored, RuleFn, einsum, opaque
from autoshard.rules.matmul import aligned_grouped_mm, grouped_mm


def _opaque(node: Node, ins: Sequence[TensorType]) -> Factored:
    return opaque(ins, node.types)


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
        "transformers.grouped_mm_fallback.default": grouped_mm,
        "transformers.grouped_mm_fallback_backward.default": _grouped_mm_backward,
        "aten._grouped_mm.default": aligned_grouped_mm,
        "aten.bincount.default": _opaque,
        "aten.histc.default": _opaque,
    }
)
