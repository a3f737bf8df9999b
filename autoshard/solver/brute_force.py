"""Every assignment, one by one: the truth that tests compare with."""

from __future__ import annotations

from math import prod
from time import perf_counter

import numpy as np

from autoshard.solver.network import (
    CostNetwork,
    InfeasibleNetwork,
    NoFiniteAssignment,
    SearchStats,
    Solution,
)

#: assignments that are still tried
MOST = 2_000_000


def brute_force(network: CostNetwork, budget_bytes: float | None = None) -> Solution:
    """The optimum by trying everything; of equal assignments the first. Raises as ``solve`` does."""
    begun = perf_counter()
    sizes = [len(u) for u in network.unary]
    if prod(sizes) > MOST:
        raise ValueError(f"{prod(sizes)} assignments are too many to try, at most {MOST}")
    seconds, held = np.zeros(sizes), np.zeros(sizes)
    for i, (u, m) in enumerate(zip(network.unary, network.memory, strict=True)):
        shape = [1] * len(sizes)
        shape[i] = sizes[i]
        seconds, held = seconds + u.reshape(shape), held + m.reshape(shape)
    for (i, j), table in network.edges.items():
        shape = [1] * len(sizes)
        shape[i], shape[j] = table.shape
        seconds = seconds + table.reshape(shape)
    if not np.isfinite(seconds).any():
        raise NoFiniteAssignment(tuple(range(len(sizes))))
    if budget_bytes is not None:
        finite = np.where(np.isfinite(seconds), held, np.inf)
        if finite.min() > budget_bytes:
            states = tuple(int(s) for s in np.unravel_index(int(finite.argmin()), finite.shape))
            raise InfeasibleNetwork(float(finite.min()), states, budget_bytes)
        seconds = np.where(held <= budget_bytes, seconds, np.inf)
    states = tuple(int(s) for s in np.unravel_index(int(seconds.argmin()), seconds.shape))
    best = network.seconds_of(states)
    stats = SearchStats(len(sizes), sum(sizes), sum(sizes), 0, seconds.size, 0, perf_counter() - begun)
    return Solution(states, best, network.bytes_of(states), best, 0.0, "brute force", stats)
