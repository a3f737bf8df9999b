"""A lower bound on the step over all recomputation and placements that fit the memory.

With a price per byte (a Lagrange multiplier) the best number of calls to recompute is none or all of them,
since every call of a layer saves and costs the same. So the least over the extreme policies, each an
ordinary network, bounds all choices between them, too (duality, as in `solver.budgeted`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf

from autoshard.cost.step_time import Exposure, between
from autoshard.search.plan.plan import Recompute
from autoshard.search.problem.problem import Problem
from autoshard.search.solve.step_config import StepConfig
from autoshard.solver.network import Array, CostNetwork, Limits
from autoshard.solver.solve import proven_seconds

#: kinds of layers whose policies are combined; with more, one policy bounds all of them optimistically
_KINDS = 2
#: with more policies than that, one price has to do; else it is doubled or halved so often
_FEW = 3
_MOVES = 4


def dual_bound(
    problem: Problem,
    setting: StepConfig,
    budget: float,
    price: float,
    exposure: Exposure,
    *,
    allowed: Sequence[Array | None] = (),
    limits: Limits | None = None,
    moves: bool = True,
) -> float:
    """Seconds that no step within the budget goes below, whatever is recomputed.

    price: seconds per byte. exposure: which overlaps to count as exposed; any is valid. moves: whether to try
    half of the exposure, too, and to move the price while the bound grows.
    """
    cache: dict[tuple[float, Exposure], float] = {}
    each = extremes(setting)
    policies = list(range(len(each)))
    networks: dict[tuple[int, Exposure], CostNetwork] = {}

    def priced(policy: int, price: float, exposure: Exposure) -> float:
        key = (policy, exposure)
        if key not in networks:
            networks[key] = each[policy].network(problem.terms, exposure, allowed)
        problem.known.count(networks[key])
        seconds = proven_seconds(networks[key].at_price(price), limits, problem.known.orders)
        return seconds - price * budget

    def at(price: float, exposure: Exposure, beat: float = -inf) -> float:
        """The least over the policies; if that cannot beat a value, anything up to that value."""
        key = (price, exposure)
        if key not in cache:
            least = inf
            for policy in tuple(policies):
                value = priced(policy, price, exposure)
                if value < least:
                    least = value
                    # whoever is least is likely to be so again, and then says at once what cannot be beaten
                    policies.remove(policy)
                    policies.insert(0, policy)
                if least <= beat:
                    return least
            cache[key] = least
        return cache[key]

    if not moves:
        return at(price, exposure)
    half = between(exposure, Exposure(0.0, 0.0, 0.0, 0.0))
    if at(price, half, at(price, exposure)) > at(price, exposure):
        exposure = half
    if len(policies) > _FEW:
        return max(cache.values())
    for factor in (2.0, 0.5):
        for _ in range(_MOVES):
            if at(price * factor, exposure, at(price, exposure)) <= at(price, exposure):
                break
            price *= factor
    for factor in (2**0.5, 0.5**0.5):
        at(price * factor, exposure, max(cache.values()))
    return max(cache.values())


def extremes(setting: StepConfig) -> list[StepConfig]:
    """None or all calls of every kind of layer, by each policy, at their least memory."""
    names = list(setting.calls)
    if len(names) > _KINDS:
        return [replace(setting, recompute={}, optimistic=True)]
    options: list[list[Recompute | None]] = [
        [None, Recompute("selective", setting.calls[n]), Recompute("full", setting.calls[n])] for n in names
    ]
    return [
        replace(setting, recompute={n: r for n, r in zip(names, combo, strict=True) if r is not None})
        for combo in product(*options)
    ]
