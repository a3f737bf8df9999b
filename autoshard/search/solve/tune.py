"""Placements and recomputation together, for one number of microbatches on one mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from autoshard.cost.step_time import Exposure
from autoshard.search.problem.problem import Problem
from autoshard.search.solve.recompute import choose_recompute
from autoshard.search.solve.refit_params import refit
from autoshard.search.solve.solve_placements import Networks, PlacementSolution, place, placed_at
from autoshard.search.solve.step_config import StepConfig
from autoshard.solver.network import Array, CostNetwork, InfeasibleNetwork, Limits
from autoshard.solver.single_elimination import least_seconds

#: no recomputation is tried if without any the step is this close to the best without a memory limit
_ENOUGH = 1e-3
#: work for what is kept, and less for what only has to show which way to go; exposures tried in each
FINAL = Limits(
    total=200_000_000, down=20_000_000, pareto=1_000_000, labels=5_000, nodes=500, milp=7_000, steps=25
)
#: placements found with less work are looked at once more if they are so near the best
_NEAR = 0.02
#: of the price of a byte where little is recomputed, what it is worth to ask for where more does
_EASIER = 0.25
#: states of all variables up to which every start is tried
_SMALL = 2_200
_ROUNDS, _QUICK_ROUNDS = 3, 2
#: sums of the same bytes in another order differ by less than this share
_ROUNDING = 1e-9
QUICK = Limits(total=200_000_000, down=4_000_000, pareto=0, labels=0, nodes=0, milp=0, steps=10)
#: for bounds of whole shapes, which tell what is hopeless
ROUGH = replace(QUICK, total=20_000_000)


def tune(
    problem: Problem,
    setting: StepConfig,
    budget: float | None,
    *,
    allowed: Sequence[Array | None] = (),
    recompute: bool = True,
    limits: Limits = FINAL,
    beat: float = inf,
) -> PlacementSolution:
    """The best placements with the best recomputation; raises InfeasibleNetwork if nothing fits.

    setting: its recomputation is the start. recompute: whether it is allowed. beat: seconds to get below;
    work on what is proven to stay above ends early. The lower bound holds for every recomputation, and is
    that without a budget; `search.bound.best_bound` has a better one.
    """
    bare = replace(setting, recompute={})
    free = place(problem, bare, None, allowed=allowed, limits=limits)
    if budget is None or free.bytes <= budget:
        return free
    if not recompute or not bare.calls:
        return place(problem, bare, budget, allowed=allowed, limits=limits)
    return _Tuning(problem, bare, budget, allowed, limits, beat).best(free, setting)


class _Tuning:
    """A few starts, each improved by turns: recomputation for the placements, placements for that."""

    def __init__(
        self,
        problem: Problem,
        bare: StepConfig,
        budget: float,
        allowed: Sequence[Array | None],
        limits: Limits,
        beat: float,
    ) -> None:
        self.beat = beat
        self.problem, self.bare, self.budget = problem, bare, budget
        self.allowed, self.limits = allowed, limits
        self.solutions: list[PlacementSolution] = []
        self.free: tuple[int, ...] = ()
        self.small = problem.choices <= _SMALL
        self.networks = Networks(problem, allowed)

    def best(self, free: PlacementSolution, hint: StepConfig) -> PlacementSolution:
        self.free = free.states
        self._attempt(self.bare)
        if not (self.solutions and self.solutions[0].seconds <= (1 + _ENOUGH) * free.lower_bound):
            self._with_recompute(free, hint)
        if not self.solutions:
            # says what is missing, with the least memory that any placements need
            everything = self.bare.recomputing("full")
            return place(
                self.problem,
                everything,
                self.budget,
                allowed=self.allowed,
                over=self.free,
                networks=self.networks,
            )
        last = self._final(min(self.solutions, key=_order))
        for other in self._baselines(last) if self.small else ():
            last = min(last, self._final(other), key=_order)
        return replace(last, lower_bound=min(free.lower_bound, last.seconds))

    def _baselines(self, best: PlacementSolution) -> list[PlacementSolution]:
        """Placements that recompute other ops and are so near that more work may make them the best."""
        by_policy: dict[str, PlacementSolution] = {}
        for each in sorted(self.solutions, key=_order):
            if each.setting.recompute != best.setting.recompute:
                by_policy.setdefault(str(each.setting.recompute), each)
        return [each for each in by_policy.values() if each.seconds <= (1 + _NEAR) * best.seconds]

    def _with_recompute(self, free: PlacementSolution, hint: StepConfig) -> None:
        """The hint, everything by one policy, and what the placements found so far leave to recompute."""
        extremes = [hint] if hint.recompute else []
        everything = self.bare.recomputing("selective"), self.bare.recomputing("full")
        extremes += [s for s in everything if s.recompute != hint.recompute]
        self._refit(free, extremes)
        if self.small or not self.solutions:
            for extreme in extremes:
                self._attempt(extreme)
        else:
            self._attempt(min(self.solutions, key=lambda p: p.seconds).setting)
        starts = sorted(self.solutions, key=lambda p: p.seconds)
        for start in [free, *starts] if self.small else starts[:1]:
            recompute = choose_recompute(start.usage, self.bare, self.budget)
            if recompute is not None and all(recompute != p.setting for p in self.solutions):
                self._at(recompute, start)
                self._attempt(recompute, last=True)

    def _at(self, setting: StepConfig, start: PlacementSolution) -> None:
        """The placements of ``start`` as they are, if they fit in another setting."""
        bound = setting.exposure(start.usage)
        network = self.networks.of(setting, bound)
        placements = placed_at(self.problem, setting, network, start.states)
        if placements.bytes <= self.budget:
            self.solutions.append(placements)

    def _final(self, winner: PlacementSolution) -> PlacementSolution:
        """The winner once more with more work, and with less recomputation if that fits by now."""
        less = choose_recompute(winner.usage, self.bare, self.budget)
        setting = winner.setting
        if less is not None and less.step(winner.usage).total < winner.seconds:
            setting = less
            self._at(less, winner)
            winner = min(winner, *self.solutions, key=_order)
        if winner.lower_bound > self.beat:
            return winner
        try:
            last = self._place(setting, self.limits, winner)
        except InfeasibleNetwork:
            return winner
        return min(winner, last, key=_order)

    def _attempt(self, setting: StepConfig, *, last: bool = False) -> None:
        """last: whether nothing else starts from it."""
        if self._is_hopeless(setting, last=last):
            return
        try:
            self.solutions.append(self._place(setting, QUICK, self.solutions[-1] if self.solutions else None))
        except InfeasibleNetwork:
            return

    def _is_hopeless(self, setting: StepConfig, *, last: bool) -> bool:
        """Whether nothing fits in a setting, or even without a budget no placements come near the best found:
        both are known in a moment where a solution is long in coming. last: whether to look at the price of
        a byte, too, at which nothing within the budget may come near."""
        near = self.solutions[-1] if self.solutions else None
        bound = Exposure(0.0, 0.0, 0.0, 0.0) if near is None else setting.exposure(near.usage)
        network = self.networks.of(setting, bound)
        if sum([float(held.min()) for held in network.memory]) > (1 + _ROUNDING) * self.budget:
            return True
        if not self.small or not self.solutions:
            return False
        best = min(self.solutions, key=_order)
        price = _EASIER * best.solution.multiplier if last else 0.0
        return any(self._bound(network, p) > (1 + _NEAR) * best.seconds for p in dict.fromkeys((0.0, price)))

    def _bound(self, network: CostNetwork, price: float) -> float:
        """Seconds that nothing within the budget goes below, by a price per byte; 0.0 if they take long."""
        bound = least_seconds(network.at_price(price) if price else network, QUICK, self.problem.known.orders)
        return 0.0 if bound is None else bound - price * self.budget

    def _refit(self, base: PlacementSolution, settings: Sequence[StepConfig]) -> None:
        """The placements of ``base`` with other strategies for the parameters."""
        for chosen in settings:
            bound = chosen.exposure(base.usage)
            network = self.networks.of(chosen, bound)
            states = refit(self.problem, network, base.states, self.budget)
            placements = None if states is None else placed_at(self.problem, chosen, network, states)
            if placements is not None and placements.bytes <= self.budget:
                self.solutions.append(placements)

    def _place(
        self, setting: StepConfig, limits: Limits, near: PlacementSolution | None
    ) -> PlacementSolution:
        """near: a solution whose exposure to begin with."""
        start = None if near is None else near.setting.exposure(near.usage)
        return place(
            self.problem,
            setting,
            self.budget,
            allowed=self.allowed,
            limits=limits,
            start=start,
            rounds=_QUICK_ROUNDS if limits is QUICK else _ROUNDS,
            over=self.free,
            networks=self.networks,
        )


def _order(placements: PlacementSolution) -> tuple[float, float]:
    return placements.seconds, placements.bytes
