"""Every layer makes its own mask, from what the model's code makes it of.

A mask of queries by keys is made once, and all layers take it. Each can as well make it again of positions
and of what is padding, which are vectors; so that, where attention is computed for some queries at a time
(`tile_rows`), the mask is, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoshard.ir import Call, Folded, Graph, Node, TensorType, refs_of
from autoshard.ir.graph import renamed
from autoshard.passes.memory.wide_values import spread
from autoshard.passes.segment_parts import fresh, without_dead
from autoshard.rules.core import RuleFn

#: a value that is so many times as large as what it is made of may be made again
_LARGER = 8


def sink_masks(folded: Folded, table: Mapping[str, RuleFn]) -> Folded:
    """The model in which segments make large elementwise values themselves that others made of small ones."""
    for call in folded.calls:
        if folded.counts()[call.segment] == 1:
            for main in call.outs:
                folded = _sunk(folded, call.segment, main, table)
    return folded


def _sunk(folded: Folded, name: str, main: str, table: Mapping[str, RuleFn]) -> Folded:
    graph = folded.segments[name]
    source = next(c for c in folded.calls if c.segment == name)
    users = [c for c in folded.calls if main in c.args]
    result = _chain(graph, graph.outputs[source.outs.index(main)], table)
    if result is None or not users or main in {r.value for r in folded.joint.results}:
        return folded
    nodes, starts = result
    places = {c.segment: c.args.index(main) for c in users}
    if any(c.args[places[c.segment]] != main for c in folded.calls if c.segment in places):
        return folded  # some of its calls take another one
    taken = {v for g in folded.segments.values() for v in g.types()}
    taken |= {o for c in folded.calls for o in c.outs} | {p.name for p in folded.joint.ports}
    names, more = _in_main(graph, source, starts, taken)
    segments = dict(folded.segments)
    kept = [k for k, o in enumerate(source.outs) if o != main]
    segments[name] = without_dead(replace(graph, outputs=(*(graph.outputs[k] for k in kept), *more)))
    for segment, place in places.items():
        segments[segment] = _making(segments[segment], place, nodes, starts, graph.types(), taken)
    calls: list[Call] = []
    for call in folded.calls:
        if call is source:
            call = replace(call, outs=(*(call.outs[k] for k in kept), *(names[v] for v in more)))
        elif call.segment in places:
            at = places[call.segment]
            call = replace(call, args=(*call.args[:at], *(names[v] for v in starts), *call.args[at + 1 :]))
        calls.append(call)
    return Folded(segments, tuple(calls), folded.joint)


def _chain(
    graph: Graph, value: str, table: Mapping[str, RuleFn]
) -> tuple[tuple[Node, ...], tuple[str, ...]] | None:
    """(elementwise nodes that make a value, small values that they start from); None if there are none."""
    types, makers = graph.types(), {o: n for n in graph.nodes for o in n.outs}
    limit = types[value].nbytes / _LARGER
    wanted, inside, starts = [value], set[str](), dict[str, None]()
    while wanted:
        each = wanted.pop()
        node = makers.get(each)
        if spread(types[each], types[value]) <= limit:
            starts[each] = None
        elif node is None or not _elementwise(node, types, table):
            return None
        elif node.name not in inside:
            inside.add(node.name)
            wanted += refs_of(node)
    if not starts or sum(spread(types[v], types[value]) for v in starts) > limit:
        return None
    return tuple(n for n in graph.nodes if n.name in inside), tuple(starts)


def _elementwise(node: Node, types: Mapping[str, TensorType], table: Mapping[str, RuleFn]) -> bool:
    fn, refs = table.get(node.op), list(refs_of(node))
    if fn is None or not refs or len(node.outs) > 1:
        return False
    rule = fn(node, [types[r] for r in refs])
    return rule.kind in ("pointwise", "view") and not rule.fixed and not rule.reduce


def _in_main(
    graph: Graph, call: Call, starts: Sequence[str], taken: set[str]
) -> tuple[dict[str, str], list[str]]:
    """(what small values are called in main, those that the segment hands on from now on)."""
    inputs = [n for n, _ in graph.inputs]
    names: dict[str, str] = {}
    more: list[str] = []
    for value in starts:
        if value in inputs:
            names[value] = call.args[inputs.index(value)]
        elif value in graph.outputs:
            names[value] = call.outs[graph.outputs.index(value)]
        else:
            names[value] = fresh(value, taken, "own")
            more.append(value)
    return names, more


def _making(
    graph: Graph,
    place: int,
    nodes: Sequence[Node],
    starts: Sequence[str],
    types: Mapping[str, TensorType],
    taken: set[str],
) -> Graph:
    """A segment that makes what it was given as its input number ``place``."""
    inner = {v: fresh(v, taken, "own") for v in starts}
    inner |= {o: fresh(o, taken, "own") for n in nodes for o in n.outs}
    given = graph.inputs[place][0]
    backward = graph.nodes[0].backward if graph.nodes else False
    own = tuple(replace(n, backward=backward) for n in renamed(nodes, inner))
    inputs = (
        *graph.inputs[:place],
        *((inner[v], types[v]) for v in starts),
        *graph.inputs[place + 1 :],
    )
    new = inner[nodes[-1].name]
    outputs = tuple(new if o == given else o for o in graph.outputs)
    return replace(graph, inputs=inputs, nodes=(*own, *renamed(graph.nodes, {given: new})), outputs=outputs)
