"""Parameter gathers and gradient reductions of one segment travel together.

All gathers of parameters over one axis are issued as one collective before the first use, all
reductions of gradients over one axis as one collective after the last is made: one latency instead
of one per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.ir import Graph, Node, Ref, refs_of
from autoshard.ir.lowered import Lowered, LoweredSegment

#: collectives that have a form for many tensors
BUCKETED = ("comm.all_gather.default", "comm.reduce_scatter.default", "comm.all_reduce.default")


def bucket_collectives(lowered: Lowered) -> Lowered:
    """Every segment with its parameter and gradient collectives merged."""
    return replace(lowered, segments={name: _segment(s) for name, s in lowered.segments.items()})


def _segment(segment: LoweredSegment) -> LoweredSegment:
    graph = segment.graph
    gathers = _merge(_gathers(graph), "first")
    graph = _apply(graph, gathers)
    graph = _apply(graph, _merge(_reductions(graph), "last"))
    return replace(segment, graph=graph)


def _key(node: Node, types: dict[str, str]) -> tuple[object, ...]:
    """Collectives with the same key can share a message: op, axis, reduction, element type."""
    source = next(refs_of(node))
    return (node.op, node.args[1], node.kwarg("op", "sum"), types[source])


def _gathers(graph: Graph) -> list[Node]:
    """Gathers straight from a segment input of a backward-or-forward parameter: nothing before them."""
    inputs = {n for n, _ in graph.inputs}
    return [n for n in graph.nodes if n.op == BUCKETED[0] and n.args[0].name in inputs]


def _reductions(graph: Graph) -> list[Node]:
    """Reductions whose result only leaves the segment."""
    used = {r for n in graph.nodes for r in refs_of(n)}
    outputs = set(graph.outputs)
    return [n for n in graph.nodes if n.op in BUCKETED[1:] and n.name in outputs and n.name not in used]


def _merge(nodes: Sequence[Node], at: str) -> list[tuple[str, list[Node]]]:
    return [(at, list(nodes))] if len(nodes) > 1 else []


def _apply(graph: Graph, groups: list[tuple[str, list[Node]]]) -> Graph:
    """Replace each group of equal-keyed collectives by one, at the place of its first or last member."""
    types = {n: t.dtype for n, t in graph.types().items()}
    for at, nodes in groups:
        buckets: dict[tuple[object, ...], list[Node]] = {}
        for node in nodes:
            buckets.setdefault(_key(node, types), []).append(node)
        for members in buckets.values():
            if len(members) > 1 and members[0].kwarg("op", "sum") != "lse":
                graph = _replace(graph, members, members[0 if at == "first" else -1])
    return graph


def _replace(graph: Graph, members: list[Node], place: Node) -> Graph:
    chosen = {n.name for n in members}
    merged = _bucket_node(members)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name == place.name:
            nodes.append(merged)
        if node.name not in chosen:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _bucket_node(members: list[Node]) -> Node:
    """``a, b = comm.all_gather_bucket((x, y), axis, (where, where))``; where = (dim, outer, inner, size)."""
    first = members[0]
    kind = first.op.split(".")[1]
    sources = tuple(Ref(next(refs_of(n))) for n in members)
    kwargs = tuple((k, v) for k, v in first.kwargs if k == "op")
    wheres: tuple[object, ...] = ()
    if kind != "all_reduce":
        wheres = (
            tuple(
                (n.args[2], n.kwarg("outer", 1), n.kwarg("inner", 1), n.kwarg("size", None)) for n in members
            ),
        )
    return Node(
        f"comm.{kind}_bucket.default",
        (sources, first.args[1], *wheres),
        kwargs,
        tuple(n.outs[0] for n in members),
        tuple(n.types[0] for n in members),
        first.origin,
        first.backward,
    )
