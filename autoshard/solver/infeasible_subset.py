"""Which variables contradict each other: a small set that alone already allows no assignment.

QuickXplain (Junker 2004): halves that the contradiction does not need are dropped whole, so the number of
checks grows with the size of the answer and only the logarithm of the network.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.solver.branch_and_bound import Criterion, depth_first, mini_buckets
from autoshard.solver.eliminate import Elimination
from autoshard.solver.elimination_order import find_order
from autoshard.solver.minimise import fits
from autoshard.solver.network import Array, CostNetwork, Limits
from autoshard.solver.prune import Contradiction, Residual, make_consistent, prune


def find_conflict(network: CostNetwork) -> tuple[int, ...]:
    """Variables of an infeasible network of which none can be spared (unless a check was too hard)."""
    return tuple(sorted(_explain(_Checker(network), [], list(range(len(network.unary))), grown=False)))


class _Checker:
    """Whether some of the variables, on their own, have an assignment of finite cost."""

    def __init__(self, network: CostNetwork) -> None:
        self.unary = [_bare(u) for u in network.unary]
        self.edges = {k: _bare(t) for k, t in network.edges.items() if np.isinf(t).any()}

    def possible(self, variables: Sequence[int]) -> bool:
        number = {v: i for i, v in enumerate(sorted(variables))}
        unary = tuple(self.unary[v] for v in number)
        edges = {(number[a], number[b]): t for (a, b), t in self.edges.items() if a in number and b in number}
        net = Residual.of(CostNetwork(unary, tuple(np.zeros(len(u)) for u in unary), edges))
        try:
            make_consistent(net)
        except Contradiction:
            return False
        prune(net)
        return _has_assignment(net, Limits())


def _bare(costs: Array) -> Array:
    return np.where(np.isinf(costs), np.inf, 0.0)


def _has_assignment(net: Residual, limits: Limits) -> bool:
    """Exact where the network is narrow; a search that ends without an answer counts as yes."""
    order = find_order(net.sizes, net.rows)
    if fits(order, limits):
        return bool(np.isfinite(Elimination(net, order).sweep().value))
    tried = depth_first(order, [Criterion(mini_buckets(net, order, limits.mini))], nodes=limits.nodes)
    return tried.states is not None or not tried.complete


def _explain(check: _Checker, needed: list[int], unknown: list[int], *, grown: bool) -> list[int]:
    """Those of the unknown variables that contradict each other together with the needed ones."""
    if grown and not check.possible(needed):
        return []
    if len(unknown) == 1:
        return unknown
    half = len(unknown) // 2
    first, second = unknown[:half], unknown[half:]
    from_second = _explain(check, needed + first, second, grown=bool(first))
    from_first = _explain(check, needed + from_second, first, grown=bool(from_second))
    return from_first + from_second
