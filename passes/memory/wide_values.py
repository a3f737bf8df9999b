"""Values of a graph that are wider than what it takes, and where their rows (tokens) lie in them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul

from autoshard.ir import Folded, Graph, Node, TensorType, refs_of
from autoshard.ir.views import CASTS, RESHAPES, TRANSPOSES
from autoshard.rules.core import RuleFn

_MM = "aten.mm.default"
_PRODUCTS = frozenset((_MM, "aten.bmm.default"))
#: an elementwise result is a matrix of vectors if it is so many times as large
_MATRIX = 8
#: what makes rows at least so many times as wide begins a stretch of wide values
WIDER = 1.5


def makes_mask(node: Node, graph: Graph, table: Mapping[str, RuleFn]) -> bool:
    """Whether it makes a matrix, of queries and keys for instance, of vectors."""
    fn, refs, types = table.get(node.op), list(refs_of(node)), graph.types()
    if fn is None or len(refs) < 2 or len(node.outs) > 1 or node.name not in types:
        return False
    if fn(node, [types[r] for r in refs]).kind != "pointwise":
        return False
    new = types[node.name]
    return new.nbytes > _MATRIX * sum(spread(types[r], new) for r in refs)


def spread(type_: TensorType, over: TensorType) -> int:
    """Bytes of a value as if it had the first dim of another that it is broadcast over, if that is none of
    its last two.

    So what counts as small does not depend on the batch, which first dims are, as a rule.
    """
    alike = len(type_.shape) == len(over.shape) and type_.shape[:1] == over.shape[:1]
    return type_.nbytes * (1 if alike or len(over.shape) < 3 else over.shape[0])


def widens(node: Node, graph: Graph, weights: Collection[str]) -> bool:
    """Whether it is a product of rows with something, or a cast of rows, that makes more bytes of them."""
    if node.op not in _PRODUCTS and node.op not in CASTS:
        return False
    taken, *factors = refs_of(node)
    before, after = graph.types()[taken], graph.types()[node.name]
    rows = taken not in weights and len(after.shape) > 1
    rows = rows and (node.op != _MM or all(f in weights for f in factors))
    return rows and before.is_float and after.nbytes > WIDER * before.nbytes


def weights_of(folded: Folded, name: str) -> set[str]:
    """Values of a segment that are made of parameters and buffers alone."""
    ports = {p.name for p in folded.joint.ports if p.kind in ("param", "buffer", "const")}
    graph = folded.segments[name]
    calls = [c for c in folded.calls if c.segment == name]
    result = {n for k, (n, _) in enumerate(graph.inputs) if all(c.args[k] in ports for c in calls)}
    for node in graph.nodes:
        refs = list(refs_of(node))
        if refs and result.issuperset(refs):
            result.update(node.outs)
    return result


@dataclass(frozen=True)
class WideValues:
    """Wide values of a graph, with the dim in which their rows are, and the nodes that make or take them."""

    dims: Mapping[str, int]
    nodes: frozenset[str]


def wide_values(graph: Graph, begin: Mapping[str, int], limit: float, weights: Collection[str]) -> WideValues:
    """What is connected with some wide values. limit: bytes of what is narrow, at most."""
    types = graph.types()
    new = {out: node for node in graph.nodes for out in node.outs}
    dims, nodes = dict(begin), dict[str, Node]()

    def large(value: str) -> bool:
        return value in types and value not in weights and types[value].nbytes > limit

    def add(value: str, at: int | None) -> None:
        if at is not None and value not in dims and large(value):
            dims[value] = at

    while True:
        before = len(dims), len(nodes)
        for node in graph.nodes:
            refs = list(refs_of(node))
            if dims.keys().isdisjoint((*refs, *node.outs)):
                continue
            nodes[node.name] = node
            for ref in refs:
                for out in node.outs if ref in dims and node.types[0] is not None else ():
                    add(out, _rows(node, ref, dims[ref], types))
            for ref in refs:
                for out in node.outs:
                    if out in dims:
                        add(ref, _rows(node, ref, dims[out], types, back=True))
                    elif large(ref) and not dims.keys().isdisjoint(refs):
                        # rows with rows: what they make has none
                        add(ref, _beside(node, ref, dims, types))
        for value in list(dims):
            if value in new:
                nodes[new[value].name] = new[value]
        if before == (len(dims), len(nodes)):
            return WideValues(dims, frozenset(nodes) | between(graph, nodes))


def between(graph: Graph, nodes: Collection[str]) -> frozenset[str]:
    """Nodes that use what some nodes make, and make what some of them use."""
    behind, before = set[str](), set[str]()
    for node in graph.nodes:
        if node.name in nodes or not behind.isdisjoint(refs_of(node)):
            behind.update(node.outs)
    for node in reversed(graph.nodes):
        if node.name in nodes or not before.isdisjoint(node.outs):
            before.update(refs_of(node))
    return frozenset(n.name for n in graph.nodes if n.name in behind and not before.isdisjoint(n.outs))


def _rows(
    node: Node, ref: str, at: int, types: Mapping[str, TensorType], *, back: bool = False
) -> int | None:
    """The dim of the rows in what a node makes, if they are dim ``at`` of what it takes; None if they are
    added up, or lie there in no dim of their own. back: in what it takes, if they are dim ``at`` of what it
    makes."""
    before, after = types[ref].shape, types[node.name].shape
    if node.op in _PRODUCTS:
        left = ref == next(refs_of(node))
        return at if at == len(after) - (2 if left else 1) else None
    if node.op in TRANSPOSES:
        order = _order(node, len(before))
        return order[at] if back else order.index(at)
    here, there = (after, before) if back else (before, after)
    if node.op in RESHAPES:
        return _reshaped(here, there, at)
    result = at + len(there) - len(here)
    return result if result >= 0 and there[result] == here[at] else None


def _beside(node: Node, ref: str, dims: Mapping[str, int], types: Mapping[str, TensorType]) -> int | None:
    """The dim of the rows in one factor of a product that adds up over them."""
    left, right = refs_of(node) if node.op in _PRODUCTS else ("", "")
    last = len(types[ref].shape) - 1
    if ref == left and dims.get(right) == last - 1:
        return last
    return last - 1 if ref == right and dims.get(left) == last else None


def _reshaped(before: Sequence[int], after: Sequence[int], at: int) -> int | None:
    """Where a dim ends up whose elements, with those of the dims outside of it, are seen in another way."""
    ends = list(accumulate(after, mul))
    count = prod(before[: at + 1])
    return ends.index(count) if count in ends else None


def _order(node: Node, rank: int) -> list[int]:
    """Of every dim of a transposed tensor, which one it was."""
    order = list(range(rank))
    if node.op == "aten.permute.default":
        return [int(d) % rank for d in node.args[1]]
    one, other = (0, 1) if node.op == "aten.t.default" else (int(d) % rank for d in node.args[1:3])
    order[one], order[other] = other, one
    return order
