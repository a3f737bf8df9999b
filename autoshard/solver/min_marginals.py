"""What every other choice would cost: min-marginals of all states of all variables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.solver.eliminate import Elimination
from autoshard.solver.elimination_order import find_order
from autoshard.solver.minimise import minimise_pruned
from autoshard.solver.network import Array, CostNetwork, Indices, Limits, Marginals
from autoshard.solver.prune import Contradiction, Residual, fold_decided, make_consistent


def min_marginals(
    network: CostNetwork,
    lam: float = 0.0,
    limits: Limits | None = None,
    *,
    chosen: Sequence[int] | None = None,
) -> Marginals:
    """For every variable and state, the least seconds + lam * bytes of any assignment that has it.

    chosen: states of finite cost, of which one is changed at a time where the network is too wide for more
    (default: the best that are found).
    """
    limits = limits or Limits()
    net = Residual.of(network)
    try:
        make_consistent(net)
    except Contradiction:
        return Marginals([np.full(len(u), np.inf) for u in network.unary], exact=True)
    net = net.weighted(lam)
    fold_decided(net)
    order = find_order(net.sizes, net.rows)
    exact = order.total <= limits.down
    costs = Elimination(net, order).marginals() if exact else _local(net, limits, chosen)
    return Marginals(
        [_all_states(len(u), k, c) for u, k, c in zip(network.unary, net.kept, costs, strict=True)], exact
    )


def _local(net: Residual, limits: Limits, chosen: Sequence[int] | None) -> list[Array]:
    """Costs of changing one variable of the chosen assignment, or of the best one found."""
    if chosen is None:
        states = minimise_pruned(net, limits).states
        if states is None:
            return [np.full(len(u), np.inf) for u in net.unary]
    else:
        states = [int(np.flatnonzero(k == s)[0]) for k, s in zip(net.kept, chosen, strict=True)]
    total = sum(float(u[s]) for u, s in zip(net.unary, states, strict=True))
    around = []
    for i, u in enumerate(net.unary):
        cost = u
        for j, table in net.rows[i].items():
            cost = cost + table[:, states[j]]
            total += float(table[states[i], states[j]]) if i < j else 0.0
        around.append(cost)
    return [total + (cost - cost[s]) for cost, s in zip(around, states, strict=True)]


def _all_states(count: int, kept: Indices, costs: Array) -> Array:
    full = np.full(count, np.inf)
    full[kept] = costs
    return full
