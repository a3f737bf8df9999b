"""Make every segment canonical: equal computations once, no views of views, no dead nodes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from autoshard.ir import Arg, Folded, Graph, Node, Ref, TensorType, substitute
from autoshard.ir.views import ALIASES, RESHAPES
from autoshard.passes.segment_parts import without_dead

#: ops that give their first argument back when the type does not change
IDENTITIES = (
    *RESHAPES,
    *ALIASES,
    "aten.expand.default",
    "aten._to_copy.default",
    "aten.clone.default",
    "aten.lift_fresh_copy.default",
)
TRANSPOSES = ("aten.t.default",)
RANDOM = ("autoshard.dropout.default",)
#: what fills a tensor with a number -> which argument that is
_FILLED_WITH = MappingProxyType({"aten.scalar_tensor.default": 0, "aten.full.default": 1})


def normalize(folded: Folded) -> Folded:
    """The same calls, with every segment simplified."""
    return replace(folded, segments={name: simplify(g) for name, g in folded.segments.items()})


def simplify(graph: Graph) -> Graph:
    """Drop no-ops, merge view chains and equal calls, remove what nothing uses."""
    types: dict[str, TensorType | None] = dict(graph.inputs)
    same: dict[str, str] = {}
    new: dict[str, Node] = {}
    seen: dict[Hashable, Node] = {}
    kept: list[Node] = []
    for original in graph.nodes:
        node = substitute(original, lambda name: Ref(same.get(name, name)))
        for out, type_ in zip(node.outs, node.types, strict=True):
            types[out] = type_
        target = _identity(node, types, new)
        if target is not None:
            same[node.name] = target
            continue
        node = _zero_elsewhere(_merge_views(node, new), types, new)
        key = (node.op, node.args, node.kwargs, _typed(node))
        if key in seen and node.op not in RANDOM:
            same.update(zip(node.outs, seen[key].outs, strict=True))
            continue
        seen[key] = node
        for out in node.outs:
            new[out] = node
        kept.append(node)
    outputs = tuple(same.get(o, o) for o in graph.outputs)
    return without_dead(Graph(graph.name, graph.inputs, tuple(kept), outputs))


def _zero_elsewhere(node: Node, types: Mapping[str, TensorType | None], made: Mapping[str, Node]) -> Node:
    """``where`` of a value and zeros as one of a value and the number 0, which is linear in the value: a sum
    over ranks may stay one."""
    if node.op != "aten.where.self" or node.types[0] is None:
        return node
    condition, *values = node.args
    out = node.types[0]
    for value, other, op in (
        (values[0], values[1], "aten.where.ScalarOther"),
        (values[1], values[0], "aten.where.ScalarSelf"),
    ):
        kept = [types[arg.name] for arg in (condition, value) if isinstance(arg, Ref)]
        if _is_zero(value, made) or not _is_zero(other, made) or len(kept) < 2 or None in kept:
            continue
        mask, of_value = kept
        assert mask is not None and of_value is not None
        alike = of_value.dtype == out.dtype != "bool"
        if alike and torch.broadcast_shapes(mask.shape, of_value.shape) == out.shape:
            args = (condition, value, 0) if op.endswith("Other") else (condition, 0, value)
            return replace(node, op=op, args=args)
    return node


def _is_zero(arg: Arg, made: Mapping[str, Node]) -> bool:
    """Whether all elements of a value are known to be zero."""
    node = made.get(arg.name) if isinstance(arg, Ref) else None
    at = _FILLED_WITH.get(node.op) if node is not None else None
    return node is not None and at is not None and node.args[at] == 0 and node.args[at] is not False


def _typed(node: Node) -> Hashable:
    """1 and True and 1.0 are equal in Python; their types tell them apart."""
    return repr(node.args), repr(node.kwargs)


def _identity(node: Node, types: dict[str, TensorType | None], made: dict[str, Node]) -> str | None:
    """The value a node merely repeats, if it does."""
    if not node.args or not isinstance(node.args[0], Ref):
        return None
    source = node.args[0].name
    if node.op in TRANSPOSES:
        inner = made.get(source)
        if inner is not None and inner.op == node.op and isinstance(inner.args[0], Ref):
            return inner.args[0].name
        return None
    if node.op in IDENTITIES and types[source] == node.types[0]:
        return source
    return None


def _merge_views(node: Node, made: dict[str, Node]) -> Node:
    """One reshape of the first source: unlike view it never depends on strides, which shards change."""
    if node.op not in RESHAPES:
        return node
    source = node.args[0]
    inner = made.get(source.name) if isinstance(source, Ref) else None
    base = inner.args[0] if inner is not None and inner.op in RESHAPES else source
    type_ = node.types[0]
    assert type_ is not None
    return replace(node, op="aten.reshape.default", args=(base, type_.shape), kwargs=())
