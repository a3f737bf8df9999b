"""The least costs of many networks with the same states and edges, in one elimination.

As in `search.eliminate`, each table with the networks as its last dim: small tables cost what numpy's calls
cost, whatever is in them. Numbers are of single precision, which halves the time of large ones; what is found
is lowered by more than their rounding can add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from autoshard.search.network import Array
from autoshard.search.order import Order

#: bytes of a number, and what n sums of positive numbers may be wrong by: n times this share
SINGLE, _ROUNDING = np.float32, 2.0**-23
#: numbers that are added up at once; more go state by state of a variable, which stays in the cache
_SMALL = 1_000_000


def least_of_each(unary: Sequence[Array], edges: Mapping[tuple[int, int], Array], order: Order) -> Array:
    """What no assignment of each network goes below, [networks]; inf where everything is forbidden.

    Costs are zero or more, and in single precision. unary: of every variable, [states, networks]. edges:
    [states of u, states of v, networks], or with 1 in place of networks where they are the same in all.
    order: of variables with two states or more, as neighbours by these edges.
    """
    costs = list(unary)
    rows: list[dict[int, Array]] = [{} for _ in costs]
    for (u, v), table in edges.items():
        if len(table) == 1:
            costs[v] = costs[v] + table[0]
        elif table.shape[1] == 1:
            costs[u] = costs[u] + table[:, 0]
        else:
            rows[u][v], rows[v][u] = table, table.swapaxes(0, 1)
    tables: list[list[tuple[tuple[int, ...], Array]]] = [[] for _ in costs]
    for v, later in enumerate(order.later):
        tables[v] = [((w,), rows[v][w]) for w in later if w in rows[v]]
    value = np.zeros(costs[0].shape[1]) if costs else np.zeros(0)  # in double precision
    for v in order.variables:
        near = order.later[v]
        if not near:
            value = value + costs[v].min(axis=0)
            continue
        parts = [_spread(table, scope, near) for scope, table in tables[v]]
        message = _message(costs[v].reshape(len(costs[v]), *(1,) * len(near), -1), parts)
        tables[v].clear()
        if len(near) == 1:
            costs[near[0]] = costs[near[0]] + message
        else:
            tables[near[0]].append((near[1:], message))
    # as many numbers as there are variables and edges are added up
    return np.asarray(value * (1 - _ROUNDING * (len(costs) + len(edges))))


def _message(total: Array, parts: Sequence[Array]) -> Array:
    """The least over the first dim of the sum of all."""
    # what is alike along more dims goes first
    parts = sorted(parts, key=lambda part: part.size)
    shape = np.broadcast_shapes(*(part.shape[1:] for part in (total, *parts)))
    if len(total) * prod(shape) <= _SMALL:
        for part in parts:
            total = total + part
        return np.asarray(total.min(axis=0))
    least, made = np.empty(shape, total.dtype), np.empty(shape, total.dtype)
    for state in range(len(total)):
        into = made if state else least
        before = total[state]
        for part in parts[:-1]:
            before = before + part[state]
        np.add(before, parts[-1][state], out=into)
        if state:
            np.minimum(least, made, out=least)
    return least


def _spread(table: Array, scope: tuple[int, ...], near: tuple[int, ...]) -> Array:
    """A table over (v, *scope) as one over (v, *near)."""
    sizes = dict(zip(scope, table.shape[1:-1], strict=True))
    return table.reshape(len(table), *(sizes.get(w, 1) for w in near), table.shape[-1])
