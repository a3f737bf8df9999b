"""Gradients that every rank keeps whole are reduced once a step, in large messages across layers.

An all-reduce does not make a gradient smaller, so nothing is lost by waiting for more of them, nor for
further microbatches: gradients leave their segment unreduced, are summed over the microbatches, and go out
together, `BUCKET_BYTES` at a time (the size that DistributedDataParallel uses). Reductions that scatter
stay where they are, since they free memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from autoshard.ir import Call, Graph, Node, Origin, Ref, refs_of
from autoshard.ir.lowered import Instruction, Lowered, LoweredSegment, Part, Placed

BUCKET_BYTES = 25 * 2**20
#: output of a segment -> (the value before its reduction, the axis)
_Deferred: TypeAlias = "dict[str, tuple[str, str]]"
_REDUCTIONS = ("comm.all_reduce.default", "comm.all_reduce_bucket.default")


def defer_reductions(lowered: Lowered, grads: Collection[str]) -> Lowered:
    """The program with the last all-reduces of gradients in a part of its own, ``reduce``, for every stage.

    grads: values that are gradients of parameters.
    """
    ends = _Ends(lowered, frozenset(grads))
    found = ends.agreed({name: ends.deferrable(name) for name in lowered.segments})
    segments = {name: _without(segment, found[name]) for name, segment in lowered.segments.items()}
    main = _Main(lowered, segments, found, ends)
    order = list(lowered.parts)
    pieces = [(part, main.part(part)) for part in order]
    reduced = [main.reduced(stage) for stage in sorted({p.stage for p in order})]
    parts: list[Part] = []
    items: list[Instruction] = []
    for part, made in [*pieces, *reduced]:
        parts.append(replace(part, start=len(items), stop=len(items) + len(made)))
        items += made
    return replace(lowered, segments=segments, main=tuple(items), values=main.values, parts=tuple(parts))


class _Ends:
    """Which values only leave the program, as gradients."""

    def __init__(self, lowered: Lowered, grads: frozenset[str]) -> None:
        self.lowered, self.grads = lowered, grads
        self.used = {a for i in lowered.main for a in (i.args if isinstance(i, Call) else refs_of(i))}

    def is_end(self, value: str) -> bool:
        return value in self.grads and value not in self.used

    def deferrable(self, name: str) -> _Deferred:
        """Output of a segment -> (the value before its reduction, the axis), where only results use it."""
        calls = [i for i in self.lowered.main if isinstance(i, Call) and i.segment == name]
        if not calls or not calls[0].backward:
            return {}
        graph = self.lowered.segments[name].graph
        used_inside = {r for n in graph.nodes for r in refs_of(n)}
        found: dict[str, tuple[str, str]] = {}
        for node in graph.nodes:
            if node.op not in _REDUCTIONS or node.kwarg("op", "sum") != "sum":
                continue
            for out, source in zip(node.outs, refs_of(node), strict=True):
                leaving = {call.outs[k] for call in calls for k, o in enumerate(graph.outputs) if o == out}
                if out in graph.outputs and out not in used_inside and all(map(self.is_end, leaving)):
                    found[out] = source, str(node.args[1])
        return found

    def agreed(
        self, found: Mapping[str, dict[str, tuple[str, str]]]
    ) -> dict[str, dict[str, tuple[str, str]]]:
        """Without what only some of those defer that add to a gradient in a stage: slices of a sequence.

        A sum of terms that are reduced and terms that are not would be neither.
        """
        left = {name: dict(deferred) for name, deferred in found.items()}
        while True:
            made: dict[tuple[int, str], set[bool]] = {}
            for stage, item, inner, out in self._made():
                deferred = inner in left[item.segment] if isinstance(item, Call) else self.is_deferrable(item)
                made.setdefault((stage, out), set()).add(deferred)
            mixed = [
                (item.segment, inner)
                for stage, item, inner, out in self._made()
                if isinstance(item, Call) and len(made[stage, out]) > 1 and inner in left[item.segment]
            ]
            if not mixed:
                return left
            for segment, inner in mixed:
                left[segment].pop(inner, None)

    def _made(self) -> Iterator[tuple[int, Instruction, str, str]]:
        """(stage, instruction, its own name for it, value) of everything that main makes."""
        for part in self.lowered.parts:
            for item in self.lowered.of(part):
                own = item.outs
                if isinstance(item, Call):
                    own = self.lowered.segments[item.segment].graph.outputs
                for inner, out in zip(own, item.outs, strict=True):
                    yield part.stage, item, inner, out

    def is_deferrable(self, item: Instruction) -> bool:
        """Whether an instruction of main is such a reduction."""
        if isinstance(item, Call) or item.op not in _REDUCTIONS or not item.backward:
            return False
        return item.kwarg("op", "sum") == "sum" and all(map(self.is_end, item.outs))


def _without(segment: LoweredSegment, deferred: _Deferred) -> LoweredSegment:
    graph = segment.graph
    nodes = tuple(m for n in graph.nodes for m in _left(n, deferred))
    outputs = tuple(deferred[o][0] if o in deferred else o for o in graph.outputs)
    return replace(segment, graph=Graph(graph.name, graph.inputs, nodes, outputs))


def _left(node: Node, deferred: Collection[str]) -> list[Node]:
    """What is left of a collective without the reductions that are deferred."""
    if not any(out in deferred for out in node.outs):
        return [node]
    rows = zip(node.outs, node.types, refs_of(node), strict=True)
    kept = [(out, type_, Ref(source)) for out, type_, source in rows if out not in deferred]
    if not kept:
        return []
    outs, types, sources = (tuple(column) for column in zip(*kept, strict=True))
    if len(outs) == 1:
        return [replace(node, op=_REDUCTIONS[0], args=(sources[0], *node.args[1:]), outs=outs, types=types)]
    return [replace(node, args=(sources, *node.args[1:]), outs=outs, types=types)]


@dataclass
class _Bucket:
    """Gradients waiting for one message: (unreduced, reduced) main values."""

    pairs: list[tuple[str, str]] = field(default_factory=list)
    bytes: int = 0


class _Main:
    """Main with reductions taken out of it, and those of each stage in messages."""

    def __init__(
        self,
        lowered: Lowered,
        segments: dict[str, LoweredSegment],
        found: Mapping[str, _Deferred],
        ends: _Ends,
    ) -> None:
        self.lowered, self.segments, self.found, self.ends = lowered, segments, found, ends
        self.values = dict(lowered.values)
        self.buckets: dict[tuple[int, str, str], _Bucket] = {}
        self.waiting: set[tuple[int, str]] = set()
        self.messages: dict[int, list[Instruction]] = {}

    def part(self, part: Part) -> list[Instruction]:
        """The instructions of a part that are left."""
        main: list[Instruction] = []
        for item in self.lowered.of(part):
            if self.ends.is_deferrable(item):
                assert isinstance(item, Node)
                for source, out in zip(refs_of(item), item.outs, strict=True):
                    self._wait(part.stage, str(item.args[1]), source, out)
            elif isinstance(item, Call) and self.found[item.segment]:
                main.append(self._call(item, part.stage))
            else:
                main.append(item)
        return main

    def reduced(self, stage: int) -> tuple[Part, list[Instruction]]:
        """The reductions of a stage."""
        for key in [k for k in self.buckets if k[0] == stage]:
            self._send(key)
        return Part(stage, "reduce", 0, 0), self.messages.get(stage, [])

    def _call(self, call: Call, stage: int) -> Call:
        """The call with unreduced outputs, which are put into buckets."""
        segment = self.lowered.segments[call.segment]
        outs = list(call.outs)
        for position, output in enumerate(segment.graph.outputs):
            if output not in self.found[call.segment]:
                continue
            source, axis = self.found[call.segment][output]
            reduced = call.outs[position]
            outs[position] = f"{reduced}_partial"
            self.values[outs[position]] = Placed(self.values[reduced].type, segment.layouts[source])
            self._wait(stage, axis, outs[position], reduced)
        return replace(call, outs=tuple(outs))

    def _wait(self, stage: int, axis: str, source: str, reduced: str) -> None:
        """Put a reduction into the message that is being filled; once, if every slice adds a term to it."""
        if (stage, reduced) in self.waiting:
            return
        self.waiting.add((stage, reduced))
        type_ = self.values[reduced].type
        key = (stage, axis, type_.dtype)
        bucket = self.buckets.setdefault(key, _Bucket())
        bucket.pairs.append((source, reduced))
        bucket.bytes += type_.nbytes
        if bucket.bytes >= BUCKET_BYTES:
            self._send(key)

    def _send(self, key: tuple[int, str, str]) -> None:
        self.messages.setdefault(key[0], []).append(self._node(key[1], self.buckets.pop(key)))

    def _node(self, axis: str, bucket: _Bucket) -> Node:
        sources: Sequence[Ref] = [Ref(source) for source, _ in bucket.pairs]
        outs = tuple(reduced for _, reduced in bucket.pairs)
        types = tuple(self.values[out].type for out in outs)
        if len(outs) == 1:
            return Node(_REDUCTIONS[0], (sources[0], axis), (), outs, types, Origin(), True)
        return Node(_REDUCTIONS[1], (tuple(sources), axis), (), outs, types, Origin(), True)
