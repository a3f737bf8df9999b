"""Gradients are reduced once a step where the plan says so, in large messages across layers.

An all-reduce does not make a gradient smaller, so nothing is lost by waiting for more of them, nor for
further microbatches: gradients leave their segment unreduced, are summed over the microbatches, and go out
together, `BUCKET_BYTES` at a time (the size that DistributedDataParallel uses). Reductions that scatter
stay where they are, since they free memory, but for gradients that the plan reduces late (ZeRO-1). A gradient
that is reduced over several axes waits for the first of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from autoshard.ir import Arg, Call, Graph, Node, Origin, Ref, refs_of
from autoshard.ir.lowered import Instruction, Lowered, LoweredSegment, Part, Placed

BUCKET_BYTES = 25 * 2**20
_REDUCE, _SCATTER = "comm.all_reduce", "comm.reduce_scatter"
_REDUCTIONS = tuple(f"{op}{form}.default" for op in (_REDUCE, _SCATTER) for form in ("", "_bucket"))


def defer_reductions(lowered: Lowered, grads: Collection[str], late: Collection[str] = ()) -> Lowered:
    """The program with the last reductions of gradients in a part of its own, ``reduce``, for every stage.

    grads: values that are gradients of parameters; late: those of them that may be scattered once a step.
    """
    waiting = _Waiting(lowered, frozenset(grads), frozenset(late))
    segments = {name: _without(segment, waiting.inside[name]) for name, segment in lowered.segments.items()}
    main = _Main(lowered, waiting)
    order = list(lowered.parts)
    pieces = [(part, main.part(part)) for part in order]
    reduced = [main.reduced(stage) for stage in sorted({p.stage for p in order})]
    parts: list[Part] = []
    items: list[Instruction] = []
    for part, made in [*pieces, *reduced]:
        parts.append(replace(part, start=len(items), stop=len(items) + len(made)))
        items += made
    return replace(lowered, segments=segments, main=tuple(items), values=main.values, parts=tuple(parts))


@dataclass(frozen=True)
class _Hop:
    """One reduction of one value. where: (dim, outer, inner, size) of a scatter, None for an all-reduce."""

    source: str
    axis: str
    where: tuple[Arg, ...] | None

    @property
    def op(self) -> str:
        return _REDUCE if self.where is None else _SCATTER


def _hops(node: Node) -> Iterator[tuple[str, _Hop]]:
    """(result, how it is made) of a reduction that sums; nothing for any other node."""
    if node.op not in _REDUCTIONS or node.kwarg("op", "sum") != "sum":
        return
    axis = str(node.args[1])
    wheres: Sequence[tuple[Arg, ...] | None]
    if node.op.startswith(_REDUCE):
        wheres = [None] * len(node.outs)
    elif node.op.endswith("_bucket.default"):
        wheres = node.args[2]
    else:
        wheres = [
            (node.args[2], node.kwarg("outer", 1), node.kwarg("inner", 1), node.kwarg("size", None)),
        ]
    for out, source, where in zip(node.outs, refs_of(node), wheres, strict=True):
        yield out, _Hop(source, axis, where)


class _Waiting:
    """Which reductions can wait for the end of the step.

    main: value of main -> the hop that makes it, where that waits; inside: the same of every segment.
    """

    def __init__(self, lowered: Lowered, grads: frozenset[str], late: frozenset[str]) -> None:
        self.lowered = lowered
        used = {a for i in lowered.main for a in (i.args if isinstance(i, Call) else refs_of(i))}
        #: value that only leaves the program -> whether it may be scattered late
        self.ends = {value: value in late for value in grads - used}
        self.main = self._of_main()
        self.inside = {name: self._of_segment(name) for name in lowered.segments}

    def _of_main(self) -> dict[str, _Hop]:
        found: dict[str, _Hop] = {}
        users: dict[str, int] = {}
        for item in self.lowered.main:
            for value in item.args if isinstance(item, Call) else refs_of(item):
                users[value] = users.get(value, 0) + 1
        results = set(self.lowered.results)
        for item in reversed(self.lowered.main):
            if isinstance(item, Call) or not item.backward:
                continue
            for out, hop in _hops(item):
                if out in self.ends and (hop.where is None or self.ends[out]):
                    found[out] = hop
                    if users[hop.source] == 1 and hop.source not in results:
                        self.ends[hop.source] = self.ends[out]
        return found

    def _of_segment(self, name: str) -> dict[str, _Hop]:
        calls = [i for i in self.lowered.main if isinstance(i, Call) and i.segment == name]
        if not calls or not calls[0].backward:
            return {}
        graph = self.lowered.segments[name].graph
        ends: dict[str, bool] = {}
        for k, out in enumerate(graph.outputs):
            leaving = [call.outs[k] for call in calls]
            fine = all(value in self.ends for value in leaving) and graph.outputs.count(out) == 1
            if fine:
                ends[out] = all(self.ends[value] for value in leaving)
        users: dict[str, int] = {}
        for node in graph.nodes:
            for value in refs_of(node):
                users[value] = users.get(value, 0) + 1
        leaves = set(graph.outputs)
        found: dict[str, _Hop] = {}
        for node in reversed(graph.nodes):
            for out, hop in _hops(node):
                inside = users.get(out, 0) - (out in {h.source for h in found.values()})
                if out in ends and not inside and (hop.where is None or ends[out]):
                    found[out] = hop
                    if hop.source not in leaves:
                        ends[hop.source] = ends[out]
        return found


def _without(segment: LoweredSegment, waiting: dict[str, _Hop]) -> LoweredSegment:
    """The segment without these reductions, which gives out what they would have reduced."""
    if not waiting:
        return segment
    graph = segment.graph
    nodes: list[Node] = []
    for node in graph.nodes:
        kept = [k for k, out in enumerate(node.outs) if out not in waiting]
        if len(kept) == len(node.outs):
            nodes.append(node)
        elif kept:
            nodes.append(_members(node, kept))
    outputs = tuple(_first(out, waiting) for out in graph.outputs)
    return replace(segment, graph=Graph(graph.name, graph.inputs, tuple(nodes), outputs))


def _first(value: str, waiting: dict[str, _Hop]) -> str:
    """What a value is made of before any reduction that waits."""
    while value in waiting:
        value = waiting[value].source
    return value


def _members(node: Node, kept: Sequence[int]) -> Node:
    """A collective of many tensors for some of them."""
    sources, axis, *rest = node.args
    args = (tuple(sources[k] for k in kept), axis, *(tuple(one[k] for k in kept) for one in rest))
    outs, types = tuple(node.outs[k] for k in kept), tuple(node.types[k] for k in kept)
    return Node(node.op, args, node.kwargs, outs, types, node.origin, node.backward)


@dataclass
class _Bucket:
    """Gradients waiting for one message: how each is reduced, and to what."""

    members: list[tuple[_Hop, str]] = field(default_factory=list)
    bytes: int = 0


#: stage, how many reductions of a gradient come before it, op, axis, type
_Key = tuple[int, int, str, str, str]


class _Main:
    """Main with reductions taken out of it, and those of each stage in messages."""

    def __init__(self, lowered: Lowered, waiting: _Waiting) -> None:
        self.lowered, self.waiting = lowered, waiting
        self.values = dict(lowered.values)
        self.buckets: dict[_Key, _Bucket] = {}
        self.messages: dict[tuple[int, int], list[Instruction]] = {}
        #: value that is reduced later -> how many reductions come before that
        self.level: dict[str, int] = {}

    def part(self, part: Part) -> list[Instruction]:
        """The instructions of a part that are left."""
        main: list[Instruction] = []
        for item in self.lowered.of(part):
            if isinstance(item, Call):
                main.append(self._call(item, part.stage))
                continue
            kept = [k for k, out in enumerate(item.outs) if out not in self.waiting.main]
            if len(kept) == len(item.outs):
                main.append(item)
                continue
            if kept:
                main.append(_members(item, kept))
            for out, hop in _hops(item):
                if out in self.waiting.main:
                    self._wait(part.stage, hop, out)
        return main

    def reduced(self, stage: int) -> tuple[Part, list[Instruction]]:
        """The reductions of a stage, those that others wait for first."""
        for key in [k for k in self.buckets if k[0] == stage]:
            self._send(key)
        levels = sorted(level for at, level in self.messages if at == stage)
        made = [item for level in levels for item in self.messages[stage, level]]
        return Part(stage, "reduce", 0, 0), made

    def _call(self, call: Call, stage: int) -> Call:
        """The call with unreduced outputs, which are put into buckets."""
        waiting, segment = self.waiting.inside[call.segment], self.lowered.segments[call.segment]
        outs = list(call.outs)
        for position, output in enumerate(segment.graph.outputs):
            chain = [output]
            while chain[-1] in waiting:
                chain.append(waiting[chain[-1]].source)
            if len(chain) == 1:
                continue
            reduced = call.outs[position]
            names = [reduced, *(f"{reduced}_partial{k or ''}" for k in range(len(chain) - 1))]
            for name, inner in zip(names[1:], chain[1:], strict=True):
                self.values[name] = Placed(self.values[reduced].type, segment.layouts[inner])
            outs[position] = names[-1]
            for name, source, made in reversed(list(zip(names, names[1:], chain, strict=False))):
                self._wait(stage, replace(waiting[made], source=source), name)
        return replace(call, outs=tuple(outs))

    def _wait(self, stage: int, hop: _Hop, reduced: str) -> None:
        """Put a reduction into the message that is being filled."""
        type_ = self.values[reduced].type
        level = self.level.get(hop.source, 0)
        self.level[reduced] = level + 1
        key = (stage, level, hop.op, hop.axis, type_.dtype)
        bucket = self.buckets.setdefault(key, _Bucket())
        bucket.members.append((hop, reduced))
        bucket.bytes += type_.nbytes
        if bucket.bytes >= BUCKET_BYTES:
            self._send(key)

    def _send(self, key: _Key) -> None:
        stage, level, op, axis, _ = key
        node = self._node(op, axis, self.buckets.pop(key))
        self.messages.setdefault((stage, level), []).append(node)

    def _node(self, op: str, axis: str, bucket: _Bucket) -> Node:
        sources = tuple(Ref(hop.source) for hop, _ in bucket.members)
        outs = tuple(reduced for _, reduced in bucket.members)
        types = tuple(self.values[out].type for out in outs)
        wheres = tuple(hop.where for hop, _ in bucket.members if hop.where is not None)
        if len(outs) > 1:
            args = (sources, axis, wheres) if wheres else (sources, axis)
            return Node(f"{op}_bucket.default", args, (), outs, types, Origin(), True)
        if not wheres:
            return Node(f"{op}.default", (sources[0], axis), (), outs, types, Origin(), True)
        dim, outer, inner, size = wheres[0]
        kwargs = (("outer", outer), ("inner", inner), ("size", size))
        told = tuple((k, v) for k, v in kwargs if v not in (1, None))
        return Node(f"{op}.default", (sources[0], axis, dim), told, outs, types, Origin(), True)
