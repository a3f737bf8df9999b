"""Minimum cuts equal those of networkx."""

from __future__ import annotations

import random

import networkx as nx
import pytest

from autoshard.ir.min_cut import near_sink


@pytest.mark.parametrize("nodes", [2, 5, 14])
def test_cuts_nearest_to_the_sink(nodes: int) -> None:
    drawn = random.Random(nodes)
    unbounded = 0
    for _ in range(300):
        edges: dict[tuple[int, int], int | None] = {}
        for _ in range(drawn.randint(1, 3 * nodes)):
            tail, head = drawn.sample(range(nodes), 2)
            edges[tail, head] = None if drawn.random() < 0.2 else drawn.randint(0, 9)
        graph = nx.DiGraph()
        graph.add_nodes_from((0, 1))
        for (tail, head), capacity in edges.items():
            graph.add_edge(tail, head, **({} if capacity is None else {"capacity": capacity}))
        given = [(tail, head, capacity) for (tail, head), capacity in edges.items()]
        try:
            _, expected = nx.minimum_cut(graph, 0, 1)[1]
        except nx.NetworkXUnbounded:
            unbounded += 1
            with pytest.raises(ValueError, match="no cut"):
                near_sink(given, 0, 1)
        else:
            assert near_sink(given, 0, 1) == expected
    assert 0 < unbounded < 300
