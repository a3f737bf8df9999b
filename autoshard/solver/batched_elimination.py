"""The least costs of many networks with the same states and edges, in one elimination.

As in `solver.eliminate`, each table with the networks as its last dim: small tables cost what
numpy's calls cost, whatever is in them. Numbers are of single precision, which halves the time of large ones;
what is found is lowered by more than their rounding can add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from operator import attrgetter

import numpy as np

from autoshard.solver.elimination_order import Order
from autoshard.solver.network import Array

#: bytes of a number, and what n sums of positive numbers may be wrong by: n times this share
SINGLE, _ROUNDING = np.float32, 2.0**-23
#: numbers that are added up at once; more go state by state of a variable, which stays in the cache
_SMALL = 500_000


def least_of_each(unary: Sequence[Array], edges: Mapping[tuple[int, int], Array], order: Order) -> Array:
    """What no assignment of each network goes below, [networks]; inf where everything is forbidden.

    Costs are zero or more, and in single precision. unary: of every variable, [states, networks]. edges:
    [states of u, states of v, networks], or with 1 in place of networks where they are the same in all.
    order: of variables with two states or more, as neighbours by these edges.
    """
    value = _Together(unary, edges, order).least_without(order.variables)
    # as many numbers as there are variables and edges are added up
    return np.asarray(value * (1 - _ROUNDING * (len(unary) + len(edges))))


class _Together:
    """Networks on the way of their elimination.

    costs: of every variable left, [states, networks]. tables: of every variable with those that it goes
    before: (their scope, [states, *scope, networks]).
    """

    def __init__(self, unary: Sequence[Array], edges: Mapping[tuple[int, int], Array], order: Order) -> None:
        self.order, self.costs = order, list(unary)
        rows: list[dict[int, Array]] = [{} for _ in unary]
        for (u, v), table in edges.items():
            if len(table) == 1:
                self.costs[v] = self.costs[v] + table[0]
            elif table.shape[1] == 1:
                self.costs[u] = self.costs[u] + table[:, 0]
            else:
                rows[u][v], rows[v][u] = table, table.swapaxes(0, 1)
        self.tables: list[list[tuple[tuple[int, ...], Array]]] = [
            [((w,), rows[v][w]) for w in later if w in rows[v]] for v, later in enumerate(order.later)
        ]

    def least_without(self, variables: Sequence[int]) -> Array:
        """Eliminate variables, the first of the order; what those cost that are tied to none, [networks]."""
        costs, tables, later = self.costs, self.tables, self.order.later
        networks = costs[0].shape[1] if costs else 0
        value = np.zeros(networks)  # in double precision
        for v in variables:
            near, own = later[v], costs[v]
            if not near:
                value = value + np.minimum.reduce(own)
                continue
            if len(near) == 1:
                # all tables are over these two
                total = own[:, None]
                for _, table in tables[v]:
                    total = total + table
                costs[near[0]] = costs[near[0]] + np.minimum.reduce(total)
            else:
                sizes = [len(costs[w]) for w in near]
                parts = [_spread(table, scope, near) for scope, table in tables[v]]
                message = _message(own.reshape(len(own), *(1,) * len(near), networks), parts, sizes)
                tables[near[0]].append((near[1:], message))
            tables[v].clear()
        return value


def _message(total: Array, parts: list[Array], sizes: Sequence[int]) -> Array:
    """The least over the first dim of the sum of all. sizes: of the others, but for the last one."""
    if len(parts) > 1:
        # what is alike along more dims goes first
        parts.sort(key=attrgetter("size"))
    if len(total) * prod(sizes) * total.shape[-1] <= _SMALL:
        for part in parts:
            total = total + part
        return np.asarray(np.minimum.reduce(total))
    shape = (*sizes, total.shape[-1])
    least, argmin = np.empty(shape, total.dtype), np.empty(shape, total.dtype)
    for state in range(len(total)):
        into = argmin if state else least
        before = total[state]
        for part in parts[:-1]:
            before = before + part[state]
        np.add(before, parts[-1][state], out=into)
        if state:
            np.minimum(least, argmin, out=least)
    return least


def _spread(table: Array, scope: tuple[int, ...], near: tuple[int, ...]) -> Array:
    """A table over (v, *scope) as one over (v, *near)."""
    if len(scope) == len(near):
        return table
    sizes = dict(zip(scope, table.shape[1:], strict=False))
    return table.reshape(len(table), *[sizes.get(w, 1) for w in near], table.shape[-1])
