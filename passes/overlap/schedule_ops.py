"""Ops of a segment in an order in which its messages are on their way while something is computed.

List scheduling by price: what can begin at once comes first, and of that what is most urgent by one of two
rules (Kwok and Ahmad, ACM Computing Surveys 31(4), 1999, section 6). The clock is that of a rank with one
stream for computing and one per mesh axis. The shorter order is taken where it makes the segment shorter.
What is computed stays the same, and so does the order of the messages of an axis that change layouts;
exchanges of tokens may pass them. All ranks run the same text and share its order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from heapq import heappop, heappush
from operator import itemgetter

from autoshard.ir import Graph, Node, refs_of
from autoshard.ir.collectives import axes_of, goes_in_turn, is_message, is_ring, nbytes_made, spec_of
from autoshard.ir.lowered import Lowered, LoweredSegment, PlacedValue
from autoshard.passes.simplify.segment_cache import SegmentCache
from autoshard.rules.chains import FusedKernels, InKernel

#: seconds of a node, given the types and layouts of the values around it, and the fused kernel that it is in
Seconds = Callable[[Node, Mapping[str, PlacedValue], InKernel], float]
#: a new order has to save this share of a segment
_WORTH = 1e-3


def node_seconds(segment: LoweredSegment, seconds: Seconds) -> list[float]:
    """Of each node of a segment."""
    graph, values = segment.graph, segment.placed()
    fused = FusedKernels.of(graph.nodes, graph.outputs)
    return [seconds(node, values, fused.of_node(node)) for node in graph.nodes]


def overlap(lowered: Lowered, seconds: Seconds, known: SegmentCache) -> Lowered:
    """The program with every segment in its best order; its first message says what that saves."""
    segments = {
        name: known.of("overlap", segment, seconds, partial(_segment, segment, seconds))
        for name, segment in lowered.segments.items()
    }
    return replace(lowered, segments=segments)


def _segment(segment: LoweredSegment, seconds: Seconds) -> LoweredSegment:
    nodes = segment.graph.nodes
    first = next((n for n in nodes if is_message(n)), None)
    if first is None:
        return segment
    costs = dict(zip(nodes, node_seconds(segment, seconds), strict=True))
    before = _played(nodes, list(costs.values()))
    graph, after = segment.graph, before
    for each in dict.fromkeys((graph, _largest_last(graph))):
        took, order = _shortest_order(each, [costs[n] for n in each.nodes])
        if took < after:
            after, graph = took, replace(graph, nodes=tuple(each.nodes[k] for k in order))
    if not after < before * (1 - _WORTH):
        return segment
    note = f"reordered beside its messages: {after * 1e6:.0f} us, was {before * 1e6:.0f} us"
    said = segment.why.get(first.name, "")
    why = {**segment.why, first.name: f"{said}; {note}" if said else note}
    return replace(segment, graph=graph, why=why)


def _largest_last(graph: Graph) -> Graph:
    """With the largest of an axis' messages that go in turn behind the others, which would wait for it."""
    nodes, used = list(graph.nodes), {r for n in graph.nodes for r in refs_of(n)}
    turns: dict[tuple[str, ...], list[Node]] = {}
    for node in nodes:
        if goes_in_turn(node):
            turns.setdefault(axes_of(node), []).append(node)
    for each in turns.values():
        largest = max(each, key=nbytes_made)
        if largest is not each[-1] and used.isdisjoint(largest.outs):
            nodes.remove(largest)
            nodes.append(largest)
    return replace(graph, nodes=tuple(nodes))


def shortest(graph: Graph, costs: Sequence[float], *, moving: bool) -> float:
    """Seconds of a segment in its order or, if its ops may be moved, in the better of that and the best.

    costs: seconds of each of its nodes.
    """
    as_it_is = _played(graph.nodes, costs)
    if not moving:
        return as_it_is
    return min(as_it_is, _shortest_order(graph, costs)[0])


def _shortest_order(graph: Graph, costs: Sequence[float]) -> tuple[float, list[int]]:
    """Seconds and positions of the nodes in the shortest of a few orders, of equally short ones the first."""
    nodes, scheduling = graph.nodes, _Scheduling(graph, costs)
    played: list[tuple[float, list[int]]] = []
    for critical in (False, True):
        order = scheduling.order(critical=critical)
        played.append((_played([nodes[k] for k in order], [costs[k] for k in order]), order))
    return min(played, key=itemgetter(0))


def streams_of(node: Node) -> tuple[str, ...]:
    """The mesh axes whose streams a node is on, none for computing; a ring is on "", too: it computes."""
    if is_ring(node):
        return ("", *axes_of(node))
    return axes_of(node) if is_message(node) else ()


def _played(nodes: Sequence[Node], costs: Sequence[float]) -> float:
    """Seconds from one call to the next, in this order, of many calls one after the other: messages that
    nothing in a call waits for may end beside the next one, but none takes less than all its messages."""
    clock, begins = _Clock(), list[float]()
    for _ in range(2):
        begins.append(clock.free[""])
        for node, cost in zip(nodes, costs, strict=True):
            clock.run(node, cost)
    busy: dict[str, float] = {}
    for node, cost in zip(nodes, costs, strict=True):
        for axis in streams_of(node):
            busy[axis] = busy.get(axis, 0.0) + cost
    return max([clock.free[""] - begins[1], *busy.values()])


class _Clock:
    """One stream for computing and one per mesh axis. Messages are issued where they stand and waited for
    where they are needed, be it to issue the next; one that goes out in turn waits for the one before it."""

    def __init__(self) -> None:
        self.free: dict[str, float] = {"": 0.0}
        self.ready: dict[str, float] = {}
        #: axis -> end of the last message in turn
        self.turn: dict[str, float] = {}

    def begin(self, node: Node) -> float:
        """Seconds at which a node can be issued."""
        before = [self.turn.get(axis, 0.0) for axis in axes_of(node)] if goes_in_turn(node) else []
        return max([self.free[""], *before, *(self.ready.get(r, 0.0) for r in refs_of(node))])

    def run(self, node: Node, cost: float) -> None:
        axes, begin = streams_of(node), self.begin(node)
        end = max([begin, *(self.free.get(axis, 0.0) for axis in axes or ("",))]) + cost
        if axes:
            self.free[""] = begin
            if goes_in_turn(node):
                self.turn.update(dict.fromkeys(axes, end))
        self.free.update(dict.fromkeys(axes or ("",), end))
        self.ready.update(dict.fromkeys(node.outs, end))


@dataclass
class _Scheduling:
    graph: Graph
    costs: Sequence[float]

    def order(self, *, critical: bool) -> list[int]:
        """Positions of the nodes in their new order.

        critical: whether what has most seconds of others behind it comes first; else messages, and then what
        the next message needs.
        """
        nodes, needs = self.graph.nodes, self._needs
        urgency: Sequence[float] = self._critical() if critical else self._for_messages()
        users: list[list[int]] = [[] for _ in nodes]
        for k, result in enumerate(needs):
            for need in result:
                users[need].append(k)
        left = [len(n) for n in needs]
        clock, order = _Clock(), []
        # what the clock has passed, most urgent first; and what waits for a value, soonest first
        ready: list[tuple[float, int]] = []
        later: list[tuple[float, float, int]] = []
        free = [k for k, n in enumerate(left) if not n]
        while free or ready or later:
            for k in free:
                heappush(later, (clock.begin(nodes[k]), urgency[k], k))
            now = clock.free[""] if ready else max(clock.free[""], later[0][0])
            while later and later[0][0] <= now:
                _, urgent, k = heappop(later)
                heappush(ready, (urgent, k))
            _, chosen = heappop(ready)
            clock.run(nodes[chosen], self.costs[chosen])
            order.append(chosen)
            for user in users[chosen]:
                left[user] -= 1
            free = [user for user in users[chosen] if not left[user]]
        return order

    @cached_property
    def _needs(self) -> list[set[int]]:
        """Per node, those before it: what makes what it uses, and the message before it on its axis, of those
        that change layouts."""
        nodes = self.graph.nodes
        makers = {out: k for k, node in enumerate(nodes) for out in node.outs}
        needs = [{makers[r] for r in refs_of(node) if r in makers} for node in nodes]
        last: dict[str, int] = {}
        for k, node in enumerate(nodes):
            spec = spec_of(node)
            if spec is not None and spec.family == "experts":
                continue
            for axis in streams_of(node):
                needs[k] |= {last[axis]} if axis in last else set()
                last[axis] = k
        return needs

    def _critical(self) -> list[float]:
        """Per node, seconds of the longest path to the last of what is waited for, negative."""
        needs = self._needs
        result = [0.0] * len(needs)
        waited = set[int]().union(*needs)
        for k in range(len(needs) - 1, -1, -1):
            if k in waited or not is_message(self.graph.nodes[k]):
                result[k] -= self.costs[k]
            for need in needs[k]:
                result[need] = min(result[need], result[k])
        return result

    def _for_messages(self) -> list[int]:
        """Per node, the first message that needs it, itself among them: what no message needs comes last."""
        nodes, needs = self.graph.nodes, self._needs
        result = [len(nodes)] * len(nodes)
        for k in range(len(nodes) - 1, -1, -1):
            if is_message(nodes[k]):
                result[k] = min(result[k], k)
            for need in needs[k]:
                result[need] = min(result[need], result[k])
        return result
