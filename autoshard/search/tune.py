"""Placements and recomputation together, for one number of microbatches on one mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.cost.step_time import exposure_of
from autoshard.search.again import fill, marginal_price
from autoshard.search.bound import dual_bound
from autoshard.search.network import Array, InfeasibleNetwork, Limits
from autoshard.search.plan import Recompute
from autoshard.search.problem import Problem
from autoshard.search.setting import Setting
from autoshard.search.settle import Placed, place

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
        everything = {s: Recompute("full", n) for s, n in self.bare.calls.items()}
        self._attempt(self.bare)
        cheapest = fill(free.taken, self.bare, self.budget)
        if cheapest is not None:
            self._attempt(cheapest)
        else:
            self._attempt(replace(self.bare, recompute=everything))
            for start in list(self.found):
                again = fill(start.taken, self.bare, self.budget)
                if again is not None:
                    self._attempt(again)
        if not self.found:
            # says what is missing, with the least memory that any placements need
            return place(
                self.problem, replace(self.bare, recompute=everything), self.budget, allowed=self.allowed
            )
        winner = min(self.found, key=lambda p: (p.seconds, p.bytes))
        last = self._final(winner)
        return replace(last, lower_bound=min(free.lower_bound, last.seconds))

    def _final(self, winner: Placed) -> Placed:
        """The winner once more with all the work the limits allow, and less recomputation if it fits."""
        best = winner
        for setting in (winner.setting, fill(winner.taken, self.bare, self.budget)):
            if setting is not None:
                last = place(self.problem, setting, self.budget, allowed=self.allowed, limits=self.limits)
                best = min(best, last, key=lambda p: (p.seconds, p.bytes))
        return best

    def _attempt(self, setting: Setting) -> None:
        try:
            self.found.append(place(self.problem, setting, self.budget, allowed=self.allowed, limits=QUICK))
        except InfeasibleNetwork:
            return
