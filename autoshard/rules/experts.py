"""Mixture of experts as Hugging Face writes it: rows sorted by expert, one product per expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.rules.core import Factored, RuleFn, opaque
from autoshard.rules.matmul import grouped_mm


def _opaque(node: Node, ins: Sequence[TensorType]) -> Factored:
    return opaque(ins, node.types)


RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        "transformers.grouped_mm_fallback.default": grouped_mm,
        "aten._grouped_mm.default": grouped_mm,
        "aten.bincount.default": _opaque,
        "aten.histc.default": _opaque,
        "aten.searchsorted.Tensor": _opaque,
        "aten.bucketize.Tensor": _opaque,
    }
)
