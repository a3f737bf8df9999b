"""Exact minimisation by variable elimination over min-plus tables.

Bucket elimination (Dechter 1999): variables go one after the other; a variable's table over its later
neighbours is minimised over the variable and becomes a table of the earliest of them. Read backwards, the
tables give the optimal states. A second pass down the same tree of buckets gives min-marginals.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Protocol, TypeAlias

import numpy as np

from autoshard.search.network import Array

#: a table over variables in order of elimination
Factor: TypeAlias = tuple[tuple[int, ...], Array]

#: larger tables are minimised piece by piece: less memory, and the pieces stay in the cache
_CHUNK = 500_000
#: larger sums are added to in place
_IN_PLACE = 10_000
#: what parts of a bucket are sorted by: the last of their axes
_axes: Callable[[tuple[int, Array]], int] = itemgetter(0)
#: above this many variables in the core, and above this degree, fill edges are not counted
_FILL_CORE = 1500
_FILL_DEGREE = 48
#: tables of this many entries and more are all the same
_HUGE = 10**18


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


def find_order(sizes: Sequence[int], neighbours: Sequence[Collection[int]]) -> Order:
    """A greedy order: who has at most two neighbours goes first, which is safe; then who adds least fill."""
    first = _greedy(sizes, neighbours, by_fill=True)
    assert first is not None
    if first.largest <= 100_000:
        return first
    other = _greedy(sizes, neighbours, by_fill=False)
    assert other is not None
    return min(first, other, key=lambda order: (order.total, order.largest))


def find_small_order(
    sizes: Sequence[int], neighbours: Sequence[Collection[int]], largest: int, total: int
) -> Order | None:
    """A greedy order with no table larger than ``largest`` and no more than ``total`` entries in all; None if
    neither way to choose gives one."""
    for by_fill in (True, False):
        found = _greedy(sizes, neighbours, by_fill=by_fill, most=largest, total=total)
        if found is not None:
            return found
    return None


def _greedy(
    sizes: Sequence[int],
    neighbours: Sequence[Collection[int]],
    *,
    by_fill: bool,
    most: int = 0,
    total: int = 0,
) -> Order | None:
    """most, total: entries of a table and of all beyond which there is no order, both 0 for no limit."""
    graph = [set(n) for n in neighbours]
    # most variables are alone by now: they come first, in order, as they would out of the heap
    variables = [v for v, n in enumerate(graph) if not n]
    if most and max((sizes[v] for v in variables), default=0) > most:
        return None
    room = total - sum([sizes[v] for v in variables])
    if most and room < 0:
        return None
    scores: dict[int, tuple[int, int, int]] = {
        v: (len(n), 0, v) for v, n in enumerate(graph) if 1 <= len(n) <= 2
    }
    heap = list(scores.values())
    heapq.heapify(heap)
    core_scored = False
    gone = [not n for n in graph]
    around: list[set[int]] = [set()] * len(graph)
    while len(variables) < len(graph):
        if not heap:
            assert not core_scored
            core = [v for v in range(len(graph)) if not gone[v]]
            by_fill = by_fill and len(core) <= _FILL_CORE
            core_scored = True
            scores = {v: _score(v, graph, sizes, by_fill) for v in core}
            heap = list(scores.values())
            heapq.heapify(heap)
        score = heapq.heappop(heap)
        v = score[2]
        if gone[v] or scores.get(v) != score:
            continue
        if most:
            table = sizes[v] * prod([sizes[w] for w in graph[v]])
            room -= table
            if table > most or room < 0:
                return None
        gone[v] = True
        variables.append(v)
        around[v] = graph[v]
        for changed in _remove(v, graph, wide=core_scored and by_fill):
            if core_scored:
                new = _score(changed, graph, sizes, by_fill)
            elif len(graph[changed]) <= 2:
                new = (len(graph[changed]), 0, changed)
            else:
                scores.pop(changed, None)
                continue
            if scores.get(changed) != new:
                scores[changed] = new
                heapq.heappush(heap, new)
    return _finish(sizes, variables, around)


def _score(v: int, graph: list[set[int]], sizes: Sequence[int], by_fill: bool) -> tuple[int, int, int]:
    near = graph[v]
    degree = len(near)
    if degree <= 2:
        return (degree - 3, 0, v)
    if degree > _FILL_DEGREE:
        return (degree * degree if by_fill else _HUGE + degree, 0, v)
    table = min(prod([sizes[w] for w in near]) * sizes[v], _HUGE)
    if not by_fill:
        return (table, 0, v)
    missing = sum([degree - 1 - len(near & graph[w]) for w in near]) // 2
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


@dataclass(frozen=True)
class Tables:
    """What the buckets hold after the pass up: per variable v, costs over (v, *order.later[v]).

    unary: [k_v]. edges: w -> [k_v, k_w]. higher: tables over three and more variables, v first.
    messages: of buckets with more than two later neighbours, minimised over v. value: the least total cost.
    """

    unary: list[Array]
    edges: list[dict[int, Array]]
    higher: list[list[Factor]]
    messages: dict[int, Array]
    value: float

    @property
    def is_finite(self) -> bool:
        """Whether nothing is forbidden, of what was given or came of it."""
        given = [a.ravel() for a in self.unary]
        given += [table.ravel() for row in self.edges for table in row.values()]
        return not given or bool(np.isfinite(np.concatenate(given)).all())


class Pairwise(Protocol):
    """Costs of n variables: alone [k_i], and with each neighbour, rows[i][j] as [k_i, k_j], both ways."""

    unary: list[Array]
    rows: list[dict[int, Array]]


class Elimination:
    """A network with its order of elimination, to be minimised for one or many unary costs."""

    def __init__(self, net: Pairwise, order: Order) -> None:
        self.order = order
        self._unary = net.unary
        self.edges: list[dict[int, Array]] = [
            {w: net.rows[v][w] for w in later if w in net.rows[v]} for v, later in enumerate(self.order.later)
        ]

    def sweep(self, unary: Sequence[Array] | None = None) -> Tables:
        """The pass up: every bucket summed, minimised over its variable and handed on."""
        costs = list(self._unary if unary is None else unary)
        edges = [dict(e) for e in self.edges]
        higher: list[list[Factor]] = [[] for _ in costs]
        messages: dict[int, Array] = {}
        value = 0.0
        smallest = np.minimum.reduce
        later = self.order.later
        for v in self.order.variables:
            near = later[v]
            if not near:
                value += costs[v].item() if len(costs[v]) == 1 else float(costs[v].min())
            elif len(near) == 1:
                costs[near[0]] = costs[near[0]] + smallest(edges[v][near[0]] + costs[v][:, None])
            else:
                message = _message(v, near, costs[v], edges[v], higher[v])
                if len(near) > 2:
                    higher[near[0]].append((near, message))
                    messages[v] = message
                else:
                    there = edges[near[0]]
                    there[near[1]] = there[near[1]] + message if near[1] in there else message
        return Tables(costs, edges, higher, messages, value)

    def solve(self, unary: Sequence[Array] | None = None) -> tuple[float, list[int]]:
        """The least total cost and its states; of equal states the lowest. Infinite cost if there is none."""
        tables = self.sweep(unary)
        states = [0] * len(tables.unary)
        for v in reversed(self.order.variables):
            cost = tables.unary[v]
            if len(cost) == 1:
                continue  # the only state there is
            for w, table in tables.edges[v].items():
                cost = cost + table[:, states[w]]
            for scope, high in tables.higher[v]:
                cost = cost + column(high, [states[w] for w in scope[1:]])
            states[v] = int(cost.argmin())
        return tables.value, states

    def calibrate(self, unary: Sequence[Array] | None = None) -> Iterator[tuple[int, Array, Array]]:
        """The pass down. Yields, from the last variable to the first, (v, belief, up).

        belief: [k_v, *later]: the least total cost of any assignment that agrees with the entry.
        up: [*later]: the least cost of everything below the bucket.
        """
        tables = self.sweep(unary)
        order, possible = self.order, tables.is_finite
        children = [0] * len(order.later)
        for near in order.later:
            if near:
                children[near[0]] += 1
        beliefs: dict[int, _Belief] = {}
        for v in reversed(order.variables):
            near = order.later[v]
            only = tables.unary[v]
            if not near and not children[v] and len(only) == 1 and only[0] < np.inf:
                # decided, and alone: many are where states were taken away
                yield v, only + (tables.value - only), np.asarray(only[0])
                continue
            if near or tables.edges[v] or tables.higher[v]:
                inside = bucket(v, near, tables.unary[v], tables.edges[v], tables.higher[v])
            else:
                inside = tables.unary[v]
            up = tables.messages[v] if v in tables.messages else np.asarray(inside.min(axis=0))
            if near:
                parent = near[0]
                outer = beliefs[parent].over(near)
                children[parent] -= 1
                if not children[parent]:
                    del beliefs[parent]
            else:
                outer = np.asarray(tables.value)
            if possible:
                rest = outer - up
            else:
                with np.errstate(invalid="ignore"):
                    # where nothing below is possible (inf - inf) nothing is possible at all
                    rest = np.where(np.isfinite(up), outer - up, np.inf)
            # a bucket with neighbours was summed for this alone
            belief = np.add(inside, rest, out=inside) if near else inside + rest
            if children[v]:
                beliefs[v] = _Belief((v, *near), belief, {})
            yield v, belief, up

    def marginals(self, unary: Sequence[Array] | None = None) -> list[Array]:
        """Per variable and state, the least total cost of any assignment that has it. [k_v] each."""
        found: list[Array] = [np.empty(0)] * len(self.order.later)
        for v, belief, _ in self.calibrate(unary):
            found[v] = belief.reshape(len(belief), -1).min(axis=1)
        return found


def bucket(
    v: int, near: tuple[int, ...], unary: Array, edges: dict[int, Array], higher: list[Factor]
) -> Array:
    """The sum of a bucket's costs, [k_v, *near]."""
    rank = len(near) + 1
    axis = {w: a for a, w in enumerate(near, 1)}
    parts = [(axis[w], _spread(table, (0, axis[w]), rank)) for w, table in edges.items()]
    for scope, table in higher:
        axes = (0, *[axis[w] for w in scope[1:]])
        parts.append((axes[-1], _spread(table, axes, rank)))
    # the fewest axes first, so that only the last sums are as large as the result
    parts.sort(key=_axes)
    total = unary.reshape(-1, *(1,) * len(near))
    own = False
    for _, part in parts:
        # a new array is made faster than small ones are compared
        if (
            own
            and total.size > _IN_PLACE
            and all(n in (1, m) for n, m in zip(part.shape, total.shape, strict=True))
        ):
            np.add(total, part, out=total)
        else:
            total, own = total + part, True
    return total


def column(table: Array, states: Sequence[int]) -> Array:
    """The entries for every state of the first variable, the states of the others being given. [k]"""
    index: tuple[slice | int, ...] = (slice(None), *states)
    return np.asarray(table[index])


def _message(
    v: int, near: tuple[int, ...], unary: Array, edges: dict[int, Array], higher: list[Factor]
) -> Array:
    """The bucket minimised over its variable, [*near]; in slices of the first neighbour where it is large."""
    if not higher and len(near) == len(edges) == 2:
        first, second = edges[near[0]], edges[near[1]]
        if first.size * second.shape[1] <= _CHUNK:
            pair = (unary[:, None] + first)[:, :, None] + second[:, None, :]
            return np.asarray(np.minimum.reduce(pair))
    known = {w: table.shape[1] for w, table in edges.items()}
    for scope, table in higher:
        known.update(zip(scope[1:], table.shape[1:], strict=True))
    cells = len(unary) * prod(known.values())
    if cells <= _CHUNK:
        return np.asarray(np.minimum.reduce(bucket(v, near, unary, edges, higher)))
    sizes = [known[w] for w in near]
    message = np.empty(sizes)
    step = max(1, _CHUNK * sizes[0] // cells)
    for at in range(0, sizes[0], step):
        part = slice(at, at + step)
        some = {w: table[:, part] if w == near[0] else table for w, table in edges.items()}
        most = [(scope, _slice(table, scope, near[0], part)) for scope, table in higher]
        np.minimum.reduce(bucket(v, near, unary, some, most), out=message[part])
    return message


def _slice(table: Array, scope: tuple[int, ...], variable: int, part: slice) -> Array:
    index = tuple(part if w == variable else slice(None) for w in scope)
    return np.asarray(table[index])


def _spread(table: Array, axes: tuple[int, ...], rank: int) -> Array:
    """A view with the table's axes at these places among ``rank``."""
    shape = [1] * rank
    for a, size in zip(axes, table.shape, strict=True):
        shape[a] = size
    return table.reshape(shape)


@dataclass(frozen=True)
class _Belief:
    """A bucket's belief, [*scope], as the buckets below ask for it: over some of its variables, in order."""

    scope: tuple[int, ...]
    table: Array
    known: dict[tuple[int, ...], Array]

    def over(self, wanted: tuple[int, ...]) -> Array:
        """Minimised over the variables that are not wanted; those below often want the same."""
        if len(wanted) == len(self.scope):
            return self.table
        found = self.known.get(wanted)
        if found is None:
            inside = set(wanted)
            apart = tuple(a for a, w in enumerate(self.scope) if w not in inside)
            found = self.known[wanted] = np.asarray(self.table.min(axis=apart))
        return found
