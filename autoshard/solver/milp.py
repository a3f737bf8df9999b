"""The network as a mixed-integer program for HiGHS, through scipy where it is installed.

One binary per state, one continuous share per pair of states on an edge, tied to the states at both ends
(the local polytope): what AutoParallel and Alpa solve for every graph is here the last resort.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autoshard.solver.network import Array
from autoshard.solver.prune import Residual

_SCALE = 1e4
_NODE_LIMIT = 5_000


@dataclass(frozen=True)
class MilpOutcome:
    """states: None when HiGHS found none. lower_bound: proven. complete: whether the search ended."""

    states: list[int] | None
    lower_bound: float
    complete: bool


def entries(net: Residual) -> int:
    """Continuous variables of the program."""
    return sum(t.size for i, row in enumerate(net.rows) for j, t in row.items() if i < j)


def solve_milp(net: Residual, budget: float | None = None, scale: float = 1.0) -> MilpOutcome | None:
    """Solve the residual with HiGHS; None without scipy. scale: roughly the seconds of a good assignment."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError:
        return None
    first = np.concatenate([[0], np.cumsum(net.sizes)]).astype(np.int64)
    edges = [(i, j) for i, row in enumerate(net.rows) for j in row if i < j]
    factor = _SCALE / scale if scale > 0 and np.isfinite(scale) else 1.0
    cost = np.concatenate([*net.unary, *(net.rows[i][j].ravel() for i, j in edges)]) * factor
    allowed = np.isfinite(cost)
    rows, cols, values, right = _ties(net, first, edges)
    matrix = csr_array((values, (rows, cols)), shape=(len(right), len(cost)))
    constraints = [LinearConstraint(matrix, right, right)]
    if budget is not None:
        held = np.concatenate([*net.memory, np.zeros(len(cost) - first[-1])])
        unit = max(1.0, abs(budget))
        constraints.append(LinearConstraint(held[None, :] / unit, -np.inf, budget / unit))
    result = milp(
        np.where(allowed, cost, 0.0),
        constraints=constraints,
        bounds=Bounds(0.0, allowed.astype(np.float64)),
        integrality=(np.arange(len(cost)) < first[-1]).astype(np.int64),
        options={"node_limit": _NODE_LIMIT, "mip_rel_gap": 0.0},
    )
    states = None
    if result.x is not None:
        states = [int(np.argmax(result.x[a:b])) for a, b in pairwise(first)]
    bound = getattr(result, "mip_dual_bound", None)
    lower = -np.inf if bound is None or not np.isfinite(bound) else float(bound) / factor
    return MilpOutcome(states, np.inf if result.status == 2 else lower, result.status in (0, 2))


def _ties(
    net: Residual, first: np.ndarray[tuple[int], np.dtype[np.int64]], edges: list[tuple[int, int]]
) -> tuple[Array, Array, Array, Array]:
    """Rows: every variable has one state; every edge's shares add up to the states at its ends."""
    rows, cols, values = [], [], []
    count, column = len(net.unary), int(first[-1])
    rows.append(np.repeat(np.arange(count), net.sizes))
    cols.append(np.arange(column))
    values.append(np.ones(column))
    at = count
    for i, j in edges:
        a, b = net.rows[i][j].shape
        shares = column + np.arange(a * b)
        ends = np.arange(a + b)
        rows += [at + np.repeat(np.arange(a), b), at + a + np.tile(np.arange(b), a), at + ends]
        cols += [shares, shares, np.concatenate([first[i] + np.arange(a), first[j] + np.arange(b)])]
        values += [np.ones(a * b), np.ones(a * b), -np.ones(a + b)]
        at, column = at + a + b, column + a * b
    right = np.concatenate([np.ones(count), np.zeros(at - count)])
    return np.concatenate(rows), np.concatenate(cols), np.concatenate(values), right
