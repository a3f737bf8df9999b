"""Orders of elimination of a pairwise network, found greedily.

How large the tables of an elimination become depends on its order alone. Variables with a single neighbour
go first; then those that add least fill (edges between neighbours that were none), each edge counted by the
states of its ends, or those that have the smallest table.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import log, prod

#: above this many variables in the core, and above this degree, fill edges are not counted
_FILL_CORE = 1500
_FILL_DEGREE = 48
#: tables of this many entries and more are all the same
_HUGE = 10**18
#: a logarithm of states is counted in steps of this size: integers add up alike in any order
_STEP = 1e-3
#: entries of an order's tables, for every variable, up to which finding another takes longer than it saves
_ENOUGH = 5_000
#: tables of a network that is much like another may be so much larger in all
_LARGER = 1.1
#: a table takes no more than this part of the entries that are left for all
_SHARE = 8


@dataclass(frozen=True)
class Order:
    """In which order to eliminate, and what that takes.

    variables: first to last. later: per variable, its neighbours when it goes, in order. width: most of
    them. largest, total: entries of the largest table and of all.
    """

    variables: tuple[int, ...]
    later: tuple[tuple[int, ...], ...]
    width: int
    largest: int
    total: int


@dataclass(frozen=True)
class _Rule:
    """Who goes first of those with more than one neighbour.

    power: of the logarithm of its states, by which a variable counts in the fill between it and another; None
    where tables alone decide.
    """

    power: int | None

    def weights(self, sizes: Sequence[int]) -> list[int]:
        if self.power is None:
            return []
        weights = {size: round(log(size) ** self.power / _STEP) if size > 1 else 0 for size in set(sizes)}
        return [weights[size] for size in sizes]


#: an edge makes tables larger by the product of the states of its ends
_BY_FILL = _Rule(1)
_RULES = (_BY_FILL, _Rule(2), _Rule(None))


def find_order(sizes: Sequence[int], neighbours: Sequence[Collection[int]]) -> Order:
    """A greedy order: who has at most one neighbour goes first, which is safe; then who adds least fill."""
    best = _best(sizes, neighbours, 0, 0)
    assert best is not None
    return best


def find_small_order(
    sizes: Sequence[int], neighbours: Sequence[Collection[int]], largest: int, total: int
) -> Order | None:
    """A greedy order with no table larger than ``largest`` and no more than ``total`` entries in all; None if
    no way to choose gives one."""
    return _best(sizes, neighbours, largest, total)


def _best(
    sizes: Sequence[int], neighbours: Sequence[Collection[int]], largest: int, total: int
) -> Order | None:
    """The order with fewest entries by any of the rules, as long as looking for another is worth it.

    largest, total: entries of a table and of all that there may be, both 0 for no limit; without one, no
    other order may have a larger table than the first.
    """
    best: Order | None = None
    for rule in _RULES:
        if best is None:
            best = _greedy(sizes, neighbours, rule, most=largest, total=total)
            continue
        if best.total <= _ENOUGH * len(sizes):
            break
        other = _greedy(sizes, neighbours, rule, most=largest or best.largest, total=best.total)
        if other is not None:
            best = min(best, other, key=lambda order: (order.total, order.largest))
    return best


class Familiar:
    """Orders of networks that are much alike, as those of one problem at other prices are.

    What served one of them serves the next, unless its tables are larger there. Variables go by numbers that
    all of them share.
    """

    def __init__(self) -> None:
        self._sequence: tuple[int, ...] = ()
        self._total = 0

    def order(
        self, numbers: Sequence[int], sizes: Sequence[int], neighbours: Sequence[Collection[int]]
    ) -> Order:
        """An order of a network, found anew if need be. numbers: of its variables."""
        order = self._along(numbers, sizes, neighbours)
        if order is None:
            order = find_order(sizes, neighbours)
            self._sequence, self._total = tuple([numbers[v] for v in order.variables]), order.total
        return order

    def _along(
        self, numbers: Sequence[int], sizes: Sequence[int], neighbours: Sequence[Collection[int]]
    ) -> Order | None:
        """As before; None if other variables are tied by now, or tables become larger."""
        at = {number: position for position, number in enumerate(self._sequence)}
        if any(near and number not in at for number, near in zip(numbers, neighbours, strict=True)):
            return None
        variables = sorted(range(len(numbers)), key=lambda v: at.get(numbers[v], -1))
        graph = [set(n) for n in neighbours]
        around: list[set[int]] = [set()] * len(graph)
        limit = max(_LARGER * self._total, _ENOUGH * len(graph))
        for v in variables:
            around[v] = graph[v]
            limit -= sizes[v] * prod([sizes[w] for w in graph[v]])
            if limit < 0:
                return None
            _remove(v, graph, wide=False)
        return _finish(sizes, variables, around)


def order_beside(
    order: Order,
    sizes: Sequence[int],
    neighbours: Sequence[Collection[int]],
    eagerness: Sequence[float],
    largest: int,
    total: int,
) -> tuple[Order, tuple[int, ...]]:
    """The same order with some variables held in one state, so that tables stay within the limits; and these.

    Where a table would be too large, that of its variables is held which has most neighbours left, each
    counted with its ``eagerness``: what is held ties nothing together. The held come first.
    """
    graph = [set(n) for n in neighbours]
    held: dict[int, None] = {}
    around: list[set[int]] = [set()] * len(graph)
    budget = total
    for v in order.variables:
        while v not in held:
            near = graph[v]
            table = sizes[v] * prod([sizes[w] for w in near])
            if near and table > min(largest, budget // _SHARE):
                most = max((v, *near), key=lambda w: (len(graph[w]) * eagerness[w], w))
                held[most] = None
                for w in graph[most]:
                    graph[w].discard(most)
                graph[most] = set()
                continue
            budget -= table
            around[v] = near
            for w in near:
                graph[w] |= near
                graph[w] -= {v, w}
            break
    left = [1 if v in held else size for v, size in enumerate(sizes)]
    # some went before what they were tied to was held
    around = [{w for w in near if w not in held} if near else near for near in around]
    return _finish(left, [*held, *[v for v in order.variables if v not in held]], around), tuple(held)


def _greedy(
    sizes: Sequence[int],
    neighbours: Sequence[Collection[int]],
    rule: _Rule,
    *,
    most: int = 0,
    total: int = 0,
) -> Order | None:
    """most, total: entries of a table and of all beyond which there is no order, both 0 for no limit."""
    graph = [set(n) for n in neighbours]
    # most variables are alone by now: they come first, in order, as they would out of the heap
    variables = [v for v, n in enumerate(graph) if not n]
    if most and max((sizes[v] for v in variables), default=0) > most:
        return None
    left = total - sum([sizes[v] for v in variables])
    if most and left < 0:
        return None
    scores: dict[int, tuple[int, int, int]] = {v: (len(n), 0, v) for v, n in enumerate(graph) if len(n) == 1}
    heap = list(scores.values())
    heapq.heapify(heap)
    weights = rule.weights(sizes)
    core_scored = False
    gone = [not n for n in graph]
    around: list[set[int]] = [set()] * len(graph)
    while len(variables) < len(graph):
        if not heap:
            assert not core_scored
            core = [v for v in range(len(graph)) if not gone[v]]
            if len(core) > _FILL_CORE:
                weights = []
            core_scored = True
            scores = {v: _score(v, graph, sizes, weights) for v in core}
            heap = list(scores.values())
            heapq.heapify(heap)
        score = heapq.heappop(heap)
        v = score[2]
        if gone[v] or scores.get(v) != score:
            continue
        if most:
            table = sizes[v] * prod([sizes[w] for w in graph[v]])
            left -= table
            if table > most or left < 0:
                return None
        gone[v] = True
        variables.append(v)
        around[v] = graph[v]
        for changed in _remove(v, graph, wide=core_scored and bool(weights)):
            if core_scored:
                new = _score(changed, graph, sizes, weights)
            elif len(graph[changed]) <= 1:
                new = (len(graph[changed]), 0, changed)
            else:
                scores.pop(changed, None)
                continue
            if scores.get(changed) != new:
                scores[changed] = new
                heapq.heappush(heap, new)
    return _finish(sizes, variables, around)


def _score(v: int, graph: list[set[int]], sizes: Sequence[int], weights: list[int]) -> tuple[int, int, int]:
    """weights: by which variables count in fill, none where tables decide."""
    near = graph[v]
    degree = len(near)
    if degree <= 1:
        return (degree - 2, 0, v)
    if degree > _FILL_DEGREE:
        # as if none of them were neighbours of each other
        return (sum([weights[w] for w in near]) ** 2 if weights else _HUGE + degree, 0, v)
    table = min(prod([sizes[w] for w in near]) * sizes[v], _HUGE)
    if not weights:
        return (table, 0, v)
    # of every ordered pair of neighbours that have no edge yet
    missing = sum([weights[w] * (sum([weights[u] for u in near - graph[w]]) - weights[w]) for w in near])
    return (missing, table, v)


def _remove(v: int, graph: list[set[int]], *, wide: bool) -> list[int]:
    """Take v out and join its neighbours; the variables whose score may have changed."""
    joined = graph[v]
    near = sorted(joined)
    wide = wide and 2 <= len(near) <= _FILL_DEGREE
    new = [(w, b) for w in near for b in joined - graph[w] if b > w] if wide else []
    for w in near:
        graph[w] |= joined
        graph[w] -= {v, w}
    if not wide:
        return near
    if any(len(graph[w]) > _FILL_DEGREE for w in near):
        return sorted(set(near).union(*(graph[w] for w in near if len(graph[w]) <= _FILL_DEGREE)))
    # of the others, only those that see both ends of a new edge have a pair less to join
    return sorted(set(near).union(*(graph[a] & graph[b] for a, b in new))) if new else near


def _finish(sizes: Sequence[int], variables: list[int], around: list[set[int]]) -> Order:
    at = [0] * len(variables)
    for position, v in enumerate(variables):
        at[v] = position
    later = tuple([tuple(sorted(n, key=at.__getitem__)) if n else () for n in around])
    tables = [sizes[v] * prod([sizes[w] for w in n]) for v, n in enumerate(later)]
    width = max((len(n) for n in later), default=0)
    return Order(tuple(variables), later, width, max(tables, default=0), sum(tables))
