"""The best lower bound on the step for one number of microbatches on one mesh, whatever is recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoshard.cost.step_time import Exposure, between
from autoshard.search.bound.joint_dual_bound import StepOption, joint_dual_values
from autoshard.search.solve.formulate import ShardingProblem
from autoshard.search.solve.recompute import marginal_price
from autoshard.search.solve.recompute_bound import dual_bound
from autoshard.search.solve.solve_placements import PlacementSolution
from autoshard.search.solve.step_config import StepConfig
from autoshard.search.solve.tune import FINAL
from autoshard.solver.network import Array

#: how far beyond what a byte is thought to be worth a price is looked for, at how many, and how many near the
#: best of those
_AROUND, _COARSE, _FINE = 4.0, 8, 9
_NONE = Exposure(0.0, 0.0, 0.0, 0.0)


def with_best_bound(
    formulated: ShardingProblem, placements: PlacementSolution, budget: float | None
) -> PlacementSolution:
    """The same placements with the best lower bound over all placements and all recomputation."""
    prices = prices_of(placements)
    if budget is None or not prices[1]:
        return placements
    bare = replace(placements.setting, recompute={})
    shown = placements.setting.exposure(placements.usage)
    best = best_price(formulated, bare, prices, tuple(dict.fromkeys((shown, between(shown, _NONE)))), budget)
    price, exposure = best or (prices[1], shown)
    bound = dual_bound(
        formulated.problem,
        bare,
        budget,
        price,
        exposure,
        allowed=formulated.allowed,
        limits=FINAL,
        moves=best is None,
    )
    return replace(placements, lower_bound=min(placements.seconds, max(placements.lower_bound, bound)))


def prices_of(placements: PlacementSolution) -> tuple[float, float]:
    """The range of prices of the last byte, in seconds: of recomputation, and of placements; zeros without
    a binding budget."""
    worth = placements.solution.multiplier, marginal_price(placements.usage, placements.setting)
    prices = [price for price in worth if price]
    return (min(prices), max(prices)) if prices else (0.0, 0.0)


def best_price(
    formulated: ShardingProblem,
    setting: StepConfig,
    near: tuple[float, float],
    exposures: Sequence[Exposure],
    budget: float,
) -> tuple[float, Exposure] | None:
    """The price per byte in about that range, and the exposure, at which the bound for a budget is best; None
    where the network is too wide to look at many of them at once."""
    low, high = near
    prices = np.geomspace(low / _AROUND, high * _AROUND, _COARSE) if low else np.zeros(1)
    best = _best(formulated, setting, prices, exposures, budget)
    if best is None or not low:
        return best and (float(prices[best[0]]), exposures[best[1]])
    at, which = best
    step = prices[1] / prices[0]
    prices = np.geomspace(prices[at] / step, prices[at] * step, _FINE)
    # more prices than before, and of fewer ties there may be no order as narrow: the middle is the one known
    finer = _best(formulated, setting, prices, exposures[which : which + 1], budget, in_parts=True)
    return float(prices[finer[0] if finer else _FINE // 2]), exposures[which]


def _best(
    formulated: ShardingProblem,
    setting: StepConfig,
    prices: Array,
    exposures: Sequence[Exposure],
    budget: float,
    *,
    in_parts: bool = False,
) -> tuple[int, int] | None:
    """Numbers of the best price and exposure; None where the network is too wide, see `floor.least_of`."""
    way = StepOption(setting, tuple(prices.tolist()))
    values = joint_dual_values(formulated, [way], exposures, recompute=True, in_parts=in_parts)
    if values is None:
        return None
    bound = values[0] - prices * budget
    which, at = np.unravel_index(int(bound.argmax()), bound.shape)
    return int(at), int(which)
