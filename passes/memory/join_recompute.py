"""What backward recomputes of a call becomes part of the backward call that reads it.

`recompute` puts a call of its own in front of each backward call. In one segment, chains of elementwise ops
go from what was saved to gradients, so that a compiler keeps their values inside kernels (torch's min-cut
partitioner relies on the same), each value stands right before its first use and is freed after its last,
and collectives of either part run beside the products of the other. What is recomputed is called ``x_again``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from autoshard.ir import Call, CallSite, Graph, Node, refs_of
from autoshard.ir.graph import renamed
from autoshard.ir.lowered import Instruction, Lowered, LoweredSegment, StagePart, uses_of, with_parts
from autoshard.ir.names import free_name
from autoshard.passes.segment_parts import fresh


def join_recompute(lowered: Lowered, tangents: Collection[str]) -> Lowered:
    """The program without calls that recompute for a single backward call of the same layer.

    tangents: inputs that gradients follow from.
    """
    joining = _Joining(lowered, _recomputing(lowered, tangents))
    pieces = [(part, joining.part(lowered.of(part))) for part in lowered.parts]
    return joining.finished(pieces) if joining.segments else lowered


def _recomputing(lowered: Lowered, tangents: Collection[str]) -> set[tuple[str, ...]]:
    """Results of the calls in backward of layers that follow from no gradient."""
    late = set(tangents)
    result: set[tuple[str, ...]] = set()
    for item in lowered.main:
        if not late.isdisjoint(uses_of(item)):
            late.update(item.outs)
        elif isinstance(item, Call) and item.backward and item.label:
            result.add(item.outs)
    return result


@dataclass
class _Joining:
    """segments: those of joined calls, by name. names: what is joined -> name."""

    lowered: Lowered
    recomputing: Collection[tuple[str, ...]]
    segments: dict[str, LoweredSegment] = field(default_factory=dict)
    names: dict[tuple[object, ...], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        main = self.lowered.main
        # the uses of every value, by whole instructions
        self.users = Counter(v for i in main for v in set(uses_of(i)))
        self.users.update(self.lowered.results)

    def part(self, items: Sequence[Instruction]) -> list[Instruction]:
        """The instructions of a part with its calls joined."""
        waiting: dict[str, Call] = {}  # label -> the call that recomputes
        new: list[Instruction] = []
        for item in items:
            before = waiting.get(item.label) if isinstance(item, Call) else None
            if isinstance(item, Call) and item.outs in self.recomputing and before is None:
                new += self._flushed(item, waiting)
                waiting[item.label] = item
            elif before is not None and isinstance(item, Call) and not set(before.outs).isdisjoint(item.args):
                del waiting[item.label]
                new += self._flushed(item, waiting)
                new.append(self._joined(before, item))
            else:
                new += [*self._flushed(item, waiting), item]
        return [*new, *waiting.values()]

    def _flushed(self, item: Instruction, waiting: dict[str, Call]) -> list[Call]:
        """What waits and makes what an instruction uses, which stays a call of its own."""
        uses = set(uses_of(item))
        labels = [label for label, call in waiting.items() if not uses.isdisjoint(call.outs)]
        return [waiting.pop(label) for label in labels]

    def _joined(self, before: Call, call: Call) -> Call:
        outs = [v for v in before.outs if self.users[v] > (v in call.args)]
        inputs = list(dict.fromkeys(v for v in (*call.args, *before.args) if v not in before.outs))
        # equal calls bind their values alike: each is told by its first place
        number = {v: k for k, v in reversed(list(enumerate((*call.args, *before.args, *before.outs))))}
        binding = tuple(number[v] for v in (*call.args, *before.args, *before.outs))
        key = (before.segment, call.segment, before.site - call.site, binding, tuple(number[v] for v in outs))
        if key not in self.names:
            taken = {*self.lowered.segments, *self.segments}
            name = free_name(f"{call.segment}_recompute", taken)
            self.segments[name] = self._segment(name, before, call, inputs, outs)
            self.names[key] = name
        return replace(call, segment=self.names[key], args=tuple(inputs), outs=(*call.outs, *outs))

    def _segment(
        self, name: str, before: Call, call: Call, inputs: Sequence[str], outs: Sequence[str]
    ) -> LoweredSegment:
        """Of a call that recomputes and the one that it recomputes for. inputs, outs: main values."""
        first, second = (self.lowered.segments[c.segment] for c in (before, call))
        types = first.graph.types()
        taken = set(second.graph.types())
        inside: dict[str, str] = {}  # main value -> its name in the segment
        for (value, _), arg in zip(second.graph.inputs, call.args, strict=True):
            inside.setdefault(arg, value)
        names: dict[str, str] = {}  # value of the first -> its name in the segment
        for (value, _), arg in zip(first.graph.inputs, before.args, strict=True):
            names[value] = inside.setdefault(arg, value if value not in taken else fresh(value, taken))
            taken.add(names[value])
        for value in types:
            if value not in names:
                names[value] = fresh(value, taken)
        # what is one value of the first, or one of main, is one value of the second
        ends = {out: names[value] for value, out in zip(first.graph.outputs, before.outs, strict=True)}
        repeated = {
            value: ends.get(arg, inside[arg])
            for (value, _), arg in zip(second.graph.inputs, call.args, strict=True)
        }
        recomputed = [_shifted(n, before.site - call.site) for n in renamed(first.graph.nodes, names)]
        nodes = _late(recomputed, renamed(second.graph.nodes, repeated))
        typed = {**{names[v]: t for v, t in types.items()}, **second.graph.types()}
        outputs = (*second.graph.outputs, *(ends[v] for v in outs))
        graph = Graph(name, tuple((inside[v], typed[inside[v]]) for v in inputs), nodes, outputs)
        new = {*(inside[v] for v in inputs), *(o for n in nodes for o in n.outs)}
        layouts = {names[v]: at for v, at in first.layouts.items()} | second.layouts
        why = {names[n]: text for n, text in first.why.items() if n in names} | second.why
        return LoweredSegment(graph, {v: at for v, at in layouts.items() if v in new}, why)

    def finished(self, pieces: Sequence[tuple[StagePart, Sequence[Instruction]]]) -> Lowered:
        """The program of these parts, with the segments and values that they use."""
        full = with_parts(self.lowered, pieces)
        called = {i.segment for i in full.main if isinstance(i, Call)}
        known = {**self.lowered.segments, **self.segments}
        gone = {o for i in self.lowered.main for o in i.outs} - {o for i in full.main for o in i.outs}
        return replace(
            full,
            segments={n: s for n, s in known.items() if n in called},
            values={v: placed for v, placed in full.values.items() if v not in gone},
        )


def _shifted(node: Node, shift: int) -> Node:
    """With the dropout sites of another call."""
    if not shift or CallSite not in map(type, node.args):
        return node
    args = tuple(CallSite(a.offset + shift) if isinstance(a, CallSite) else a for a in node.args)
    return replace(node, args=args)


def _late(recomputed: Sequence[Node], nodes: Sequence[Node]) -> tuple[Node, ...]:
    """All of them, in order, each node that recomputes right before the first that uses what it makes."""
    first: dict[str, int] = {}
    for place, node in reversed(list(enumerate(nodes))):
        first.update(dict.fromkeys(refs_of(node), place))
    before: list[list[Node]] = [[] for _ in (*nodes, None)]
    for node in reversed(recomputed):
        place = min(first.get(out, len(nodes)) for out in node.outs)
        before[place].append(node)
        for value in refs_of(node):
            first[value] = min(place, first.get(value, place))
    ordered = [n for place, node in enumerate(nodes) for n in (*reversed(before[place]), node)]
    return (*ordered, *reversed(before[-1]))
