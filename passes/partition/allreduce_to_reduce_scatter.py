"""An all-reduce of which every rank keeps its part alone is a reduce-scatter.

Over a full axis of many ranks the two may cost the same, and the search takes either. Level by level, or
with fewer bits, the reduce-scatter sends half as much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autoshard.ir import Call, Node, refs_of
from autoshard.ir.collectives import ALL_REDUCE, REDUCE_SCATTER, SLICE
from autoshard.ir.lowered import Lowered, LoweredSegment
from autoshard.passes.rewrite import replaced_in, replaced_in_main


def keep_part(lowered: Lowered) -> Lowered:
    """The program with such pairs as one collective, where the slice stood."""
    segments = {name: _segment(s) for name, s in lowered.segments.items()}
    uses = Counter(r for i in lowered.main for r in (i.args if isinstance(i, Call) else refs_of(i)))
    new = _pairs([i for i in lowered.main if isinstance(i, Node)], uses + Counter(lowered.results))
    return replace(replaced_in_main(lowered, new), segments=segments)


def _segment(segment: LoweredSegment) -> LoweredSegment:
    graph = segment.graph
    uses = Counter(r for n in graph.nodes for r in refs_of(n)) + Counter(graph.outputs)
    return replaced_in(segment, _pairs(graph.nodes, uses))


def _pairs(nodes: Sequence[Node] | Collection[Node], uses: Mapping[str, int]) -> dict[str, Node | None]:
    """Name -> what stands in its place, None for nothing."""
    sums = {n.name: n for n in nodes if n.op == ALL_REDUCE.op and n.kwarg("op", "sum") == "sum"}
    result: dict[str, Node | None] = {}
    for node in nodes:
        source = next(refs_of(node), "")
        full = sums.get(source)
        if node.op == SLICE.op and full is not None and uses[source] == 1 and full.args[1] == node.args[1]:
            result[source] = None
            result[node.name] = replace(node, op=REDUCE_SCATTER.op, args=(full.args[0], *node.args[1:]))
    return result
