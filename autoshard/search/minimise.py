"""The least cost of a residual by whatever method fits its width, with a proven bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.search.branch import Criterion, MiniBuckets, depth_first, mini_buckets
from autoshard.search.core import Core
from autoshard.search.dive import dive, widen
from autoshard.search.eliminate import Elimination
from autoshard.search.improve import descend, measure
from autoshard.search.milp import entries, solve_milp
from autoshard.search.network import Limits
from autoshard.search.order import Order, find_order
from autoshard.search.prune import Residual, prune

#: the method that is exact whatever the limits
ELIMINATED = "eliminated"
#: relative difference below which two costs are the same up to rounding
ROUNDING = 1e-10
#: entries of all mini-buckets together, roughly
_MINI_TOTAL = 100_000_000


@dataclass(frozen=True)
class Found:
    """states: in the residual's numbering, or None when nothing is finite. lower_bound: on the cost."""

    states: list[int] | None
    lower_bound: float
    method: str


def fits(order: Order, limits: Limits) -> bool:
    return order.largest <= limits.table and order.total <= limits.total


def minimise(net: Residual, order: Order, limits: Limits) -> Found:
    """Least seconds of a residual, whose bytes are ignored; in whatever way its order allows."""
    if not fits(order, limits):
        return minimise_wide(net, order, limits)
    value, states = Elimination(net, order).solve()
    return Found(states if np.isfinite(value) else None, value, ELIMINATED)


def bound(net: Residual, order: Order, limits: Limits) -> float:
    """Seconds that no assignment goes below: the least itself where the order allows that."""
    if fits(order, limits):
        return Elimination(net, order).solve()[0]
    return _buckets(net, order, limits).value


def minimise_pruned(net: Residual, limits: Limits) -> Found:
    """The same after pruning a copy, with states in the numbering of ``net``."""
    small = net.copy()
    small.kept = [np.arange(len(u)) for u in net.unary]
    prune(small)
    found = minimise(small, find_order(small.sizes, small.rows), limits)
    states = None if found.states is None else list(small.original(found.states))
    return Found(states, found.lower_bound, found.method)


def minimise_wide(net: Residual, order: Order, limits: Limits) -> Found:
    """What is wide about a network, once the rest of it is eliminated; see `_minimise_core`."""
    core = Core.of(net, order)
    if not core.numbers:
        return Found(core.whole(()), core.seconds, ELIMINATED)
    found = _minimise_core(core.net, core.order, limits, milp=entries(net) <= limits.milp)
    states = None if found.states is None else core.whole(found.states)
    return Found(states, core.seconds + found.lower_bound, found.method)


def _minimise_core(net: Residual, order: Order, limits: Limits, *, milp: bool) -> Found:
    """Branch and bound for a while, HiGHS if the program is small, neighbourhoods if that is not the end.

    Complete branch and bound if nothing finite was found.
    """
    bounds = _buckets(net, order, limits)
    # one way down to the last variable takes as many nodes, and is a far better start than any other
    tried = depth_first(order, [Criterion(bounds)], nodes=len(net.unary) + limits.nodes)
    if tried.complete:
        return Found(tried.states, tried.lower_bound, "branch and bound")
    states, lower, method = tried.states, tried.lower_bound, "mini-buckets + neighbourhoods"
    if states is None:
        states = dive(net, order.variables[::-1])
    if states is not None:
        states = descend(net, states)
    seconds = np.inf if states is None else measure(net, states)[0]
    if milp and seconds - lower > ROUNDING * abs(seconds):
        outcome = solve_milp(net, scale=seconds)
        if outcome is not None:
            lower = max(lower, outcome.lower_bound)
            other = np.inf if outcome.states is None else measure(net, outcome.states)[0]
            if other < seconds:
                states, seconds = outcome.states, other
            if outcome.complete and (other < np.inf or outcome.lower_bound == np.inf):
                return Found(states, seconds, "HiGHS")
            method = "HiGHS, stopped early"
    if states is not None and seconds - lower > ROUNDING * abs(seconds):
        states = widen(net, states, limits)
        seconds = measure(net, states)[0]
    if states is None:
        tried = depth_first(order, [Criterion(bounds)])
        return Found(tried.states, tried.lower_bound, "branch and bound")
    return Found(states, min(lower, seconds), method)


def _buckets(net: Residual, order: Order, limits: Limits) -> MiniBuckets:
    return mini_buckets(net, order, min(limits.mini, _MINI_TOTAL // max(1, len(net.unary))))
