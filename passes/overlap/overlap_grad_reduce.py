"""Gradients that are reduced once a step go out while backward still computes.

`defer_reductions` puts these reductions into messages at the end of a step. With one microbatch, a message
need not wait for that: it is issued behind the call that makes the last of its gradients (as
DistributedDataParallel does: Li et al., VLDB 2020, section 3.2.3), and waited for at the end of backward.
What works on the result of another message would wait for that, and computing with it: a gradient that its
call scatters over one axis is reduced over the next one some calls later, when it has arrived behind what
these compute. Behind the last call, and where the other message stands between calls, it stays where it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeGuard

from autoshard.ir import Call, Graph, Node, refs_of
from autoshard.ir.collectives import is_message, is_ring
from autoshard.ir.lowered import Instruction, Lowered, StagePart, with_parts
from autoshard.passes.overlap.schedule_ops import Seconds, node_seconds
from autoshard.rules.chains import ALONE


def early_reductions(lowered: Lowered, seconds: Seconds) -> Lowered:
    """The program of a single microbatch with messages of ``reduce`` in ``backward``, where they can be.

    seconds: prices of nodes.
    """
    costs = _Costs(lowered, seconds)
    items: dict[StagePart, list[Instruction]] = {part: list(lowered.of(part)) for part in lowered.parts}
    backward = {p.stage: p for p in lowered.parts if p.phase == "backward" and p.slice == 0}
    weights = {p.stage for p in lowered.parts if p.phase == "weight" or p.slice}
    for part in lowered.parts:
        if part.phase != "reduce" or part.stage in weights or part.stage not in backward:
            continue
        behind = _Behind(items[backward[part.stage]], costs)
        late: list[Instruction] = []
        missing: set[str] = set()
        for item in items[part]:
            if not _is_message(item) or not missing.isdisjoint(refs_of(item)) or not behind.put(item):
                late.append(item)
                missing.update(item.outs)
        items[backward[part.stage]], items[part] = behind.all(), late
    return with_parts(lowered, items.items())


class _Behind:
    """The instructions of backward, with messages put behind some of them."""

    def __init__(self, backward: Sequence[Instruction], costs: _Costs) -> None:
        self._backward, self._costs = backward, costs
        self._maker = {value: k for k, item in enumerate(backward) for value in item.outs}
        self._calls = [k for k, item in enumerate(backward) if isinstance(item, Call)]
        self._added: dict[int, list[Instruction]] = {}
        self._brought: set[str] = set()

    def put(self, item: Node) -> bool:
        """Put a message where all that it sends is made; False if that is not here, or brought by another."""
        needed = set(refs_of(item))
        makers = {self._maker[v] for v in needed if v in self._maker}
        if not makers or not self._brought.isdisjoint(needed):
            return False
        if any(_is_message(self._backward[k]) for k in makers):
            return False
        arrive = [self._arrives(v) for v in needed if v in self._maker]
        if None in arrive:
            return False
        place = max(k for k in arrive if k is not None)
        # messages of an axis keep their order
        while place + 1 < len(self._backward) and _is_message(self._backward[place + 1]):
            place += 1
        self._added.setdefault(place, []).append(item)
        self._brought.update(item.outs)
        return True

    def _arrives(self, value: str) -> int | None:
        """The instruction behind which a value is there without waiting for it; None if there is none."""
        k = self._maker[value]
        call = self._backward[k]
        if not isinstance(call, Call):
            return k
        left = self._costs.on_its_way(call.segment)[call.outs.index(value)]
        for later in self._calls[bisect_right(self._calls, k) :] if left else ():
            other = self._backward[later]
            assert isinstance(other, Call)
            k, left = later, left - self._costs.computing(other.segment)
            if left <= 0:
                break
        return k if left <= 0 else None

    def all(self) -> list[Instruction]:
        return [x for k, item in enumerate(self._backward) for x in (item, *self._added.get(k, ()))]


class _Costs:
    """Seconds of segments."""

    def __init__(self, lowered: Lowered, seconds: Seconds) -> None:
        self._segments, self._seconds = lowered.segments, seconds
        self._computing: dict[str, float] = {}
        self._on_their_way: dict[str, tuple[float, ...]] = {}

    def computing(self, name: str) -> float:
        """Of everything but messages."""
        if name not in self._computing:
            segment = self._segments[name]
            each = zip(segment.graph.nodes, node_seconds(segment, self._seconds), strict=True)
            self._computing[name] = sum(s for n, s in each if not is_message(n) or is_ring(n))
        return self._computing[name]

    def on_its_way(self, name: str) -> tuple[float, ...]:
        """Of the message that brings each output, but for ops on that alone; 0 for what is computed."""
        if name not in self._on_their_way:
            segment = self._segments[name]
            values = segment.placed()
            result = (_message(segment.graph, value) for value in segment.graph.outputs)
            self._on_their_way[name] = tuple(
                0.0 if n is None else self._seconds(n, values, ALONE) for n in result
            )
        return self._on_their_way[name]


def _message(graph: Graph, value: str) -> Node | None:
    """The message of a graph that brings a value, but for ops on that alone."""
    node: Node | None = None
    sources = {value}
    while len(sources) == 1:
        (source,) = sources
        node = next((n for n in graph.nodes if source in n.outs), None)
        if node is None or is_message(node):
            return node
        sources = set(refs_of(node))
    return None


def _is_message(item: Instruction) -> TypeGuard[Node]:
    return isinstance(item, Node) and is_message(item)
