"""The least cost of a residual by whatever method fits its width, with a proven bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.solver.branch_and_bound import Criterion, MiniBuckets, depth_first, mini_buckets
from autoshard.solver.diving import dive, widen
from autoshard.solver.eliminate import Elimination
from autoshard.solver.elimination_core import Core
from autoshard.solver.elimination_order import Familiar, Order
from autoshard.solver.improvement_moves import descend, measure
from autoshard.solver.milp import entries, solve_milp
from autoshard.solver.network import Limits
from autoshard.solver.prune import Contradiction, Residual, make_consistent, prune

#: the method that is exact whatever the limits
ELIMINATED = "eliminated"
#: relative difference below which two costs are the same up to rounding
ROUNDING = 1e-10
#: entries of all mini-buckets together, roughly
_MINI_TOTAL = 100_000_000


@dataclass(frozen=True)
class MinimisedResidual:
    """states: in the residual's numbering, or None when nothing is finite. lower_bound: on the cost."""

    states: list[int] | None
    lower_bound: float
    method: str


def fits(order: Order, limits: Limits) -> bool:
    return order.largest <= limits.table and order.total <= limits.total


def minimise(net: Residual, order: Order, limits: Limits, *, moves: bool = True) -> MinimisedResidual:
    """Least seconds of a residual, whose bytes are ignored; in whatever way its order allows."""
    if not fits(order, limits):
        return minimise_wide(net, order, limits, moves=moves)
    value, states = Elimination(net, order).solve()
    return MinimisedResidual(states if np.isfinite(value) else None, value, ELIMINATED)


@dataclass(frozen=True, eq=False)
class Narrowed:
    """What decides a network: net: its core, pruned. order: of the elimination of that."""

    core: Core
    net: Residual
    order: Order

    @staticmethod
    def of(net: Residual, familiar: Familiar) -> Narrowed | None:
        """Of a network that is arc consistent, whose bytes are ignored; None if nothing is finite. familiar:
        orders of others like it, with variables as in this one."""
        core = Core.of(net)
        small = core.net
        try:
            make_consistent(small)
        except Contradiction:
            return None
        if not np.isfinite(core.seconds):
            return None
        prune(small)
        return Narrowed(core, small, familiar.order(core.numbers, small.sizes, small.rows))

    def minimise(self, limits: Limits, *, moves: bool = True) -> MinimisedResidual:
        """The least seconds, with states as of the full network. moves: see `minimise_wide`."""
        answer = minimise(self.net, self.order, limits, moves=moves)
        states = None if answer.states is None else self.core.whole(self.net.original(answer.states))
        return MinimisedResidual(states, self.core.seconds + answer.lower_bound, answer.method)

    def bound(self, limits: Limits) -> float:
        """Seconds that no assignment goes below: the least itself where the order allows that."""
        if fits(self.order, limits):
            return self.core.seconds + Elimination(self.net, self.order).sweep().value
        return self.core.seconds + _buckets(self.net, self.order, limits).value


def minimise_pruned(net: Residual, limits: Limits, familiar: Familiar | None = None) -> MinimisedResidual:
    """The same of a network that is not pruned, which stays as it is. familiar: see `Narrowed`."""
    small = Narrowed.of(net, familiar or Familiar())
    return MinimisedResidual(None, np.inf, ELIMINATED) if small is None else small.minimise(limits)


def minimise_wide(net: Residual, order: Order, limits: Limits, *, moves: bool = True) -> MinimisedResidual:
    """Branch and bound for a while, HiGHS if the program is small, neighbourhoods if that is not the end.

    Complete branch and bound if nothing finite was found. moves: whether neighbourhoods are looked at, which
    say nothing about the bound.
    """
    bounds = _buckets(net, order, limits)
    # one way down to the last variable takes as many nodes, and is a far better start than any other
    tried = depth_first(order, [Criterion(bounds)], nodes=len(net.unary) + limits.nodes)
    if tried.complete:
        return MinimisedResidual(tried.states, tried.lower_bound, "branch and bound")
    states, lower, method = tried.states, tried.lower_bound, "mini-buckets + neighbourhoods"
    if states is None:
        states = dive(net, order.variables[::-1])
    if states is not None:
        states = descend(net, states)
    seconds = np.inf if states is None else measure(net, states)[0]
    if seconds - lower > ROUNDING * abs(seconds) and entries(net) <= limits.milp:
        outcome = solve_milp(net, scale=seconds)
        if outcome is not None:
            lower = max(lower, outcome.lower_bound)
            other = np.inf if outcome.states is None else measure(net, outcome.states)[0]
            if other < seconds:
                states, seconds = outcome.states, other
            if outcome.complete and (other < np.inf or outcome.lower_bound == np.inf):
                return MinimisedResidual(states, seconds, "HiGHS")
            method = "HiGHS, stopped early"
    if moves and states is not None and seconds - lower > ROUNDING * abs(seconds):
        states = widen(net, order, states, limits)
        seconds = measure(net, states)[0]
    if states is None:
        tried = depth_first(order, [Criterion(bounds)])
        return MinimisedResidual(tried.states, tried.lower_bound, "branch and bound")
    return MinimisedResidual(states, min(lower, seconds), method)


def _buckets(net: Residual, order: Order, limits: Limits) -> MiniBuckets:
    return mini_buckets(net, order, min(limits.mini, _MINI_TOTAL // max(1, len(net.unary))))
