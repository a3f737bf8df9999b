"""The fewest bytes from which a part of a segment can be computed again without its dear ops.

A value is kept, or made again from what its op takes. Values that dear ops make cannot be made again, so
what is kept separates them, and the segment's inputs, from what is wanted: the cheapest such set is a
minimum cut of the graph of values, each with its bytes as capacity (Ford and Fulkerson, 1956; used in the
same way for recomputation by Jain et al., "Checkmate", MLSys 2020, and by torch's min-cut partitioner).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from autoshard.ir import Graph, refs_of

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
    import networkx as nx

    makers = {out: node for node in graph.nodes for out in node.outs}
    flow = nx.DiGraph()
    flow.add_nodes_from((_SOURCE, _SINK))
    waiting, seen = list(wanted), set(wanted)
    for value in wanted:
        flow.add_edge((value, "out"), _SINK)
    while waiting:
        value = waiting.pop()
        # an edge without a capacity cannot be cut
        flow.add_edge(
            (value, "in"), (value, "out"), **({} if value in never else {"capacity": nbytes[value]})
        )
        if value not in makers or value in dear:
            flow.add_edge(_SOURCE, (value, "in"))
            continue
        for source in refs_of(makers[value]):
            flow.add_edge((source, "out"), (value, "in"))
            if source not in seen:
                seen.add(source)
                waiting.append(source)
    _, near_sink = nx.minimum_cut(flow, _SOURCE, _SINK)[1]
    return frozenset(v for v in seen if (v, "out") in near_sink and (v, "in") not in near_sink)
