"""A lower bound on the step of a configuration that was not solved, memory and parameters counted.

For any price per byte and any exposure of overlaps, the least of seconds plus price times bytes, less the
price of the full budget, bounds every step that fits (duality, as in `search.solve.recompute_bound`). What
is least falls into two parts that are looked at apart, which can only make it less: activations, the same for
all meshes that divide layers alike (`search.bound.dual_function`), and parameters, class by class, by their
lives on this mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.search.bound.dual_function import DualRegime, dual_regime
from autoshard.search.bound.joint_dual_bound import EXPOSURES
from autoshard.search.problem.cost_terms import Bytes, Time
from autoshard.search.solve.param_costs import StrategyCosts
from autoshard.search.solve.step_config import StepConfig
from autoshard.solver.network import Array


@dataclass(frozen=True, eq=False)
class ZeroStageCosts:
    """What classes of parameters take at least, by stages of ZeRO.

    seconds: [times, stages x classes], and bytes: [kinds, stages x classes]. stages: how many. tied: see
    `search.bound.dual_function.DualRegime`.
    """

    times: tuple[Time, ...]
    seconds: Array
    kinds: tuple[Bytes, ...]
    bytes: Array
    stages: int
    tied: float

    @staticmethod
    def of(costs: Sequence[StrategyCosts], *, tied: float) -> ZeroStageCosts:
        times = tuple(dict.fromkeys(key for one in costs for key in one.seconds))
        kinds = tuple(dict.fromkeys(kind for one in costs for kind in one.bytes))
        nothing = np.zeros(len(next(iter(costs[0].bytes.values()))))
        return ZeroStageCosts(
            times,
            np.array([np.concatenate([one.seconds.get(key, nothing) for one in costs]) for key in times]),
            kinds,
            np.array([np.concatenate([one.bytes.get(kind, nothing) for one in costs]) for kind in kinds]),
            len(costs),
            tied,
        )


@dataclass(frozen=True, eq=False)
class DecomposedDualBound:
    """Bounds of steps in one setting, whose parameters take at least what some lives say.

    held: bytes, and spent: seconds at each of `EXPOSURES`, both of all stages x classes. part: how much of
    computing counts at each of these at least. flights: of microbatches that a rank holds at least, where
    gradients of parameters wait and where none does.
    """

    setting: StepConfig
    strategies: ZeroStageCosts
    held: Array
    spent: Array
    part: Array
    flights: Mapping[bool, float]

    @staticmethod
    def of(setting: StepConfig, strategies: ZeroStageCosts) -> DecomposedDualBound:
        held = np.array([setting.bytes_weight(kind) for kind in strategies.kinds]) @ strategies.bytes
        waiting, others = setting.waiting
        # no rank holds less than its share of what is in flight
        flights = {False: min(1.0, setting.flight)}
        if setting.pipe.splits_backward and not others:
            flights[True] = min(1.0, waiting)
        shown = [setting.weights(exposure) for exposure in EXPOSURES]
        counted = [setting.time_weight(exposure) for exposure in EXPOSURES]
        spent = np.array([[count(key) for key in strategies.times] for count in counted]) @ strategies.seconds
        # where messages show, computing counts in part; no less is left of everything else, at a higher price
        part = np.array([[min(w.work_forward, w.work_backward)] for w in shown])
        return DecomposedDualBound(setting, strategies, held, spent, part, flights)

    def least(self, prices: Array, floors: Callable[[DualRegime], Array], budget: float) -> float:
        """Seconds that no step goes below, whatever is recomputed, if it fits the budget.

        prices: per byte of activations of one microbatch. floors: of one microbatch, seconds that it takes at
        least with what it holds at each of these, by regime; both [prices].
        """
        bound = 0.0
        for waits, flight in self.flights.items():
            floor = self.part * floors(dual_regime(self.setting, tied=self.strategies.tied, waits=waits))
            price = prices * (self.part / flight)  # [exposures, prices]
            # [exposures, prices, stages x classes]
            least = self.spent[:, None] + price[:, :, None] * self.held
            each = least.reshape(*price.shape, self.strategies.stages, -1).min(axis=2)
            bound = max(bound, float((floor + each.sum(axis=-1) - price * budget).max()))
        return bound
