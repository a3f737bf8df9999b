"""Exact minimisation by variable elimination over min-plus tables.

Bucket elimination (Dechter 1999): variables go one after the other; a variable's table over its later
neighbours is minimised over the variable and becomes a table of the earliest of them. Read backwards, the
tables give the optimal states. A second pass down the same tree of buckets gives min-marginals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Protocol, TypeAlias

import numpy as np

from autoshard.solver.elimination_order import Order
from autoshard.solver.network import Array

#: a table over variables in order of elimination
Factor: TypeAlias = tuple[tuple[int, ...], Array]

#: larger tables are minimised piece by piece: less memory, and the pieces stay in the cache
_CHUNK = 500_000
#: larger sums are added to in place
_IN_PLACE = 10_000
#: what parts of a bucket are sorted by: the last of their axes
_axes: Callable[[tuple[int, Array]], int] = itemgetter(0)


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
        marginals: list[Array] = [np.empty(0)] * len(self.order.later)
        for v, belief, _ in self.calibrate(unary):
            marginals[v] = belief.reshape(len(belief), -1).min(axis=1)
        return marginals


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
    domain = {w: table.shape[1] for w, table in edges.items()}
    for scope, table in higher:
        domain.update(zip(scope[1:], table.shape[1:], strict=True))
    cells = len(unary) * prod(domain.values())
    if cells <= _CHUNK:
        return np.asarray(np.minimum.reduce(bucket(v, near, unary, edges, higher)))
    sizes = [domain[w] for w in near]
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

    def over(self, scope: tuple[int, ...]) -> Array:
        """Minimised over the variables that are not wanted; those below often want the same."""
        if len(scope) == len(self.scope):
            return self.table
        message = self.known.get(scope)
        if message is None:
            inside = set(scope)
            apart = tuple(a for a, w in enumerate(self.scope) if w not in inside)
            message = self.known[scope] = np.asarray(self.table.min(axis=apart))
        return message
