"""The front door: prune, eliminate, and say what is proven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from time import perf_counter

from autoshard.solver.budgeted import minimise_within
from autoshard.solver.elimination_order import Order
from autoshard.solver.infeasible_subset import find_conflict
from autoshard.solver.min_marginals import min_marginals
from autoshard.solver.minimise import ELIMINATED, ROUNDING, Narrowed
from autoshard.solver.network import (
    CostNetwork,
    InfeasibleNetwork,
    Limits,
    NoFiniteAssignment,
    SearchStats,
    Solution,
)
from autoshard.solver.prune import Contradiction, Residual, make_consistent, prune
from autoshard.solver.reduced_network import Reduced, Reduction
from autoshard.solver.single_elimination import Orders, least, least_seconds

__all__ = ["least_cost", "min_marginals", "solve"]


@dataclass(frozen=True)
class _Answer:
    """States with what is proven about them. left: states of all variables that were looked at in the end.

    is_fastest: whether nothing outside the budget is faster.
    """

    states: tuple[int, ...]
    lower_bound: float
    method: str
    order: Order
    left: int
    steps: int = 0
    multiplier: float = 0.0
    is_fastest: bool = False


def solve(
    network: CostNetwork,
    budget_bytes: float | None = None,
    limits: Limits | None = None,
    *,
    tight: bool = False,
    orders: Orders | None = None,
    reduction: Reduction | None = None,
) -> Solution:
    """The fastest assignment, within the budget if there is one.

    tight: whether the fastest of all most likely holds more than the budget, of a network that is known to
    have an assignment of finite time; if so, it is not sought twice. orders: of elimination, which networks
    with the same states and edges share. reduction: what is left of this very network, if it was solved under
    another budget or limits before.

    Raises InfeasibleNetwork when nothing meets the budget and NoFiniteAssignment when everything is
    forbidden. The same network gives the same answer; of equal states the lower is preferred.
    """
    begun = perf_counter()
    limits, orders = limits or Limits(), orders or Orders()
    held: _Answer | None = None
    if tight and budget_bytes is not None:
        held = _within(network, budget_bytes, limits, reduction)
    answer = held
    if answer is None or answer.is_fastest:
        answer = _fastest(network, limits, orders)
        if budget_bytes is not None and network.bytes_of(answer.states) > budget_bytes:
            answer = held or _within(network, budget_bytes, limits, reduction)
    stats = SearchStats(
        len(network.unary),
        sum(len(u) for u in network.unary),
        answer.left,
        answer.order.width,
        answer.order.largest,
        answer.steps,
        perf_counter() - begun,
    )
    solution = _solution(network, answer.states, answer.lower_bound, answer.method, stats)
    return replace(solution, multiplier=answer.multiplier)


def least_cost(network: CostNetwork, limits: Limits, orders: Orders) -> float:
    """Seconds that no assignment goes below, without looking for one where the network is wide.

    Raises NoFiniteAssignment when everything is forbidden, as far as a bound can tell.
    """
    value = least_seconds(network, limits, orders)
    if value is None:
        small = Narrowed.of(_whole(network), orders.familiar(network))
        value = inf if small is None else small.bound(limits)
    if not isfinite(value):
        raise NoFiniteAssignment(find_conflict(network))
    return value


def proven_seconds(network: CostNetwork, limits: Limits | None, orders: Orders) -> float:
    """The same, but where the network is wide as much is made of it as limits allow."""
    limits = limits or Limits()
    value = least_seconds(network, limits, orders)
    if value is None:
        small = Narrowed.of(_whole(network), orders.familiar(network))
        value = inf if small is None else small.minimise(limits, moves=False).lower_bound
    if not isfinite(value):
        raise NoFiniteAssignment(find_conflict(network))
    return value


def _whole(network: CostNetwork) -> Residual:
    """Without the states that cannot be."""
    full = Residual.of(network)
    try:
        make_consistent(full)
    except Contradiction:
        raise NoFiniteAssignment(find_conflict(network)) from None
    return full


def _fastest(network: CostNetwork, limits: Limits, orders: Orders) -> _Answer:
    """Without a budget; a narrow network is not pruned first."""
    direct = least(network, limits, orders)
    if direct is not None:
        if not isfinite(direct.cost):
            raise NoFiniteAssignment(find_conflict(network))
        left = sum(len(u) for u in network.unary)
        return _Answer(direct.states, direct.cost, ELIMINATED, direct.order, left)
    full = _whole(network)
    small = Narrowed.of(full, orders.familiar(network))
    answer = None if small is None else small.minimise(limits)
    if small is None or answer is None or answer.states is None:
        raise NoFiniteAssignment(find_conflict(network))
    states = full.original(answer.states)
    return _Answer(states, answer.lower_bound, answer.method, small.order, sum(small.net.sizes))


def _within(
    network: CostNetwork, budget: float, limits: Limits, reduction: Reduction | None = None
) -> _Answer:
    """Within the budget; most variables are decided by pruning, and left out of the search."""
    reduction = reduction or Reduction()
    least = reduction.least
    if least is not None and budget < least.smallest_bytes:
        raise InfeasibleNetwork(least.smallest_bytes, least.states, budget)
    if reduction.made is None:
        reduction.made = Reduced.of(_pruned(_whole(network)))
    net = reduction.made
    try:
        budget_, begun, priced = budget - net.bytes, reduction.begun, reduction.priced
        held = minimise_within(net.small, net.order, budget_, limits, begun, priced)
    except InfeasibleNetwork as error:
        states = net.whole(error.states)
        reduction.least = InfeasibleNetwork(network.bytes_of(states), states, budget)
        raise reduction.least from None
    return _Answer(
        net.whole(net.small.original(held.states)),
        held.lower_bound + net.seconds,
        held.method,
        net.order,
        net.left,
        held.steps,
        held.multiplier,
        held.is_fastest,
    )


def _pruned(net: Residual) -> Residual:
    """A copy; ``net`` itself stays whole."""
    small = net.copy()
    prune(small)
    return small


def _solution(
    network: CostNetwork, states: Sequence[int], lower: float, method: str, stats: SearchStats
) -> Solution:
    """Seconds and bytes as the network itself counts them; a gap of mere rounding is none."""
    seconds, lower = network.seconds_of(states), float(lower)
    gap = (seconds - lower) / abs(seconds) if seconds else 0.0
    if gap <= ROUNDING:
        gap, lower = 0.0, seconds
    return Solution(tuple(states), seconds, network.bytes_of(states), lower, gap, method, stats)
