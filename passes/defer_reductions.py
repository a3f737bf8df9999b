"""Gradients that every rank keeps whole are reduced in large messages across layers.

An all-reduce does not make a gradient smaller, so nothing is lost by waiting for more of them: they leave
their segment unreduced and go out together, `BUCKET_BYTES` at a time (the size that
DistributedDataParallel uses). Reductions that scatter stay where they are, since they free memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autoshard.ir import Call, Graph, Node, Origin, Ref, refs_of
from autoshard.ir.lowered import Instruction, Lowered, LoweredSegment, Placed

BUCKET_BYTES = 25 * 2**20
_REDUCTIONS = ("comm.all_reduce.default", "comm.all_reduce_bucket.default")


def defer_reductions(lowered: Lowered) -> Lowered:
    """The program with the last all-reduces of backward segments in main, merged."""
    found = {name: _deferrable(name, lowered) for name in lowered.segments}
    if not any(found.values()):
        return lowered
    segments = {name: _without(segment, found[name]) for name, segment in lowered.segments.items()}
    return _Main(lowered, segments, found).run()


def _deferrable(name: str, lowered: Lowered) -> dict[str, tuple[str, str]]:
    """Output of a segment -> (the value before its reduction, the axis), where only results use it."""
    calls = [i for i in lowered.main if isinstance(i, Call) and i.segment == name]
    if not calls or not calls[0].backward:
        return {}
    graph = lowered.segments[name].graph
    used_inside = {r for n in graph.nodes for r in refs_of(n)}
    used_in_main = {a for i in lowered.main for a in (i.args if isinstance(i, Call) else refs_of(i))}
    found: dict[str, tuple[str, str]] = {}
    for node in graph.nodes:
        if node.op not in _REDUCTIONS or node.kwarg("op", "sum") != "sum":
            continue
        ends = {call.outs[k] for call in calls for k, out in enumerate(graph.outputs) if out in node.outs}
        free = all(o in graph.outputs and o not in used_inside for o in node.outs)
        if free and used_in_main.isdisjoint(ends):
            found.update((o, (r, str(node.args[1]))) for o, r in zip(node.outs, refs_of(node), strict=True))
    return found


def _without(segment: LoweredSegment, deferred: dict[str, tuple[str, str]]) -> LoweredSegment:
    graph = segment.graph
    nodes = tuple(n for n in graph.nodes if n.name not in deferred)
    outputs = tuple(deferred[o][0] if o in deferred else o for o in graph.outputs)
    return replace(segment, graph=Graph(graph.name, graph.inputs, nodes, outputs))


@dataclass
class _Bucket:
    """Gradients waiting for one message: (unreduced, reduced) main values."""

    pairs: list[tuple[str, str]] = field(default_factory=list)
    bytes: int = 0


class _Main:
    def __init__(
        self,
        lowered: Lowered,
        segments: dict[str, LoweredSegment],
        found: dict[str, dict[str, tuple[str, str]]],
    ) -> None:
        self.lowered, self.segments, self.found = lowered, segments, found
        self.values = dict(lowered.values)
        self.buckets: dict[tuple[str, str], _Bucket] = {}

    def run(self) -> Lowered:
        main: list[Instruction] = []
        for item in self.lowered.main:
            if not isinstance(item, Call) or not self.found[item.segment]:
                main.append(item)
                continue
            main.append(self._call(item))
            full = [key for key, bucket in self.buckets.items() if bucket.bytes >= BUCKET_BYTES]
            main += [self._node(key, self.buckets.pop(key)) for key in full]
        main += [self._node(key, bucket) for key, bucket in self.buckets.items()]
        return replace(self.lowered, segments=self.segments, main=tuple(main), values=self.values)

    def _call(self, call: Call) -> Call:
        """The call with unreduced outputs, which are put into buckets."""
        segment = self.lowered.segments[call.segment]
        outs = list(call.outs)
        for position, output in enumerate(segment.graph.outputs):
            if output not in self.found[call.segment]:
                continue
            source, axis = self.found[call.segment][output]
            reduced = call.outs[position]
            placed = self.values[reduced]
            outs[position] = f"{reduced}_partial"
            self.values[outs[position]] = Placed(placed.type, segment.layouts[source])
            bucket = self.buckets.setdefault((axis, placed.type.dtype), _Bucket())
            bucket.pairs.append((outs[position], reduced))
            bucket.bytes += placed.type.nbytes
        return replace(call, outs=tuple(outs))

    def _node(self, key: tuple[str, str], bucket: _Bucket) -> Node:
        sources: Sequence[Ref] = [Ref(source) for source, _ in bucket.pairs]
        outs = tuple(reduced for _, reduced in bucket.pairs)
        types = tuple(self.values[out].type for out in outs)
        if len(outs) == 1:
            return Node(_REDUCTIONS[0], (sources[0], key[0]), (), outs, types, Origin(), True)
        return Node(_REDUCTIONS[1], (tuple(sources), key[0]), (), outs, types, Origin(), True)
