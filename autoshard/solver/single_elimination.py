"""The least cost of a narrow network as it stands: one elimination, without pruning first.

Where the tables stay small, eliminating takes less than finding out which states are superfluous. What the
order of elimination depends on is the same for all networks of a problem, so it is found once for them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import inf, isnan

import numpy as np

from autoshard.solver.eliminate import Elimination
from autoshard.solver.elimination_order import Familiar, Order, find_small_order
from autoshard.solver.minimise import fits
from autoshard.solver.network import Array, CostNetwork, Limits

#: entries of all tables up to which pruning first takes longer
_ENTRIES = 4_000_000


class Orders:
    """Orders of elimination of whole networks, by all that they depend on; None if tables are too large."""

    def __init__(self) -> None:
        self._cache: dict[Hashable, Order | None] = {}
        self._familiar: dict[Hashable, Familiar] = {}

    def familiar(self, network: CostNetwork) -> Familiar:
        """Of what pruning leaves of networks with states like this one's."""
        return self._familiar.setdefault(tuple([len(u) for u in network.unary]), Familiar())

    def of(self, network: CostNetwork) -> Order | None:
        """The order for a network of these states and edges, variables with one state being no neighbours."""
        return self.along(tuple([len(u) for u in network.unary]), tuple(network.edges))

    def along(
        self, sizes: tuple[int, ...], edges: tuple[tuple[int, int], ...], most: int = _ENTRIES
    ) -> Order | None:
        """The same, by the number of states of every variable and the pairs that have an edge. most: entries
        of all tables."""
        key = (sizes, edges, most)
        if key not in self._cache:
            near: list[set[int]] = [set() for _ in sizes]
            for u, v in edges:
                if sizes[u] > 1 and sizes[v] > 1:
                    near[u].add(v)
                    near[v].add(u)
            self._cache[key] = find_small_order(sizes, near, most, most)
        return self._cache[key]


@dataclass(frozen=True)
class Direct:
    """cost: the least. states: of equal ones the lowest, from the variable that goes last to the first."""

    cost: float
    states: tuple[int, ...]
    order: Order


def least(network: CostNetwork, limits: Limits, orders: Orders) -> Direct | None:
    """The assignment of least seconds, which are infinite if none is allowed.

    None if tables would be too large, or the network is not sound.
    """
    order = _order(network, limits, orders)
    if order is None:
        return None
    with np.errstate(invalid="ignore"):
        value, states = Elimination(_Folded(network), order).solve()
    return Direct(value, tuple(states), order) if _is_cost(value) else None


def least_seconds(network: CostNetwork, limits: Limits, orders: Orders) -> float | None:
    """Of that assignment; or None, as there."""
    order = _order(network, limits, orders)
    if order is None:
        return None
    with np.errstate(invalid="ignore"):
        value = Elimination(_Folded(network), order).sweep().value
    return value if _is_cost(value) else None


def _order(network: CostNetwork, limits: Limits, orders: Orders) -> Order | None:
    order = orders.of(network) if _sound(network) else None
    return order if order is not None and fits(order, limits) else None


def _is_cost(value: float) -> bool:
    """One nan or -inf among the seconds makes the least of all one of these."""
    return not isnan(value) and value != -inf


def _sound(network: CostNetwork) -> bool:
    """Whether all bytes are finite and every variable has a state; else `solve` says what is wrong."""
    held = np.concatenate(network.memory) if network.memory else np.empty(0)
    return all(map(len, network.unary)) and bool(np.isfinite(held).all())


class _Folded:
    """A network whose variables with one state are part of their neighbours; rows as in `prune.Residual`."""

    def __init__(self, network: CostNetwork) -> None:
        self.unary: list[Array] = list(network.unary)
        self.rows: list[dict[int, Array]] = [{} for _ in self.unary]
        for (u, v), table in network.edges.items():
            if len(table) == 1:
                self.unary[v] = self.unary[v] + table[0]
            elif table.shape[1] == 1:
                self.unary[u] = self.unary[u] + table[:, 0]
            else:
                self.rows[u][v], self.rows[v][u] = table, table.T
