"""Placements and recomputation together, for one number of microbatches on one mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.cost.step_time import exposure_of
from autoshard.search.again import fill, marginal_price
from autoshard.search.bound import dual_bound, extremes
from autoshard.search.network import Array, InfeasibleNetwork, Limits
from autoshard.search.plan import Recompute
from autoshard.search.problem import Problem
from autoshard.search.setting import Setting
from autoshard.search.settle import Placed, place

#: no recomputation is tried if without any the step is this close to the best without a memory limit
_ENOUGH = 1e-3
#: less work for what only has to show which way to go
QUICK = Limits(down=4_000_000, pareto=0, labels=0, nodes=0, milp=0, steps=10)


def tune(
    problem: Problem,
    setting: Setting,
    budget: float | None,
    *,
    allowed: Sequence[Array | None] = (),
    recompute: bool = True,
    limits: Limits | None = None,
) -> Placed:
    """The best placements with the best recomputation; raises InfeasibleNetwork if nothing fits.

    setting: its recomputation is only a start. recompute: whether anything may run again. The lower bound
    holds for every recomputation, and is that without a budget (see `proven` for a better one).
    """
    bare = replace(setting, recompute={})
    free = place(problem, bare, None, allowed=allowed, limits=limits)
    if budget is None or free.bytes <= budget:
        return free
    if not recompute or not bare.calls:
        return place(problem, bare, budget, allowed=allowed, limits=limits)
    return _Tuning(problem, bare, budget, allowed, limits).best(free)


def proven(
    problem: Problem,
    placed: Placed,
    budget: float | None,
    *,
    allowed: Sequence[Array | None] = (),
    limits: Limits | None = None,
) -> Placed:
    """The same with the best lower bound over all placements and all recomputation."""
    bare = replace(placed.setting, recompute={})
    again = marginal_price(placed.taken, placed.setting)
    price = max(placed.solution.multiplier, again)
    if budget is None or not price:
        return placed
    exposure = exposure_of(placed.setting.sums(placed.taken), placed.setting.how)
    bound = dual_bound(problem, bare, budget, price, exposure, allowed=allowed, limits=limits)
    return replace(placed, lower_bound=min(placed.seconds, max(placed.lower_bound, bound)))


class _Tuning:
    """A few starts, each improved by turns: recomputation for the placements, placements for that."""

    def __init__(
        self,
        problem: Problem,
        bare: Setting,
        budget: float,
        allowed: Sequence[Array | None],
        limits: Limits | None,
    ) -> None:
        self.problem, self.bare, self.budget = problem, bare, budget
        self.allowed, self.limits = allowed, limits
        self.found: list[Placed] = []

    def best(self, free: Placed) -> Placed:
        self._attempt(self.bare)
        if not (self.found and self.found[0].seconds <= (1 + _ENOUGH) * free.lower_bound):
            for extreme in extremes(self.bare):
                if extreme.recompute:
                    self._attempt(extreme)
            for start in [free, *self.found]:
                again = fill(start.taken, self.bare, self.budget)
                if again is not None and all(again != p.setting for p in self.found):
                    self._attempt(again)
        if not self.found:
            # says what is missing, with the least memory that any placements need
            everything = {s: Recompute("full", n) for s, n in self.bare.calls.items()}
            return place(
                self.problem, replace(self.bare, recompute=everything), self.budget, allowed=self.allowed
            )
        last = self._final(min(self.found, key=lambda p: (p.seconds, p.bytes)))
        return replace(last, lower_bound=min(free.lower_bound, last.seconds))

    def _final(self, winner: Placed) -> Placed:
        """The winner once more with all the work the limits allow, and less recomputation if it fits."""
        best = winner
        less = fill(winner.taken, self.bare, self.budget)
        for setting in (winner.setting, less):
            if setting is not None and (setting is winner.setting or setting != winner.setting):
                last = place(self.problem, setting, self.budget, allowed=self.allowed, limits=self.limits)
                best = min(best, last, key=lambda p: (p.seconds, p.bytes))
        return best

    def _attempt(self, setting: Setting) -> None:
        try:
            self.found.append(place(self.problem, setting, self.budget, allowed=self.allowed, limits=QUICK))
        except InfeasibleNetwork:
            return
