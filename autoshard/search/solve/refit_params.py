"""Other strategies for the parameters, everything else as it is: so that an assignment fits the memory.

Parameters are not neighbours of each other in the network, so with everything else fixed each one chooses
alone, and a price per byte makes them choose leaner strategies together (Lagrangian duality, as in `budget`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.search.problem.decisions import ParamVar
from autoshard.search.problem.problem import Problem
from autoshard.solver.network import Array, CostNetwork

#: prices tried between all and nothing
_PRICES = 24


def refit(
    problem: Problem, network: CostNetwork, states: Sequence[int], budget: float
) -> tuple[int, ...] | None:
    """The fastest assignment found within the budget that only differs in parameters, or None."""
    numbers = [k for k, v in enumerate(problem.variables) if isinstance(v, ParamVar)]
    costs = _costs(network, states, numbers)
    rest = network.bytes_of(states) - sum(float(network.memory[k][states[k]]) for k in numbers)
    prices = np.array([0.0, *np.geomspace(1e-15, 1e-6, _PRICES)])
    chosen, held = np.empty((_PRICES + 2, len(numbers)), dtype=np.intp), np.full(_PRICES + 2, rest)
    for column, k in enumerate(numbers):
        memory, finite = network.memory[k], np.isfinite(costs[k])
        # the last price is beyond all bounds
        scores = np.vstack([costs[k] + prices[:, None] * memory, memory])
        chosen[:, column] = np.where(finite, scores, np.inf).argmin(axis=1)
        held += memory[chosen[:, column]]
    best: tuple[float, tuple[int, ...]] | None = None
    refitted = list(states)
    # of equal choices the one at the lowest price counts
    for choice in dict.fromkeys(map(tuple, chosen[held <= budget].tolist())):
        for k, state in zip(numbers, choice, strict=True):
            refitted[k] = state
        seconds = network.seconds_of(refitted)
        if np.isfinite(seconds) and (best is None or seconds < best[0]):
            best = (seconds, tuple(refitted))
    return None if best is None else best[1]


def _costs(network: CostNetwork, states: Sequence[int], numbers: Sequence[int]) -> dict[int, Array]:
    """Seconds of every state of these variables, their neighbours being fixed."""
    costs = {k: network.unary[k] for k in numbers}
    for (u, v), table in network.edges.items():
        if u in costs:
            costs[u] = costs[u] + table[:, states[v]]
        if v in costs:
            costs[v] = costs[v] + table[states[u], :]
    return costs
