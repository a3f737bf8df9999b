"""Which configurations are worth solving exactly: an estimate for each, and a bound that no plan beats.

A few exact solutions per shape of the mesh give everything else by interpolation (see
`search.bound.mesh_families`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TypeVar

import numpy as np

from autoshard.cluster.mesh import Mesh
from autoshard.cost.on_mesh import CostModels
from autoshard.cost.recipe import Recipe
from autoshard.cost.step_time import StepSums, busy_seconds, mixed, slot_seconds
from autoshard.search.bound.anchor import AnchorProblem
from autoshard.search.bound.decomposed_dual_bound import DecomposedDualBound, ZeroStageCosts
from autoshard.search.bound.dual_function import DualRegime
from autoshard.search.bound.estimate import Estimated
from autoshard.search.bound.joint_dual_bound import joint_dual_bounds, step_options
from autoshard.search.bound.mesh_families import MeshFamily, between
from autoshard.search.bound.stage_imbalance import busiest
from autoshard.search.problem.cost_terms import AssignmentCosts
from autoshard.search.solve.configuration import (
    Configuration,
    Staged,
    data_ways,
    microbatch_sizes,
    stored_ways,
)
from autoshard.search.solve.formulate import ShardingProblem
from autoshard.search.solve.param_costs import Parameters, Zero
from autoshard.search.solve.pipeline_model import Pipe
from autoshard.search.solve.recompute import RecomputePlanner
from autoshard.search.solve.step_config import StepConfig
from autoshard.solver.network import Array

K = TypeVar("K")
V = TypeVar("V")
#: placements that hold less may store so much less of the parameters, as a factor
_LEANER = 1.05
#: sums of the same seconds in another order differ by less than this share
_ROUNDING = 1e-9


def rank(
    shape: MeshFamily,
    total: int,
    prices: CostModels,
    setting: StepConfig,
    budget: float | None,
    recipe: Recipe,
) -> list[Estimated]:
    """All configurations of a shape, for a global batch of ``total`` sequences, by their bounds alone.

    Each can be looked at more closely: first at what the fastest placements take without a memory limit, then
    at what fits; where they do not fit as they are, those that hold less are looked at, too. One that seems
    not to fit, without that being proven, has infinite estimated seconds.
    """
    return [
        Estimated(
            one.where(one.ways[0]),
            one.ways[0],
            one.bound,
            one.bound,
            choices=shape.choices,
            proof=one,
            view=one,
        )
        for one in _candidates(shape, total, prices, setting, budget, recipe)
    ]


def _candidates(
    shape: MeshFamily,
    total: int,
    prices: CostModels,
    setting: StepConfig,
    budget: float | None,
    recipe: Recipe,
) -> Iterator[_Bounded]:
    """Every mesh of a shape with every microbatch that divides the global one."""
    strategies: dict[Mesh, _StrategyCosts] = {}
    bare: dict[int, _Bare] = {}
    uneven: dict[tuple[Pipe, ...], tuple[float, ...]] = {}
    zeros = _Zeros(prices, recipe, setting.overlap)
    for staged in shape.meshes:
        mesh, ways = staged.mesh, data_ways(staged.mesh)
        cut = staged.ranks > 1
        state = shape.state / stored_ways(mesh)
        if mesh not in strategies:
            strategies[mesh] = _StrategyCosts(shape, mesh, zeros)
        if staged.pipes not in uneven:
            # alike for any microbatch
            uneven[staged.pipes] = tuple(
                busiest(shape.ends[0].chain, p) if cut else 1.0 for p in staged.pipes
            )
        for batch in staged.batches or microbatch_sizes(mesh, total):
            each = batch // ways
            if not shape.covers(each):
                continue
            count = max(1, total // batch)
            if each not in bare:
                bare[each] = _Bare(shape, each, setting)
            ways_to_run = _Ways(setting, count, staged, shape.between * each, shape.common)
            # alone, a data rank has not even scalars to share
            shared = shape.shared(each) if ways == 1 else 0.0
            bound = staged.runs(count) * max(0.0, shape.seconds(each) - shared) / staged.ranks
            proven = shape.proven(mesh, total // ways) if staged.ranks == 1 else 0.0
            yield _Bounded(
                mesh,
                batch,
                bare[each],
                strategies[mesh],
                ways_to_run,
                uneven[staged.pipes],
                bound,
                state,
                budget,
                shared,
                max(bound, proven),
            )


class _Bare:
    """A microbatch of ``each`` sequences per data rank, on any mesh of a shape.

    free_sums, lean_sums: seconds that it takes, with nothing recomputed.
    """

    def __init__(self, shape: MeshFamily, each: int, setting: StepConfig) -> None:
        self._shape, self.each, self._setting = shape, each, setting
        self._floors: dict[tuple[DualRegime, int], Array] = {}

    @cached_property
    def free(self) -> RecomputePlanner:
        return RecomputePlanner(self._shape.free(self.each), self._setting.calls)

    @cached_property
    def lean(self) -> RecomputePlanner:
        return RecomputePlanner(self._shape.lean(self.each), self._setting.calls)

    def floors(self, regime: DualRegime, rounds: int) -> Array:
        """Seconds at least, with the bytes held at a price per byte; rounds: see `MeshFamily`."""
        key = (regime, rounds)
        if key not in self._floors:
            self._floors[key] = self._shape.floors(self.each, regime, rounds)
        return self._floors[key]

    def formulated_on(self, mesh: Mesh, look: int) -> tuple[ShardingProblem, float] | None:
        """See `MeshFamily`."""
        return self._shape.formulated_on(mesh, self.each, look)

    def floors_of(self, mesh: Mesh) -> Callable[[DualRegime], Array] | None:
        """The same by regime, solved anew; None if it cannot be."""
        return self._shape.floors_of(mesh, self.each)

    @property
    def recompute(self) -> bool:
        """Whether anything may be recomputed."""
        return self._shape.ends[0].recompute

    @property
    def is_end(self) -> bool:
        """Whether it was solved, rather than found between two that were."""
        return self._shape.is_end(self.each)

    @property
    def looks(self) -> int:
        """How many ends say something of what it takes at least."""
        return self._shape.looks(self.each)

    @property
    def prices(self) -> Array:
        """Of a byte, in seconds."""
        return np.array(self._shape.prices)

    @property
    def least_bytes(self) -> float:
        """Bytes that the full model holds at least, but for what belongs to parameters."""
        return self._shape.bytes(self.each)

    @cached_property
    def free_sums(self) -> StepSums:
        return self._setting.sums(self.free.usage)

    @cached_property
    def lean_sums(self) -> StepSums:
        return self._setting.sums(self.lean.usage)


class _Ways:
    """The pipelines that a microbatch may run through, ``count`` times a step.

    between, common: see `Staged.sending`.
    """

    def __init__(
        self, setting: StepConfig, count: int, staged: Staged, between: float, common: float
    ) -> None:
        self._setting, self.count, self._staged = setting, count, staged
        self._bytes = between, common
        self._cache: dict[int, StepConfig] = {}

    @cached_property
    def _pipes(self) -> list[Pipe]:
        return [self._staged.sending(pipe, *self._bytes) for pipe in self._staged.pipes]

    def __getitem__(self, k: int) -> StepConfig:
        if k not in self._cache:
            self._cache[k] = replace(self._setting, microbatches=self.count, pipe=self._pipes[k])
        return self._cache[k]

    @property
    def ranks(self) -> int:
        """Of each of the pipelines."""
        return self._staged.ranks

    def totals(self, plain: Sequence[StepSums]) -> list[list[float]]:
        """Seconds of steps by each pipeline that take these sums, nothing recomputed; [pipes, sums].

        All that a schedule says of them is how long ranks wait, and whether backward is split.
        """
        once: dict[bool, list[tuple[float, float]]] = {}
        totals = []
        for k, pipe in enumerate(self._pipes):
            overlap = self[k].overlap_model
            if pipe.splits_backward not in once:
                once[pipe.splits_backward] = [
                    (busy_seconds(sums, overlap), slot_seconds(sums, overlap) / overlap.stages)
                    for sums in plain
                ]
            waits, hops, spent = overlap.filling, overlap.hops, once[pipe.splits_backward]
            totals.append([pipe.delayed(b + waits * s + hops, s, self.count) for b, s in spent])
        return totals


@dataclass(frozen=True)
class _Bounded:
    """A microbatch on one mesh. batch: its sequences. uneven: seconds of a step over those with equal stages,
    by pipeline. bound: in seconds, of any placements. state: bytes that parameters take at least on the ranks
    of a pipeline together. shared: seconds of a microbatch that it takes less at most than on the mesh that
    was solved. proven: the bound, or what is known of a step of a single microbatch."""

    mesh: Mesh
    batch: int
    bare: _Bare
    strategies: _StrategyCosts
    ways: _Ways
    uneven: tuple[float, ...]
    bound: float
    state: float
    budget: float | None
    shared: float
    proven: float

    def _sums(self, setting: StepConfig, *, lean: bool) -> list[StepSums]:
        """Of a microbatch that nothing is recomputed for, by strategies. lean: of those that hold less."""
        key = (setting.apart, setting.sums_up, lean)
        if key not in self._cache:
            sums = self.strategies.sums(self.bare.each, setting, lean=lean)
            plain = self.bare.lean_sums if lean else self.bare.free_sums
            self._cache[key] = [plain + extra for extra in sums]
        return self._cache[key]

    @cached_property
    def _cache(self) -> dict[tuple[tuple[str, ...], int, bool], list[StepSums]]:
        return {}

    @cached_property
    def _steps(self) -> list[list[float]]:
        """Seconds that the fastest placements take if nothing is recomputed; [pipes, lives].

        Where something else fits, inf for what parameters do not fit in.
        """
        each, setting = self.bare.each, self.ways[0]
        totals = self.ways.totals(self._sums(setting, lean=False))
        if self.budget is None:
            return totals
        limit = _LEANER * self.budget
        states = self.strategies.at(each, lean=False)
        over = [self.bare.free.state_bytes(setting, extra) > limit for extra in states]
        if all(over):
            return totals
        return [[inf if out else t for t, out in zip(row, over, strict=True)] for row in totals]

    @cached_property
    def _floors(self) -> list[tuple[float, int]]:
        """(the least of these, number of the pipeline), the fastest first."""
        return sorted((self.uneven[k] * min(row, default=inf), k) for k, row in enumerate(self._steps))

    def bounds(self) -> Iterator[float]:
        """Seconds that no placements which fit go below, in any of the pipelines."""
        proven = self.proven
        yield proven
        if self.budget is None or self.ways[0].pipe.speeds:
            # how fast unlike ranks are is an estimate, which says nothing of what they take at least
            return
        for rounds in range(1, self.bare.looks + 1):
            for bound in self._looked(self.budget, rounds, proven):
                proven = max(proven, bound)
                yield proven
        if self.shared or not self.bare.is_end:
            # what all sequences share is little between two ends, and a single data rank may share nothing
            own = self.bare.floors_of(self.mesh)
            if own is not None:
                yield max(proven, self._least(self.budget, own, proven))

    def of(self, formulated: ShardingProblem) -> Iterator[float]:
        """The same by its own problem."""
        yield self.proven
        if self.budget is not None and not self.ways[0].pipe.speeds:
            yield from self._whole(formulated, self.budget, 1.0)

    def _whole(self, formulated: ShardingProblem, budget: float, share: float) -> Iterator[float]:
        """Parameters and activations together; share: see `joint_dual_bounds`."""
        ways = [
            way for k in range(len(self.uneven)) for way in step_options(self.ways[k], self.bare.prices, k)
        ]
        return joint_dual_bounds(formulated, ways, budget, recompute=self.bare.recompute, share=share)

    def _looked(self, budget: float, rounds: int, proven: float) -> Iterator[float]:
        """By so many ends, of which the last one may bound the step. proven: see `_least`."""
        own = self.bare.formulated_on(self.mesh, rounds - 1)
        bound = None
        if own is not None:
            for bound in self._whole(own[0], budget, own[1]):
                yield bound
        if bound is None:
            yield self._least(
                budget, lambda regime: np.maximum(0.0, self.bare.floors(regime, rounds) - self.shared), proven
            )

    def _least(self, budget: float, least: Callable[[DualRegime], Array], proven: float) -> float:
        """least: seconds of a microbatch at least with what it holds, by the price of a byte. proven: a bound
        that was found already; one that is not above it says nothing, whatever it is."""
        lowest = inf
        for k in range(len(self.uneven)):
            for bound in self._lower(k):
                lowest = min(lowest, bound.least(self.bare.prices, least, budget))
            if lowest <= proven:
                break
        return lowest

    def _lower(self, k: int) -> list[DecomposedDualBound]:
        """What each of the pipelines takes at least of what parameters do."""
        if k not in self._bounds:
            self._bounds[k] = [
                DecomposedDualBound.of(self.ways[k], strategies)
                for strategies in self.strategies.least(self.bare.each)
            ]
        return self._bounds[k]

    @cached_property
    def _bounds(self) -> dict[int, list[DecomposedDualBound]]:
        return {}

    def where(self, setting: StepConfig) -> Configuration:
        """The configuration that runs in a setting."""
        return Configuration(self.mesh, self.batch, self.ways.count, setting.pipe)

    def closer(self, seen: Estimated) -> Estimated | None:
        """With the seconds of the fastest pipeline that has room for parameters, however little else fits."""
        if not self.may_fit():
            return None
        floor, k = self._floors[0]
        setting = self.ways[k]
        return replace(
            seen,
            configuration=self.where(setting),
            setting=setting,
            seconds=max(seen.seconds, floor),
            view=_Unlimited(self),
            floor=floor,
        )

    def may_fit(self) -> bool:
        if self.budget is None:
            return True
        capacity = self.ways.ranks * self.budget
        # the fullest rank of a pipeline holds no less than the mean
        return self.state <= capacity and self.state + self.bare.least_bytes <= capacity

    def best(self) -> tuple[float | None, StepConfig]:
        """(seconds, setting) of the fastest that fits; None in place of seconds if none seems to fit."""
        ways, of_lean = self.ways, None
        steps, floors = self._steps, self._floors
        best: tuple[float, StepConfig] | None = None
        for floor, k in floors:
            if best is not None and floor >= best[0]:
                break
            filled = self._best(ways[k], steps[k], lean=False)
            if self.budget is not None and (filled is None or filled[0].recompute):
                if of_lean is None:
                    of_lean = ways.totals(self._sums(ways[k], lean=True))
                other = self._best(ways[k], of_lean[k], lean=True)
                filled = min((b for b in (filled, other) if b is not None), key=lambda b: b[1], default=None)
            if filled is not None and (best is None or self.uneven[k] * filled[1] < best[0]):
                best = (self.uneven[k] * filled[1], filled[0])
        return (None, ways[floors[0][1]]) if best is None else best

    def _best(
        self, setting: StepConfig, floors: Sequence[float], *, lean: bool
    ) -> tuple[StepConfig, float] | None:
        """(setting, seconds of a step) of the fastest that fits, or None.

        floors: seconds of a step that nothing is recomputed for, by strategies. lean: see `_sums`.
        """
        filling, sums = self.bare.lean if lean else self.bare.free, self._sums(setting, lean=lean)
        best: tuple[StepConfig, float] | None = None
        for extra, plain, floor in zip(
            self.strategies.at(self.bare.each, lean=lean), sums, floors, strict=True
        ):
            # recomputing only adds, but for rounding
            if best is not None and floor > (1 + _ROUNDING) * best[1]:
                continue
            budget = self.budget
            fill = (setting, floor) if budget is None else filling.best(setting, budget, extra, plain)
            if fill is not None and (best is None or fill[1] < best[1]):
                best = fill
        return best

    def leaving(self, bytes_: float) -> tuple[float, StepConfig]:
        """(seconds, setting) of the fastest that leaves so many bytes of the memory; inf if none seems to."""
        less = self if self.budget is None else replace(self, budget=self.budget - bytes_)
        seconds, setting = less.best()
        return inf if seconds is None else seconds, setting

    def leanest(self) -> StepConfig:
        """The setting of the pipeline that holds least: gradients that are put off keep what they need."""
        settings = [self.ways[k] for k in range(len(self.uneven))]
        return min(settings, key=lambda s: (s.pipe.splits_backward, s.pipe.in_flight(s.microbatches)))

    def leaves_room(self) -> bool:
        """Whether parameters alone fit, in any of the placements."""
        setting, each = self.ways[0], self.bare.each
        ways = ((self.bare.free, False), (self.bare.lean, True))
        return self.budget is None or any(
            filling.state_bytes(setting, extra) <= self.budget
            for filling, lean in ways
            for extra in self.strategies.at(each, lean=lean)
        )


@dataclass(frozen=True)
class _Unlimited:
    """A microbatch on one mesh of which it is known what it takes without a memory limit."""

    bounded: _Bounded

    def closer(self, seen: Estimated) -> Estimated | None:
        """The fastest that fits."""
        best, setting = self.bounded.best()
        if best is None and not self.bounded.may_fit():
            return None
        return replace(
            seen,
            configuration=self.bounded.where(setting),
            setting=setting,
            seconds=inf if best is None else best,
            bound=seen.bound if best is None else min(seen.bound, best),
            hopeless=best is None and not self.bounded.leaves_room(),
            view=None,
        )

    def may_fit(self) -> bool:
        return self.bounded.may_fit()


class _StrategyCosts:
    """What the parameters of a shape may take on one mesh, by the sequences of a data rank.

    Placements of different microbatches may use parameters differently (experts are gathered for many
    sequences, and exchange rows for few), so what they take is interpolated as everything else is.
    """

    def __init__(self, shape: MeshFamily, mesh: Mesh, zeros: _Zeros) -> None:
        self._shape, self._mesh, self._zeros = shape, mesh, zeros
        self._links = zeros.prices.roughly(mesh).reshard.links
        self._used: dict[str, list[AssignmentCosts]] = {}
        self._sums: dict[tuple[str, tuple[str, ...], int], list[StepSums]] = {}
        self._at: dict[tuple[int, bool], list[AssignmentCosts]] = {}
        self._least: dict[str, ZeroStageCosts] = {}

    def at(self, each: int, *, lean: bool) -> list[AssignmentCosts]:
        """By stages of ZeRO. lean: of placements that hold less."""
        if (each, lean) not in self._at:
            low, high, t = self._shape.place(each)
            lows, highs = _paired(self._of(low, lean)[1], self._of(high, lean)[1], t)
            self._at[each, lean] = [
                a if a is b else between(a, b, t) for a, b in zip(lows, highs, strict=True)
            ]
        return self._at[each, lean]

    def sums(self, each: int, setting: StepConfig, *, lean: bool) -> list[StepSums]:
        """The seconds among it, in a setting of which only matters whether there are several microbatches,
        and a pipeline."""
        low, high, t = self._shape.place(each)
        lows, highs = _paired(self._seconds(low, setting, lean), self._seconds(high, setting, lean), t)
        return [a if a is b else mixed(a, b, t) for a, b in zip(lows, highs, strict=True)]

    def least(self, each: int) -> list[ZeroStageCosts]:
        """What they take at least, however they are used by the one end or the other."""
        low, high, _ = self._shape.place(each)
        terms = []
        for used in {end.least.likeness: end.least for end in (low, high)}.values():
            if used.likeness not in self._least:
                zero = self._zeros.of(used)
                tied = zero.ties(self._mesh, self._links, 1 - self._zeros.overlap)
                costs = zero.strategy_costs(self._mesh, self._links)
                self._least[used.likeness] = ZeroStageCosts.of(costs, tied=tied)
            terms.append(self._least[used.likeness])
        return terms

    def _seconds(self, end: AnchorProblem, setting: StepConfig, lean: bool) -> list[StepSums]:
        likeness, costs = self._of(end, lean)
        key = (likeness, setting.apart, setting.sums_up)
        if key not in self._sums:
            self._sums[key] = [setting.sums(extra) for extra in costs]
        return self._sums[key]

    def _of(self, end: AnchorProblem, lean: bool) -> tuple[str, list[AssignmentCosts]]:
        used = (end.lean if lean else end.free).parameters
        if used.likeness not in self._used:
            self._used[used.likeness] = self._zeros.of(used).stages(self._mesh, self._links)
        return used.likeness, self._used[used.likeness]


class _Zeros:
    """What parameters take, each use of them worked out once for all meshes."""

    def __init__(self, prices: CostModels, recipe: Recipe, overlap: float) -> None:
        self.prices, self.recipe, self.overlap = prices, recipe, overlap
        self._cache: dict[str, Zero] = {}

    def of(self, used: Parameters) -> Zero:
        if used.likeness not in self._cache:
            self._cache[used.likeness] = Zero(used, self.prices.cluster, self.recipe)
        return self._cache[used.likeness]


def _paired(low: list[V], high: list[V], t: float) -> tuple[list[V], list[V]]:
    """What is interpolated between two ends, stage by stage; that of one where the other has none."""
    if t == 0.0 or not high or low is high:
        return low, low
    if t == 1.0 or not low:
        return high, high
    most = max(len(low), len(high))
    # where nothing is gathered all stages are the same
    return (low * most if len(low) == 1 else low), (high * most if len(high) == 1 else high)
