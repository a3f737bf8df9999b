"""Which values of a graph lie in memory by another dim than their last: transposed looks at others."""

from __future__ import annotations

from autoshard.ir.graph import Graph, Node, Ref

_TURNS = frozenset(("aten.t.default", "aten.transpose.int", "aten.permute.default"))
#: looks that leave rows where they are
_KEEPS = frozenset(("aten.expand.default", "aten.alias.default", "aten.detach.default"))


def turned_in(graph: Graph) -> frozenset[str]:
    """Of a graph whose inputs lie row by row."""
    turned: set[str] = set()
    for node in graph.nodes:
        if node.op not in _TURNS and node.op not in _KEEPS:
            continue
        source = node.args[0]
        before = isinstance(source, Ref) and source.name in turned
        if before != (node.op in _TURNS and _moves_last(node)):
            turned.update(node.outs)
    return frozenset(turned)


def _moves_last(node: Node) -> bool:
    """Whether another dim becomes the last one."""
    (type_,) = node.types
    rank = len(type_.shape) if type_ is not None else 0
    if node.op == "aten.t.default":
        return rank == 2
    if node.op == "aten.transpose.int":
        a, b = (int(dim) % max(1, rank) for dim in node.args[1:3])
        return a != b and rank - 1 in (a, b)
    dims = node.args[1]
    return bool(dims) and int(dims[-1]) % rank != rank - 1
