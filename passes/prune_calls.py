"""Leave out of segments and their calls what nothing uses any more."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autoshard.ir import Call, Graph, Node, refs_of
from autoshard.ir.lowered import Lowered, LoweredSegment


def pruned(lowered: Lowered, droppable: Mapping[str, Collection[str]]) -> Lowered:
    """Without what nothing uses any more.

    droppable: of each segment, values that need not be made, nor handed out, if nothing uses them.
    """
    while True:
        used = {r for i in lowered.main for r in (i.args if isinstance(i, Call) else refs_of(i))}
        used.update(lowered.results)
        calls = [i for i in lowered.main if isinstance(i, Call)]
        leaving: dict[str, list[int]] = {}
        entering: dict[str, list[int]] = {}
        segments: dict[str, LoweredSegment] = {}
        for name, segment in lowered.segments.items():
            own = [c for c in calls if c.segment == name]
            graph = segment.graph
            leaving[name] = [
                place
                for place, value in enumerate(graph.outputs)
                if value not in droppable[name] or any(c.outs[place] in used for c in own)
            ]
            new = _alive(graph, [graph.outputs[p] for p in leaving[name]], droppable[name])
            needed = {*new.outputs, *(r for n in new.nodes for r in refs_of(n))}
            entering[name] = [p for p, (value, _) in enumerate(graph.inputs) if value in needed]
            # an input that nothing used before stays: calls are left as they are but for the kernels
            if not droppable[name]:
                entering[name] = list(range(len(graph.inputs)))
            inputs = tuple(graph.inputs[p] for p in entering[name])
            names = {n for n, _ in inputs} | {o for n in new.nodes for o in n.outs}
            layouts = {n: lay for n, lay in segment.layouts.items() if n in names}
            segments[name] = replace(segment, graph=replace(new, inputs=inputs), layouts=layouts)
        main = tuple(
            replace(
                i,
                args=tuple(i.args[p] for p in entering[i.segment]),
                outs=tuple(i.outs[p] for p in leaving[i.segment]),
            )
            if isinstance(i, Call)
            else i
            for i in lowered.main
        )
        if main == lowered.main:
            return replace(lowered, segments=segments)
        gone = {o for i in lowered.main for o in i.outs} - {o for i in main for o in i.outs}
        values = {n: v for n, v in lowered.values.items() if n not in gone}
        lowered = replace(lowered, segments=segments, main=main, values=values)


def _alive(graph: Graph, outputs: Sequence[str], droppable: Collection[str]) -> Graph:
    """The graph with these outputs, and without those droppable nodes that they do not need."""
    used = set(outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in droppable and used.isdisjoint(node.outs):
            continue
        kept.append(node)
        used.update(refs_of(node))
    return replace(graph, nodes=tuple(reversed(kept)), outputs=tuple(outputs))
