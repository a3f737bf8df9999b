"""Parameter gathers and gradient reductions of one segment travel together.

All gathers of parameters over one axis are issued as one collective before the first use, all
reductions of gradients over one axis as one collective after the last is made: one latency instead
of one per parameter. What is gathered over a second axis can be in a message of its own: to issue the second
gather the first one is waited for, with all that travels in it, where that is much.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from autoshard.ir import Graph, Node, refs_of
from autoshard.ir.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    BUCKET_COLLECTIVES,
    COLLECTIVES,
    TENSOR_COLLECTIVES,
    collective,
    nbytes_made,
    transfers_of,
)
from autoshard.ir.lowered import Lowered, LoweredSegment
from autoshard.ir.placement import ELEMENTWISE
from autoshard.ir.scaled import BLOCK_SCALE, CASTS, LARGEST
from autoshard.passes.segment_parts import derived_values

#: collectives that have a form for many tensors
BUCKETED = frozenset(TENSOR_COLLECTIVES[transfer].op for transfer in BUCKET_COLLECTIVES)
#: what may be between a parameter and its gather
_CASTS = frozenset((*LARGEST, *CASTS, BLOCK_SCALE))
#: bytes of full tensors from which on they do not travel with what is waited for earlier
_MUCH = 1 << 20


def bucket_collectives(lowered: Lowered, parameters: Collection[str], *, apart: bool = False) -> Lowered:
    """Every segment with its parameter and gradient collectives merged.

    parameters: inputs of the program. apart: whether gathers whose results are regathered have messages
    of their own.
    """
    moved = derived_values(lowered, parameters, lambda node: _casts(node) or node.op == ALL_GATHER.op)
    segments = {
        name: _segment(segment, apart, moved.get(name, ())) for name, segment in lowered.segments.items()
    }
    return replace(lowered, segments=segments)


def _segment(segment: LoweredSegment, apart: bool, parameters: Collection[str]) -> LoweredSegment:
    graph = _gathers_together(segment.graph, apart, parameters)
    return replace(segment, graph=_reductions_last(graph))


def _key(node: Node, types: dict[str, str], parameters: Collection[str]) -> tuple[object, ...]:
    """Collectives with the same key can share a message: op, axis, reduction, element type. Activations
    do not travel with parameters, which are small next to them, or ready earlier."""
    source = next(refs_of(node))
    return (node.op, node.args[1], node.kwarg("op", "sum"), types[source], source in parameters)


def _gathers_together(graph: Graph, apart: bool, parameters: Collection[str]) -> Graph:
    """Gathers straight from a segment's inputs, or from casts of them: all at the place of the first."""
    early = {n for n, _ in graph.inputs}
    casts: list[Node] = []
    for node in graph.nodes:
        if _casts(node) and early.issuperset(refs_of(node)):
            casts.append(node)
            early.update(node.outs)
    gathers = [n for n in graph.nodes if n.op == ALL_GATHER.op and n.args[0].name in early]
    sent = {r for n in gathers for r in refs_of(n)}
    for node in reversed(casts):
        sent.update(refs_of(node) if not sent.isdisjoint(node.outs) else ())
    casts = [n for n in casts if not sent.isdisjoint(n.outs)]
    repeated = {r for n in graph.nodes if n.op == ALL_GATHER.op for r in refs_of(n)} if apart else set()
    waited = [n for n in gathers if not repeated.isdisjoint(n.outs)]
    others = [n for n in gathers if repeated.isdisjoint(n.outs)]
    if waited and sum(map(nbytes_made, others)) > _MUCH:
        merged = [*_merged(waited, graph, parameters), *_merged(others, graph, parameters)]
    else:
        merged = _merged(gathers, graph, parameters)
    merged = [*_maxima_together(casts, graph), *merged]
    chosen = {n.name for n in (*casts, *gathers)}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name not in chosen:
            nodes.append(node)
        elif merged:
            nodes += merged
            merged = []
    return replace(graph, nodes=tuple(nodes))


def _casts(node: Node) -> bool:
    """Whether it may be between a parameter and its gather: also the scale of all of it, over ranks."""
    return node.op in _CASTS or (node.op == ALL_REDUCE.op and node.kwarg("op") == "max")


def _maxima_together(casts: Sequence[Node], graph: Graph) -> list[Node]:
    """The same, with what several reduce over an axis in one message, first those that wait for none."""
    result, left = list[Node](), list(casts)
    while left:
        ready = {o for n in result for o in n.outs} | {n for n, _ in graph.inputs}
        now = [n for n in left if n.op != ALL_REDUCE.op and ready.issuperset(refs_of(n))]
        now = now or _merged([n for n in left if ready.issuperset(refs_of(n))], graph)
        result += now
        left = [n for n in left if not set(n.outs) <= {o for new in now for o in new.outs}]
    return result


def _reductions_last(graph: Graph) -> Graph:
    """Collectives whose results only leave the segment: at its end, those that others wait for first.

    What is reduced over one axis travels with the last of what is reduced over several: fewer messages, and
    of those that scatter only one at a time is on its way over an axis.
    """
    kept_back: set[str] = set()
    moved: list[Node] = []
    for node in reversed(graph.nodes):
        if node.op in BUCKETED and node.name not in kept_back:
            moved.append(node)
        else:
            kept_back.update(refs_of(node))
    moved.reverse()
    names = {n.name for n in moved}
    nodes = [n for n in graph.nodes if n.name not in names]
    behind: dict[str, int] = {}
    for node in reversed(moved):
        source = next(refs_of(node))
        behind[source] = max(behind.get(source, 0), 1 + behind.get(node.name, 0))
    for level in sorted({behind.get(name, 0) for name in names}, reverse=True):
        nodes += _merged([n for n in moved if behind.get(n.name, 0) == level], graph)
    return replace(graph, nodes=tuple(nodes))


def _merged(members: Sequence[Node], graph: Graph, parameters: Collection[str] = ()) -> list[Node]:
    """Collectives with equal keys as one; those alone, and those without such a form, as they are."""
    types = {n: t.dtype for n, t in graph.types().items()}
    buckets: dict[tuple[object, ...], list[Node]] = {}
    for node in members:
        buckets.setdefault(_key(node, types, parameters), []).append(node)
    return [
        new
        for group in buckets.values()
        for new in (
            group
            if len(group) == 1 or group[0].kwarg("op", "sum") not in ELEMENTWISE
            else [_bucket_node(group)]
        )
    ]


def _bucket_node(members: list[Node]) -> Node:
    """``a, b = comm.all_gather_bucket((x, y), axis, (where, where))``; where = (dim, outer, inner, size)."""
    first = members[0]
    moves = [t for n in members for t in transfers_of(n) or ()]
    types = [n.types[0] for n in members]
    transfer, reduce = COLLECTIVES[first.op].transfer, first.kwarg("op")
    return collective(transfer, first.args[1], moves, types, first.origin, first.backward, reduce=reduce)
