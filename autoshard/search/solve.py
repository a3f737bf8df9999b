"""The front door: prune, eliminate, and say what is proven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from autoshard.search.budget import Budgeted, minimise_within
from autoshard.search.conflict import find_conflict
from autoshard.search.eliminate import Order, find_order
from autoshard.search.marginals import min_marginals
from autoshard.search.minimise import ROUNDING, minimise
from autoshard.search.network import CostNetwork, Limits, NoFiniteAssignment, SearchStats, Solution
from autoshard.search.prune import Contradiction, Residual, make_consistent, prune

__all__ = ["min_marginals", "solve"]


@dataclass(frozen=True)
class _Reduced:
    net: Residual
    order: Order


def solve(
    network: CostNetwork,
    budget_bytes: float | None = None,
    limits: Limits | None = None,
    *,
    tight: bool = False,
) -> Solution:
    """The fastest assignment, within the budget if there is one.

    tight: whether the fastest of all most likely holds more than the budget, of a network that is known to
    have an assignment of finite time; if so, it is not sought twice.

    Raises InfeasibleNetwork when nothing meets the budget and NoFiniteAssignment when everything is
    forbidden. The same network gives the same answer; of equal states the lower is preferred.
    """
    begun = perf_counter()
    limits = limits or Limits()
    whole = Residual.of(network)
    try:
        make_consistent(whole)
    except Contradiction:
        raise NoFiniteAssignment(find_conflict(network)) from None
    held: Budgeted | None = None
    if tight and budget_bytes is not None:
        reduced = _reduce(whole)
        held = minimise_within(reduced.net, reduced.order, budget_bytes, limits)
    if held is None or held.is_fastest:
        held = None
        reduced = _reduce(whole.weighted(0.0))
        fastest = minimise(reduced.net, reduced.order, limits)
        if fastest.states is None:
            raise NoFiniteAssignment(find_conflict(network))
        states, lower, method = reduced.net.original(fastest.states), fastest.lower_bound, fastest.method
        if budget_bytes is not None and network.bytes_of(states) > budget_bytes:
            reduced = _reduce(whole)
            held = minimise_within(reduced.net, reduced.order, budget_bytes, limits)
    if held is not None:
        states, lower, method = reduced.net.original(held.states), held.lower_bound, held.method
    steps, multiplier = (0, 0.0) if held is None else (held.steps, held.multiplier)
    stats = SearchStats(
        len(network.unary),
        sum(len(u) for u in network.unary),
        sum(reduced.net.sizes),
        reduced.order.width,
        reduced.order.largest,
        steps,
        perf_counter() - begun,
    )
    return replace(_solution(network, states, lower, method, stats), multiplier=multiplier)


def _reduce(net: Residual) -> _Reduced:
    """Pruned (``net`` itself stays whole), with an order of elimination."""
    small = net.copy()
    prune(small)
    return _Reduced(small, find_order(small.sizes, small.rows))


def _solution(
    network: CostNetwork, states: Sequence[int], lower: float, method: str, stats: SearchStats
) -> Solution:
    """Seconds and bytes as the network itself counts them; a gap of mere rounding is none."""
    seconds, lower = network.seconds_of(states), float(lower)
    gap = (seconds - lower) / abs(seconds) if seconds else 0.0
    if gap <= ROUNDING:
        gap, lower = 0.0, seconds
    return Solution(tuple(states), seconds, network.bytes_of(states), lower, gap, method, stats)
