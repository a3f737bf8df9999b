"""The best placements for one setting on one mesh, under a memory budget.

A step is a sum with four overlaps in it (see `cost.step_time`). For a fixed exposure it is an ordinary
cost network, whose least value bounds the step from below; the exposure is moved to what the solution
shows until it agrees, and the best step over all of them is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.cost.step_time import Exposure, StepTime, between
from autoshard.search.problem.cost_terms import AssignmentCosts, profile
from autoshard.search.problem.problem import Problem
from autoshard.search.solve.step_config import StepConfig
from autoshard.solver.minimise import ELIMINATED
from autoshard.solver.network import Array, CostNetwork, InfeasibleNetwork, Limits, SearchStats, Solution
from autoshard.solver.solve import solve

#: exposures tried; most settings agree at the first or second
_ROUNDS = 5
#: networks that are kept for who asks for them again
_AT_HAND = 4


@dataclass(frozen=True)
class PlacementSolution:
    """States of all variables for a setting, with what they take, the step they give and what is proven.

    lower_bound: seconds; no placements within the budget give a shorter step in this setting. network: the
    one that the solution came from, whose marginals say what other choices cost.
    """

    setting: StepConfig
    states: tuple[int, ...]
    usage: AssignmentCosts
    step: StepTime
    bytes: float
    lower_bound: float
    solution: Solution
    network: CostNetwork

    @property
    def seconds(self) -> float:
        return self.step.total


@dataclass(frozen=True)
class _Weighed:
    """A network with its weights, of seconds and of bytes, in the order of the terms."""

    network: CostNetwork
    times: tuple[float, ...]
    held: tuple[float, ...]


class Networks:
    """Networks of one problem, with what pins leave of it; those asked for last are at hand."""

    def __init__(self, problem: Problem, allowed: Sequence[Array | None]) -> None:
        self._terms, self._allowed = problem.terms, allowed
        self._keys = tuple(dict.fromkeys((*problem.terms.alone, *problem.terms.pairs)))
        self._cache: dict[tuple[tuple[float, ...], tuple[float, ...]], _Weighed] = {}

    def of(self, setting: StepConfig, bound: Exposure) -> CostNetwork:
        """The network of a setting for a given exposure."""
        return self.weighed(setting, bound).network

    def weighed(self, setting: StepConfig, bound: Exposure) -> _Weighed:
        """The same with its weights."""
        seconds = setting.time_weight(bound)
        times = tuple([seconds(key) for key in self._keys])
        held = tuple([setting.bytes_weight(kind) for kind in self._terms.bytes])
        weighed = self._cache.pop((times, held), None)
        if weighed is None:
            weighed = _Weighed(setting.network(self._terms, bound, self._allowed), times, held)
        self._cache[times, held] = weighed
        if len(self._cache) > _AT_HAND:
            del self._cache[next(iter(self._cache))]
        return weighed


def place(
    problem: Problem,
    setting: StepConfig,
    budget: float | None,
    *,
    allowed: Sequence[Array | None] = (),
    limits: Limits | None = None,
    start: Exposure | None = None,
    rounds: int = _ROUNDS,
    over: Sequence[int] = (),
    networks: Networks | None = None,
) -> PlacementSolution:
    """The best over a few exposures, from ``start`` (default: everything is hidden) on.

    over: fast states: if they hold more than the budget, the fastest ones are taken to do so, too, which
    changes the order of the work and nothing else. networks: of this problem and what is allowed, if others
    ask for them as well. Raises InfeasibleNetwork if nothing fits,
    NoFiniteAssignment if everything is forbidden.
    """
    best: PlacementSolution | None = None
    lower = 0.0
    bound = start or Exposure(0.0, 0.0, 0.0, 0.0)
    tried: list[Exposure] = []
    tight: bool | None = None
    networks = networks or Networks(problem, allowed)
    while len(tried) < rounds:
        tried.append(bound)
        weighed = networks.weighed(setting, bound)
        network = weighed.network
        if tight is None:
            tight = budget is not None and bool(over) and network.bytes_of(over) > budget
        solution = _solved(problem, weighed, budget, allowed, limits, tight)
        tight = solution.multiplier > 0
        usage = profile(problem.terms, solution.states)
        step = setting.step(usage)
        lower = max(lower, solution.lower_bound)
        if best is None or step.total < best.seconds:
            held = _held(setting, usage, solution.bytes)
            best = PlacementSolution(setting, solution.states, usage, step, held, 0.0, solution, network)
        shown = setting.exposure(usage)
        if shown == bound:
            break
        # where two exposures lead to each other, the truth lies between
        bound = shown if shown not in tried else between(bound, tried[-2])
        if bound in tried:
            break
    assert best is not None
    if budget is not None and best.bytes > budget >= best.solution.bytes:
        raise InfeasibleNetwork(best.bytes, best.states, budget)
    return replace(best, lower_bound=min(lower, best.seconds))


def _held(setting: StepConfig, usage: AssignmentCosts, counted: float) -> float:
    """Bytes at the peak. counted: by the network, which knows one point of a step alone: where gradients of
    parameters wait, the first rank may hold most at another."""
    return max(counted, setting.held(usage).total) if setting.pipe.splits_backward else counted


def _solved(
    problem: Problem,
    weighed: _Weighed,
    budget: float | None,
    allowed: Sequence[Array | None],
    limits: Limits | None,
    tight: bool,
) -> Solution:
    """The solution of a network, unless one of equal weights was solved before."""
    limits = limits or Limits()
    network, times, weights = weighed.network, weighed.times, weighed.held
    if budget is None:
        # bytes decide nothing then, and limits nothing about what is eliminated
        answer = problem.known.get(times, None, None, allowed) or problem.known.get(
            times, None, limits, allowed
        )
        if answer is None:
            problem.known.count(network)
            answer = solve(network, None, limits, orders=problem.known.orders)
            problem.known.put(times, None, None if answer.method == ELIMINATED else limits, allowed, answer)
        return replace(answer, bytes=network.bytes_of(answer.states))
    held = (budget, *weights)
    answer = problem.known.get(times, held, limits, allowed)
    if answer is None:
        reduction = problem.known.reduction(times, weights, allowed)
        orders = problem.known.orders
        problem.known.count(network)
        answer = solve(network, budget, limits, tight=tight, orders=orders, reduction=reduction)
        problem.known.count(network, answer.stats.multiplier_steps)
        problem.known.put(times, held, limits, allowed, answer)
    return answer


def priced(
    problem: Problem,
    setting: StepConfig,
    price: float,
    *,
    allowed: Sequence[Array | None] = (),
    limits: Limits | None = None,
) -> PlacementSolution:
    """Placements of least seconds where a byte costs ``price`` seconds."""
    bound = Exposure(0.0, 0.0, 0.0, 0.0)
    network = setting.network(problem.terms, bound, allowed)
    problem.known.count(network)
    solution = solve(network.at_price(price), limits=limits, orders=problem.known.orders)
    usage = profile(problem.terms, solution.states)
    step = setting.step(usage)
    return PlacementSolution(setting, solution.states, usage, step, solution.bytes, 0.0, solution, network)


def placed_at(
    problem: Problem, setting: StepConfig, network: CostNetwork, states: tuple[int, ...]
) -> PlacementSolution:
    """An assignment that was found in another way."""
    usage = profile(problem.terms, states)
    counted = network.bytes_of(states)
    stats = SearchStats(len(states), sum(problem.terms.states), sum(problem.terms.states), 0, 0, 0, 0.0)
    seconds = network.seconds_of(states)
    solution = Solution(states, seconds, counted, 0.0, 1.0, "parameters refitted", stats)
    held = _held(setting, usage, counted)
    return PlacementSolution(setting, states, usage, setting.step(usage), held, 0.0, solution, network)
