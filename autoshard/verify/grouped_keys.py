"""The ops that attention of groups of heads stands for (`passes/fuse/group_keys.py`): keys and values are
repeated for every head of the queries, and their gradients are summed over each group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoshard.ir import Node, Ref, TensorType, refs_of
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.placement import Layout, P, Partial, Placement, R, Shard
from autoshard.rules.attention import KEYS, with_keys
from autoshard.rules.core import RuleFn
from autoshard.rules.local import MeshShape
from autoshard.verify.rings import on_a_rank

_EXPAND, _RESHAPE, _SUM = "aten.expand.default", "aten.reshape.default", "aten.sum.dim_IntList"
_HEADS, _GROUP = 1, 2


def is_grouped(node: Node, values: Mapping[str, PlacedValue]) -> bool:
    """Whether a node is attention whose keys are those of groups of heads."""
    at = KEYS.get(node.op)
    return at is not None and len(values[list(refs_of(node))[at]].type.shape) == 5


def written_out(
    node: Node, values: Mapping[str, PlacedValue], rules: Mapping[str, RuleFn], mesh: MeshShape
) -> tuple[tuple[Node, ...], dict[str, PlacedValue]] | str:
    """(the ops in order, as ranks run them; all values around and between them), or what is wrong with the
    text. Values between the ops have names that no program can have."""
    at, refs, known = KEYS[node.op], list(refs_of(node)), dict(values)
    queries = values[refs[at - 1]]
    nodes: list[Node] = []

    def add(op: str, args: tuple[object, ...], out: str, type_: TensorType, layout: Layout) -> None:
        known[out] = PlacedValue(type_, layout)
        new = Node(op, args, (), (out,), (type_,), node.origin, node.backward)
        nodes.append(on_a_rank(new, known, rules, mesh))

    ends, sources = list[tuple[str, str]](), list[Ref]()
    outs, types = list(node.outs), list(node.types)
    for number, name in enumerate(refs[at : at + 2]):
        source = values[name]
        shape = source.type.shape
        if len(shape) != 5 or shape[_GROUP] != 1 or queries.type.shape[1] % max(1, shape[_HEADS]):
            return f"{name} is no key or value of groups of the heads of {refs[at - 1]}"
        b, heads, _, t, d = shape
        groups = queries.type.shape[1] // heads
        wide = TensorType((b, heads, groups, t, d), source.type.dtype)
        flat = TensorType((b, heads * groups, t, d), source.type.dtype)
        placed = [_repeated(k, q, heads) for k, q in zip(source.layout, queries.layout, strict=True)]
        expanded, repeated = f"{name}.expanded", f"{name}.repeated"
        add(_EXPAND, (Ref(name), wide.shape), expanded, wide, tuple(w for w, _ in placed))
        add(_RESHAPE, (Ref(expanded), flat.shape), repeated, flat, tuple(f for _, f in placed))
        sources.append(Ref(repeated))
        if at > 1:  # of backward
            out = f"{node.outs[1 + number]}.repeated"
            ends.append((out, node.outs[1 + number]))
            outs[1 + number], types[1 + number] = out, flat
            total = values[node.outs[1 + number]].layout
            layouts = [_gradient(g, q) for g, q in zip(total, queries.layout, strict=True)]
            known[out] = PlacedValue(flat, tuple(layouts))
            known[f"{out}.groups"] = PlacedValue(wide, tuple(_split(p, heads) for p in layouts))
    nodes.append(replace(with_keys(node, *sources), outs=tuple(outs), types=tuple(types)))
    for out, end in ends:
        wide_type, layout = known[f"{out}.groups"].type, known[f"{out}.groups"].layout
        add(_RESHAPE, (Ref(out), wide_type.shape), f"{out}.groups", wide_type, layout)
        add(_SUM, (Ref(f"{out}.groups"), (_GROUP,), True), end, values[end].type, values[end].layout)
    return tuple(nodes), known


def _repeated(keys: Placement, queries: Placement, heads: int) -> tuple[Placement, Placement]:
    """Where keys lie on an axis once they are expanded, and repeated for every head."""
    divides = isinstance(queries, Shard) and queries.dim == _HEADS
    if isinstance(keys, Shard):
        if keys.dim == _HEADS:
            return keys, queries if divides else keys
        return keys, keys if keys.dim == 0 else Shard(keys.dim - 1, keys.outer, keys.inner)
    if keys == R and divides and isinstance(queries, Shard):
        return _split(queries, heads), queries
    return keys, keys


def _split(repeated: Placement, heads: int) -> Placement:
    """The placement of [b, heads * group, ..] as [b, heads, group, ..]."""
    if not isinstance(repeated, Shard) or repeated.dim == 0:
        return repeated
    if repeated.dim > _HEADS:
        return Shard(repeated.dim + 1, repeated.outer, repeated.inner)
    if repeated.outer >= heads:
        return Shard(_GROUP, repeated.outer // heads, repeated.inner)
    return repeated


def _gradient(total: Placement, queries: Placement) -> Placement:
    """Where the gradient of repeated keys lies, given that of their sum."""
    if isinstance(queries, Shard) and queries.dim == _HEADS:
        return queries
    if isinstance(total, Shard):
        return total if total.dim == 0 else Shard(total.dim - 1, total.outer, total.inner)
    return P if isinstance(total, Partial) else total
