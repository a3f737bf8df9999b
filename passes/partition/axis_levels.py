"""What goes over an axis of several nodes on its two levels: inside nodes and across them.

Keys that go round an axis over several nodes would cross from node to node over one network card, and every
rank waits for that. They go round in two rings, one in each node and meanwhile one of the ranks in the same
place of all nodes, so that each card carries its share (`runtime.ring_attention`). Where a window ends their
way, they go to the next rank and no further round.

A token goes once to each node that has experts of its choice, and from there to the ranks that have them,
where that is faster than to every rank by itself (Nie et al., "HetuMoE", 2022). All exchanges over an axis go
the same way, as they share what was agreed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autoshard.ir import Arg, Call, Node, Ref
from autoshard.ir.collectives import COLLECTIVES, EXPERT_RELAY, RELAYED, axes_of, is_collective, is_ring
from autoshard.ir.lowered import Lowered, LoweredSegment
from autoshard.ir.names import free_name
from autoshard.passes.overlap.schedule_ops import Seconds
from autoshard.rules.attention import KEYS, is_windowed
from autoshard.rules.chains import ALONE
from autoshard.rules.local import MeshShape


@dataclass(frozen=True)
class Levels:
    """inside: of axes over several nodes, how many ranks that follow each other are in one. seconds: prices
    by which exchanges of tokens go by node; None: they do if ``by_node``."""

    inside: Mapping[str, int]
    seconds: Seconds | None
    by_node: bool


def axis_levels(lowered: Lowered, mesh: MeshShape, how: Levels) -> Lowered:
    """The program in which rings, and exchanges of tokens where they are faster like that, go on levels."""
    ways = dict(zip(mesh.names, mesh.sizes, strict=True))
    axes = {axis for axis in how.inside if _by_node(lowered, axis, ways[axis], how)}

    segments = {name: _levelled(s, how.inside, axes) for name, s in lowered.segments.items()}
    return replace(lowered, segments=segments)


def _levelled(segment: LoweredSegment, inside: Mapping[str, int], by_node: set[str]) -> LoweredSegment:
    nodes, layouts = list[Node](), dict(segment.layouts)
    for node in segment.graph.nodes:
        axis = node.args[1] if is_collective(node) else ""
        exchanged = axis in by_node and _exchanges(node)
        round_ = axis in inside and is_ring(node) and node.op in KEYS and not is_windowed(node)
        if not exchanged and not round_:
            nodes.append(node)
            continue
        told: tuple[tuple[str, Arg], ...] = (("inside", inside[axis]),)
        if not exchanged or node.op not in RELAYED:
            nodes.append(replace(node, kwargs=told))
            continue
        # what comes by the first hop is sent on by an op of its own, beside which others can run
        far = free_name(f"{node.name}_far", layouts)
        layouts[far] = layouts[node.name]
        nodes.append(replace(node, kwargs=(*told, ("relayed", True)), outs=(far,)))
        args = ((Ref(far), *node.args[0][1:]), *node.args[1:])
        nodes.append(replace(node, op=EXPERT_RELAY.op, args=args, kwargs=told))
    return replace(segment, graph=replace(segment.graph, nodes=tuple(nodes)), layouts=layouts)


def _exchanges(node: Node) -> bool:
    return COLLECTIVES[node.op].family == "experts"


def _by_node(lowered: Lowered, axis: str, ways: int, how: Levels) -> bool:
    """Whether tokens are exchanged by node over an axis."""
    each = list(_exchanges_over(lowered, axis))
    if not each or any(node.args[2] % ways for _, node, _ in each):
        return False
    if how.seconds is None:
        return how.by_node
    saved = 0.0
    for segment, node, calls in each:
        values = segment.placed()
        other = replace(node, kwargs=(("inside", how.inside[axis]),))
        saved += calls * (how.seconds(node, values, ALONE) - how.seconds(other, values, ALONE))
    return saved > 0


def _exchanges_over(lowered: Lowered, axis: str) -> Iterator[tuple[LoweredSegment, Node, int]]:
    """(segment, exchange of tokens over an axis, how often the segment is called)."""
    calls: dict[str, int] = {}
    for item in lowered.main:
        if isinstance(item, Call):
            calls[item.segment] = calls.get(item.segment, 0) + 1
    for name, segment in lowered.segments.items():
        for node in segment.graph.nodes:
            if is_collective(node) and _exchanges(node) and axes_of(node) == (axis,):
                yield segment, node, calls.get(name, 0)
