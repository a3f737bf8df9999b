"""The fastest assignment within a memory budget.

A multiplier prices bytes in seconds; the exact minimum for any multiplier bounds the answer from below
(Lagrangian duality; Everett 1963). The multiplier moves along the secant between the best assignment
that fits and one that does not, which ends at the best bound after finitely many steps. What gap is left
is searched exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from autoshard.solver.branch_and_bound import Criterion, depth_first, mini_buckets
from autoshard.solver.eliminate import Elimination
from autoshard.solver.elimination_order import Familiar, Order, find_order
from autoshard.solver.improvement_moves import Meter, blend, descend, squeeze
from autoshard.solver.milp import entries, solve_milp
from autoshard.solver.minimise import ROUNDING, MinimisedResidual, fits, minimise, minimise_pruned
from autoshard.solver.network import InfeasibleNetwork, Limits
from autoshard.solver.pareto_elimination import close_gap
from autoshard.solver.prune import Contradiction, Residual, make_consistent, prune

#: entries of all tables up to which one pruned network and order serve all multipliers
_REUSED = 100_000_000


@dataclass(frozen=True)
class Point:
    """An assignment of the residual with its seconds and bytes."""

    states: tuple[int, ...]
    seconds: float
    held: float


@dataclass(frozen=True)
class Budgeted:
    """states: in the residual's numbering. steps: multipliers tried. multiplier: the best one.

    is_fastest: whether the budget did not bind, so that these are the fastest states of all.
    """

    states: tuple[int, ...]
    lower_bound: float
    method: str
    steps: int
    multiplier: float = 0.0
    is_fastest: bool = False


@dataclass(frozen=True)
class _Dual:
    """Where the multiplier search ended: the best bound and its multiplier, and assignments on both sides."""

    lam: float
    lower_bound: float
    fits: Point
    fast: Point
    steps: int
    method: str


@dataclass(frozen=True)
class Begun:
    """A search as far as limits that it did not reach change nothing: the dual bound, and the best assignment
    that moves from those of the bound lead to."""

    dual: _Dual
    best: Point


class Priced:
    """Least costs of one network at prices of a byte, by limits and all prices tried up to then: a search
    under another budget begins alike."""

    def __init__(self) -> None:
        self._cache: dict[tuple[Limits, tuple[float, ...]], tuple[MinimisedResidual, Familiar]] = {}

    def at(
        self, limits: Limits, prices: tuple[float, ...], least: Callable[[float, Familiar], MinimisedResidual]
    ) -> MinimisedResidual:
        """At the last of the prices, 0 if there are none. least: of a price, with orders of those before."""
        key = (limits, prices)
        if key not in self._cache:
            before = self._cache.get((limits, prices[:-1])) if len(prices) > 1 else None
            familiar = Familiar() if before is None else copy(before[1])
            self._cache[key] = least(prices[-1] if prices else 0.0, familiar), familiar
        return self._cache[key][0]


def minimise_within(
    net: Residual,
    order: Order,
    budget: float,
    limits: Limits,
    begun: dict[float, Begun] | None = None,
    priced: Priced | None = None,
) -> Budgeted:
    """The fastest assignment of at most ``budget`` bytes.

    net: arc consistent, pruned in both objectives, with an assignment of finite cost. begun: of earlier
    searches of the same network and order, by their budget, to go on from and to be added to. priced: what
    they found at prices. Raises InfeasibleNetwork, with states in the original numbering, when nothing fits.
    """
    meter = Meter(net)
    cached = None if begun is None else begun.get(budget)
    if cached is None or not _repeats(order, cached.dual, limits):
        started = _begin(net, meter, order, budget, limits, priced or Priced())
        if isinstance(started, Budgeted):
            return started
        cached = started
        if begun is not None and _repeats(order, cached.dual, limits):
            begun[budget] = cached
    dual, best = cached.dual, cached.best
    if _closed(best.seconds, dual.lower_bound):
        return Budgeted(best.states, best.seconds, dual.method, dual.steps, dual.lam)
    if not (limits.pareto or limits.nodes or limits.milp):
        return Budgeted(best.states, dual.lower_bound, dual.method, dual.steps, dual.lam)
    return replace(_close(net, meter, order, dual, best, budget, limits), multiplier=dual.lam)


def _repeats(order: Order, dual: _Dual, limits: Limits) -> bool:
    """Whether the search for a multiplier goes the same way under limits: all that it takes is elimination,
    and it ends by itself."""
    return fits(order, limits) and _reused(order, limits) and dual.steps < limits.steps


def _reused(order: Order, limits: Limits) -> bool:
    return order.total <= min(_REUSED, limits.total)


def _begin(
    net: Residual, meter: Meter, order: Order, budget: float, limits: Limits, priced: Priced
) -> Begun | Budgeted:
    """All but the gap; the answer where the budget does not bind."""

    def free(price: float, familiar: Familiar) -> MinimisedResidual:
        if fits(order, limits):
            return minimise(net, order, limits)
        return minimise_pruned(net.weighted(price), limits, familiar)

    # that nothing fits is known far sooner than what is fastest
    leanest = _point(meter, least_memory(net, meter, budget, limits))
    if leanest.held > budget:
        states = descend(net, leanest.states, leanest.held)
        raise InfeasibleNetwork(_point(meter, states).held, net.original(states), budget)
    fastest = priced.at(limits, (), free)
    assert fastest.states is not None
    fast = _point(meter, fastest.states)
    if fast.held <= budget:
        return Budgeted(fast.states, fastest.lower_bound, fastest.method, 0, is_fastest=True)
    dual = _search_multiplier(net, meter, order, fast, fastest.lower_bound, leanest, budget, limits, priced)
    return Begun(dual, _improved(net, meter, dual, budget))


def least_memory(net: Residual, meter: Meter, budget: float, limits: Limits) -> list[int]:
    """The assignment of least bytes; where that is hard to prove, one within the budget will do."""
    memory = net.of_memory()
    # most variables forbid nothing to others: each of them chooses alone
    chosen = [0 if row else int(u.argmin()) for u, row in zip(memory.unary, memory.rows, strict=True)]
    tied = [i for i, row in enumerate(memory.rows) if row]
    answer = minimise_pruned(memory.only(tied), limits)
    assert answer.states is not None
    lower = answer.lower_bound
    for i, state in zip(tied, answer.states, strict=True):
        chosen[i] = state
    lower += sum(u.item(s) for u, s, row in zip(memory.unary, chosen, memory.rows, strict=True) if not row)
    held = meter.of(chosen)[1]
    if held <= budget or _closed(held, lower):
        return chosen
    order = find_order(memory.sizes, memory.rows)
    better = depth_first(order, [Criterion(mini_buckets(memory, order, limits.mini))], best=held)
    return better.states or chosen


def _point(meter: Meter, states: Sequence[int]) -> Point:
    return Point(tuple(states), *meter.of(states))


def _closed(seconds: float, lower_bound: float) -> bool:
    return seconds - lower_bound <= ROUNDING * abs(seconds)


def _search_multiplier(
    net: Residual,
    meter: Meter,
    order: Order,
    fast: Point,
    lower: float,
    lean: Point,
    budget: float,
    limits: Limits,
    priced: Priced,
) -> _Dual:
    """Raise the dual bound; fast is over the budget, lean within it."""
    # where the tables are large, it pays to prune anew for every multiplier, which goes further
    elimination = Elimination(net, order) if _reused(order, limits) else None
    trials: tuple[float, ...] = ()
    lam, steps, method = 0.0, 0, "eliminated"
    while steps < limits.steps and lean.seconds > fast.seconds:
        trial = (lean.seconds - fast.seconds) / (fast.held - lean.held)
        steps, trials = steps + 1, (*trials, trial)
        answer = priced.at(limits, trials, lambda lam, like: _at(net, elimination, like, lam, limits))
        assert answer.states is not None
        method = answer.method
        if answer.lower_bound - trial * budget > lower:
            lam, lower = trial, answer.lower_bound - trial * budget
        new = _point(meter, answer.states)
        line = lean.seconds + trial * lean.held
        if new.seconds + trial * new.held >= line - ROUNDING * 1e-2 * abs(line):
            break
        if new.held > budget:
            fast = new
        else:
            lean = new
    return _Dual(lam, min(lower, lean.seconds), lean, fast, steps, f"{method} + memory multiplier")


def _at(
    net: Residual, elimination: Elimination | None, familiar: Familiar, lam: float, limits: Limits
) -> MinimisedResidual:
    if elimination is None:
        return minimise_pruned(net.weighted(lam), limits, familiar)
    value, states = elimination.solve(net.priced(lam))
    return MinimisedResidual(states, value, "eliminated")


def _improved(net: Residual, meter: Meter, dual: _Dual, budget: float) -> Point:
    """The best of what moves from the assignments on both sides lead to."""
    mixed = blend(net, dual.fits.states, dual.fast.states, budget, meter)
    squeezed = squeeze(net, dual.fast.states, budget, meter)
    starts = dict.fromkeys(tuple(s) for s in (dual.fits.states, mixed, squeezed) if s is not None)
    candidates = [dual.fits, *(_point(meter, descend(net, s, budget, meter)) for s in starts)]
    return min((c for c in candidates if c.held <= budget), key=lambda c: (c.seconds, c.held, c.states))


def _close(
    net: Residual, meter: Meter, order: Order, dual: _Dual, best: Point, budget: float, limits: Limits
) -> Budgeted:
    """Search what the bounds leave open between the dual bound and the best assignment."""
    if order.total > limits.down:
        return _close_wide(net, meter, order, dual, best, budget, limits)
    small = _fix(net, order, dual.lam, budget, best.seconds)
    if small is None:
        return Budgeted(best.states, best.seconds, dual.method, dual.steps)
    small_order = find_order(small.sizes, small.rows)
    if small_order.total > limits.pareto:
        return _close_wide(net, meter, order, dual, best, budget, limits)
    outcome = close_gap(small, small_order, dual.lam, budget, best.seconds, limits.labels)
    lower = max(dual.lower_bound, outcome.lower_bound)
    if outcome.states is not None:
        new = _point(meter, small.original(outcome.states))
        if new.held <= budget and new.seconds < best.seconds:
            best = _point(meter, descend(net, new.states, budget))
    return Budgeted(best.states, min(lower, best.seconds), f"{dual.method} + Pareto elimination", dual.steps)


def _fix(net: Residual, order: Order, lam: float, budget: float, seconds: float) -> Residual | None:
    """Keep the states whose min-marginals allow a better assignment; None if some variable has none."""
    small = net.copy()
    small.kept = [np.arange(len(u)) for u in net.unary]
    for i, costs in enumerate(Elimination(net.weighted(lam), order).marginals()):
        keep = np.flatnonzero(costs <= seconds + lam * budget)
        if not len(keep):
            return None
        if len(keep) < len(costs):
            small.shrink(i, keep)
    try:
        make_consistent(small)
    except Contradiction:
        return None
    prune(small)
    return small


def _close_wide(
    net: Residual, meter: Meter, order: Order, dual: _Dual, best: Point, budget: float, limits: Limits
) -> Budgeted:
    """Branch and bound under time, memory and multiplier bounds; then HiGHS if the program is small."""
    criteria = [
        Criterion(mini_buckets(net.weighted(dual.lam), order, limits.mini), offset=-dual.lam * budget),
        Criterion(mini_buckets(net, order, limits.mini)),
        Criterion(
            mini_buckets(net.of_memory(), order, limits.mini), cap=budget + 1e-12 * abs(budget), follow=False
        ),
    ]
    tried = depth_first(order, criteria, best=best.seconds, nodes=limits.nodes)
    lower = max(dual.lower_bound, tried.lower_bound)
    best = _better(net, meter, best, tried.states, budget)
    method = f"{dual.method} + branch and bound"
    if not _closed(best.seconds, lower) and entries(net) <= limits.milp:
        outcome = solve_milp(net, budget, best.seconds)
        if outcome is not None:
            lower = max(lower, outcome.lower_bound)
            best = _better(net, meter, best, outcome.states, budget)
            method = f"{dual.method} + HiGHS"
    return Budgeted(best.states, min(lower, best.seconds), method, dual.steps)


def _better(net: Residual, meter: Meter, best: Point, states: Sequence[int] | None, budget: float) -> Point:
    if states is None:
        return best
    new = _point(meter, descend(net, states, budget))
    return new if new.held <= budget and new.seconds < best.seconds else best
