"""The fewest bytes from which a part of a segment can be recomputed without its dear ops.

A value is kept, or made again from what its op takes. Values that dear ops make cannot be made again, so
what is kept separates them, and the segment's inputs, from what is wanted: the cheapest such set is a
minimum cut of the graph of values, each with its bytes as capacity (Ford and Fulkerson, 1956; used in the
same way for recomputation by Jain et al., "Checkmate", MLSys 2020, and by torch's min-cut partitioner).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

from autoshard.ir import Graph, refs_of
from autoshard.ir.min_cut import near_sink

#: a value where it is made, or where it is read; an edge between the two is what keeping it cuts
_End: TypeAlias = tuple[str, str]
_SOURCE, _SINK = ("", "source"), ("", "sink")


def keep_least(
    graph: Graph,
    wanted: Collection[str],
    dear: Collection[str],
    never: Collection[str],
    nbytes: Mapping[str, int],
) -> frozenset[str]:
    """The values to keep, inputs of the graph among them; of equally good sets the one nearest to ``wanted``.

    wanted: values that are needed later. dear: values that must not be made again. never: values that are
    not kept themselves (views, which are free). nbytes: of every value that may be kept; 0 for one that is
    there anyway. An input can only be kept, and must not be in ``never``.
    """
    makers = {out: node for node in graph.nodes for out in node.outs}
    waiting, seen = list(wanted), set(wanted)
    edges: list[tuple[_End, _End, int | None]] = [((value, "out"), _SINK, None) for value in wanted]
    while waiting:
        value = waiting.pop()
        edges.append(((value, "in"), (value, "out"), None if value in never else nbytes[value]))
        if value not in makers or value in dear:
            edges.append((_SOURCE, (value, "in"), None))
            continue
        for source in refs_of(makers[value]):
            edges.append(((source, "out"), (value, "in"), None))
            if source not in seen:
                seen.add(source)
                waiting.append(source)
    near = near_sink(edges, _SOURCE, _SINK)
    return frozenset(v for v in seen if (v, "out") in near and (v, "in") not in near)
