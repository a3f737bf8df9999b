"""Minimum cuts of directed graphs: shortest augmenting paths, found per level (Dinitz, 1970)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

N = TypeVar("N", bound=Hashable)


def near_sink(edges: Sequence[tuple[N, N, int | None]], source: N, sink: N) -> frozenset[N]:
    """The nodes on the sink's side of the minimum cut that is nearest to the sink, ``sink`` among them.

    edges: (from, to, capacity), capacity None for one that must not be cut. Which nodes these are does not
    depend on the order of the edges. Raises ValueError if every cut has an edge that must not be cut. Time at
    most nodes^2 * edges, in practice a few passes.
    """
    number: dict[N, int] = {source: 0, sink: 1}
    most = 1 + sum(c for _, _, c in edges if c is not None)
    ends: list[int] = []  # of the arcs; the reverse of arc k is k ^ 1
    room: list[int] = []
    out: list[list[int]] = [[], []]
    for tail, head, capacity in edges:
        for node in (tail, head):
            if number.setdefault(node, len(out)) == len(out):
                out.append([])
        out[number[tail]].append(len(ends))
        out[number[head]].append(len(ends) + 1)
        ends += (number[head], number[tail])
        room += (most if capacity is None else capacity, 0)
    total = 0
    while True:
        left = _distances(ends, room, out)
        if left[0] < 0:
            return frozenset(node for node, k in number.items() if left[k] >= 0)
        total += _saturate(ends, room, out, left)
        if total >= most:
            raise ValueError("no cut without an edge that must not be cut")


def _distances(ends: Sequence[int], room: Sequence[int], out: Sequence[Sequence[int]]) -> list[int]:
    """Per node, arcs with room on the shortest way to the sink (node 1), or -1."""
    left = [-1] * len(out)
    left[1] = 0
    waiting = [1]
    for node in waiting:
        for arc in out[node]:
            before = ends[arc]
            if left[before] < 0 and room[arc ^ 1] > 0:
                left[before] = left[node] + 1
                waiting.append(before)
    return left


def _saturate(ends: Sequence[int], room: list[int], out: Sequence[Sequence[int]], left: Sequence[int]) -> int:
    """Send along shortest ways from node 0 to node 1 until each is full; how much was sent."""
    tried = [0] * len(out)
    path: list[int] = []
    node, sent = 0, 0
    while True:
        if node == 1:
            amount = min(room[arc] for arc in path)
            sent += amount
            for arc in path:
                room[arc] -= amount
                room[arc ^ 1] += amount
            path, node = [], 0
        while tried[node] < len(out[node]):
            arc = out[node][tried[node]]
            if room[arc] > 0 and left[ends[arc]] == left[node] - 1:
                break
            tried[node] += 1
        else:
            if not path:
                return sent
            node = ends[path.pop() ^ 1]
            tried[node] += 1
            continue
        path.append(arc)
        node = ends[arc]
