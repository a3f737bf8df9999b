"""The front door: prune, eliminate, and say what is proven."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from time import perf_counter

from autoshard.search.budget import minimise_within
from autoshard.search.conflict import find_conflict
from autoshard.search.direct import Orders, least
from autoshard.search.eliminate import Order, find_order
from autoshard.search.marginals import min_marginals
from autoshard.search.minimise import ELIMINATED, ROUNDING, minimise
from autoshard.search.network import (
    CostNetwork,
    InfeasibleNetwork,
    Limits,
    NoFiniteAssignment,
    SearchStats,
    Solution,
)
from autoshard.search.prune import Contradiction, Residual, make_consistent, prune

__all__ = ["min_marginals", "solve"]


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
) -> Solution:
    """The fastest assignment, within the budget if there is one.

    tight: whether the fastest of all most likely holds more than the budget, of a network that is known to
    have an assignment of finite time; if so, it is not sought twice. orders: of elimination, which networks
    with the same states and edges share.

    Raises InfeasibleNetwork when nothing meets the budget and NoFiniteAssignment when everything is
    forbidden. The same network gives the same answer; of equal states the lower is preferred.
    """
    begun = perf_counter()
    limits, orders = limits or Limits(), orders or Orders()
    held: _Answer | None = None
    if tight and budget_bytes is not None:
        held = _within(network, budget_bytes, limits)
    answer = held
    if answer is None or answer.is_fastest:
        answer = _fastest(network, limits, orders)
        if budget_bytes is not None and network.bytes_of(answer.states) > budget_bytes:
            answer = held or _within(network, budget_bytes, limits)
    stats = SearchStats(
        len(network.unary),
        sum(len(u) for u in network.unary),
        answer.left,
        answer.order.width,
        answer.order.largest,
        answer.steps,
        perf_counter() - begun,
    )
    found = _solution(network, answer.states, answer.lower_bound, answer.method, stats)
    return replace(found, multiplier=answer.multiplier)


def _whole(network: CostNetwork) -> Residual:
    """Without the states that cannot be."""
    whole = Residual.of(network)
    try:
        make_consistent(whole)
    except Contradiction:
        raise NoFiniteAssignment(find_conflict(network)) from None
    return whole


def _fastest(network: CostNetwork, limits: Limits, orders: Orders) -> _Answer:
    """Without a budget; a narrow network is not pruned first."""
    direct = least(network, limits, orders)
    if direct is not None:
        if not isfinite(direct.cost):
            raise NoFiniteAssignment(find_conflict(network))
        left = sum(len(u) for u in network.unary)
        return _Answer(direct.states, direct.cost, ELIMINATED, direct.order, left)
    net = _pruned(_whole(network).weighted(0.0))
    order = find_order(net.sizes, net.rows)
    found = minimise(net, order, limits)
    if found.states is None:
        raise NoFiniteAssignment(find_conflict(network))
    return _Answer(net.original(found.states), found.lower_bound, found.method, order, sum(net.sizes))


def _within(network: CostNetwork, budget: float, limits: Limits) -> _Answer:
    """Within the budget; most variables are decided by pruning, and left out of the search."""
    net = _pruned(_whole(network))
    small, numbers = net.undecided()
    chosen = [k.item(0) for k in net.kept]
    decided = [i for i, size in enumerate(net.sizes) if size == 1]
    seconds = sum([net.unary[i].item() for i in decided])
    used = sum([net.memory[i].item() for i in decided])

    def whole(states: Iterable[int]) -> tuple[int, ...]:
        for i, state in zip(numbers, states, strict=True):
            chosen[i] = state
        return tuple(chosen)

    order = find_order(small.sizes, small.rows)
    try:
        held = minimise_within(small, order, budget - used, limits)
    except InfeasibleNetwork as error:
        states = whole(error.states)
        raise InfeasibleNetwork(network.bytes_of(states), states, budget) from None
    return _Answer(
        whole(small.original(held.states)),
        held.lower_bound + seconds,
        held.method,
        order,
        sum(net.sizes),
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
