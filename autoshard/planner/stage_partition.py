"""Cut a planned model into pipeline stages and choose their schedule, by the simulated step.

What is priced is the placed program, op by op: the search says how every op runs, this where the stages
end. Every schedule gets the cuts that are best for it, and the one with the shortest simulated step is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cost.recipe import Recipe
from autoshard.cost.stage_machines import rooms, stage_machines
from autoshard.cost.step_time import slot_seconds, step_time
from autoshard.errors import InfeasibleError
from autoshard.ir import Folded
from autoshard.passes.pipeline import LoweringOptions, place
from autoshard.passes.stages.unpartitioned import Unpartitioned
from autoshard.planner.slot_costs import NO_STAGES, slots_of
from autoshard.planner.stage_slots import Slots, Trial
from autoshard.schedules.check import in_flight_of_stages
from autoshard.schedules.registry import lookup, make, tried
from autoshard.schedules.schedule import Schedule
from autoshard.schedules.timeline import StageCosts, Timeline, makespan, simulate
from autoshard.search.plan.plan import Pipeline
from autoshard.search.solve.formulate import layer_calls
from autoshard.search.solve.memory_text import bytes_up
from autoshard.search.solve.solve_placements import PlacementSolution as Placement
from autoshard.search.solve.stage_cuts import CutRequest

#: by more than this share a simulated step never differs from another for rounding alone
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Staging:
    """A pipeline, cut.

    schedule: of the full step. costs: of its stages. seconds: of its simulated step, without collectives of
    parameters that come once a step. tried: schedule -> seconds of a step with the best cuts for it, None
    where nothing fits. layers: costs of stages with the same number of layers in each, None where there are
    too few layers. bare: seconds of those, where nothing hides them, on the rank that holds most.
    """

    pipeline: Pipeline
    schedule: Schedule
    costs: StageCosts
    seconds: float
    tried: dict[str, float | None]
    layers: StageCosts | None = None
    bare: float = 0.0

    @cached_property
    def timeline(self) -> Timeline:
        """Of the simulated step."""
        return simulate(self.schedule, self.costs)

    @cached_property
    def equal(self) -> float | None:
        """Seconds with the same number of layers in every stage, None where there are too few layers."""
        return None if self.layers is None else makespan(self.schedule, self.layers)


def scheduled_seconds(placements: Placement, schedule: str) -> tuple[float, float]:
    """What the search counts in a schedule: seconds of one microbatch of the full model, with what its
    collectives of parameters take that nothing hides, and of those that come once a step, on a rank that
    holds as many of them as the others. Nothing hides collectives of activations where backward is split."""
    free = placements.setting
    setting = replace(free, pipe=replace(free.pipe, schedule=schedule))
    sums, overlap = setting.sums(placements.usage), setting.overlap_model
    slot = slot_seconds(sums, overlap)
    moved = slot - (sums.work_forward + sums.work_backward)
    rest = step_time(sums, overlap).exposed - setting.microbatches * moved / overlap.stages
    return slot, max(0.0, rest)


class Schedules:
    """Schedules by what they are made of, each made once."""

    def __init__(self) -> None:
        self._cache: dict[tuple[str, int, int, int, int], Schedule] = {}
        #: identity of one of them -> most microbatches in flight, by stage
        self._flying: dict[int, tuple[int, ...]] = {}

    def of(self, name: str, ranks: int, microbatches: int, chunks: int, slices: int = 1) -> Schedule:
        key = (name, ranks, microbatches, chunks, slices)
        if key not in self._cache:
            schedule = self._cache[key] = make(*key)
            self._flying[id(schedule)] = tuple(-(-n // slices) for n in in_flight_of_stages(schedule))
        return self._cache[key]

    def flying(self, schedule: Schedule) -> tuple[int, ...]:
        """The most microbatches that each stage of one of them holds at once."""
        return self._flying[id(schedule)]


class StagePartition:
    """The stages of a plan whose pipeline is not cut yet; every schedule is cut once.

    placements: of the search; the ops, which are priced one by one here, are scaled to what it counts for a
    microbatch (`scheduled_seconds`), so that plans with and without a pipeline are compared by one measure.
    Of collectives of parameters a rank has as much as it holds. budget: bytes per rank; unlike ranks may have
    more (`stage_machines.rooms`).
    stages: that have parameters already, by name.
    """

    def __init__(
        self,
        folded: Folded,
        options: LoweringOptions,
        cluster: Cluster,
        recipe: Recipe,
        budget: float | None,
        *,
        placements: Placement | None = None,
        schedules: Schedules | None = None,
        stages: Mapping[str, frozenset[int]] = NO_STAGES,
    ) -> None:
        assert options.plan.pipeline is not None
        self.pipeline, self.budget, self._placements = options.plan.pipeline, budget, placements
        self.microbatches = options.plan.microbatches
        self.schedules = schedules or Schedules()
        self._layers = sum(layer_calls(folded).values())
        self._folded, self.options = folded, options
        mesh, ranks = Mesh.parse(options.plan.mesh), self.pipeline.ranks
        used = cluster.used_by(mesh.world_size * ranks)
        #: bytes of every rank, () if all have as many
        self._rooms = rooms(used, stage_machines(used, mesh, ranks), budget) if budget is not None else ()
        #: the ops of forward, between which it is cut
        self.slots = slots_of(folded, options, used, recipe, ranks, stages)
        #: whether backward is split -> the same at what the search counts, and its seconds beside them
        self._scaled: dict[bool, tuple[Slots, float]] = {}
        self._trials: dict[tuple[str, int], Trial | None] = {}
        #: bytes that are not to be used, of those of the budget
        self._spare = 0.0

    @cached_property
    def uncut(self) -> Unpartitioned:
        """Placed, for whoever goes on to lower it with its cuts."""
        return Unpartitioned.of(place(self._folded, self.options))

    def seconds(self, *, fixed: bool = False) -> float:
        """Of a simulated step by the plan's own schedule, or the best one that was cut already; where no cut
        fits the own one, by the best other one. With collectives of parameters.

        Raises InfeasibleError if no cut fits any.
        """
        self._trial(self.pipeline.schedule, self.pipeline.chunks)
        if self.slots.of and not fixed:
            for kind in self._kinds():
                self._trial(*kind)
        shortest = _shortest(self._trials.values())
        if shortest is None and not fixed:
            shortest = _shortest(self._trial(*kind) for kind in self._kinds())
        if shortest is None:
            raise self._no_room()
        return shortest.total

    def spare(self, nbytes: float) -> None:
        """Cut so that at least so many bytes of the budget stay free: what stages hold for a moment inside
        their ops is not in their costs."""
        self._spare = nbytes
        self._trials.clear()

    def _kinds(self) -> list[tuple[str, int]]:
        """(schedule, chunks) that may be tried."""
        ranks = self.pipeline.ranks
        options = tried(ahead=bool(self.slots.of))
        kinds = [(n, v) for n, vs in options.items() for v in vs if ranks * v <= max(self._layers, ranks)]
        return list(dict.fromkeys([(self.pipeline.schedule, self.pipeline.chunks), *kinds]))

    def best(self, *, fixed: bool) -> Staging:
        """The stages. fixed: whether the schedule was asked for, or others may be tried, too.

        Raises InfeasibleError if no cut fits the memory.
        """
        kinds = self._kinds()
        trials = {kind: self._trial(*kind) for kind in (kinds[:1] if fixed else kinds)}
        best = _shortest(trials.values())
        if best is None:
            raise self._no_room()
        tried = {
            f"{name} x {chunks}" if chunks > 1 else name: None if trial is None else trial.seconds
            for (name, chunks), trial in trials.items()
        }
        slots, _ = self._in(best.schedule.name)
        pipeline, layers = slots.pipeline(best), slots.equal(best.schedule)
        return Staging(pipeline, best.schedule, best.costs, best.seconds, tried, layers, best.bare)

    def _trial(self, name: str, chunks: int) -> Trial | None:
        """The best cuts for one schedule; None if nothing fits."""
        if (name, chunks) not in self._trials:
            cuts = None
            if self.pipeline.ranks * chunks <= self.slots.most_stages:
                asked = self.pipeline
                schedule = self.schedules.of(name, asked.ranks, self.microbatches, chunks, asked.slices)
                budget = None if self.budget is None else self.budget - self._spare
                flying = self.schedules.flying(schedule)
                budgets = tuple(self._rooms[r] - self._spare for r in schedule.owner) if self._rooms else ()
                request = CutRequest(schedule.stages, self.microbatches, chunks, flying, budget, budgets)
                slots, bare = self._in(name)
                cuts = slots.cut(schedule, request, bare)
            self._trials[name, chunks] = cuts
        return self._trials[name, chunks]

    def _in(self, name: str) -> tuple[Slots, float]:
        """What the slots take in a schedule, and collectives of parameters beside them."""
        if self._placements is None:
            return self.slots, 0.0
        splits = lookup(name).splits_backward
        if splits not in self._scaled:
            microbatch, bare = scheduled_seconds(self._placements, name)
            self._scaled[splits] = self.slots.scaled(microbatch), bare
        return self._scaled[splits]

    def check_stages(self) -> None:
        """InfeasibleError if there are too few places to cut, whatever the memory."""
        ranks, most = self.pipeline.ranks, self.slots.most_stages
        if most < ranks:
            raise InfeasibleError(
                f"the model cannot be cut into pp={ranks} stages with parameters in each",
                why=f"there are {most} such stages at most",
                hint="use a smaller pp axis",
            )

    def _no_room(self) -> InfeasibleError:
        ranks = self.pipeline.ranks
        if self.slots.stages and self.budget is None:
            return InfeasibleError(
                f"no cuts into pp={ranks} stages leave every parameter of this call on the rank that has it",
                why="it uses parameters in another order than the first plan, or some that it did not use",
                hint="parallelize a second model for such calls",
            )
        least = float(self.slots.costs_of.state.sum()) / ranks
        return InfeasibleError(
            f"no stages of pp={ranks} fit {bytes_up(self.budget or 0.0)} per rank",
            why=f"parameters and optimizer state alone are {bytes_up(least)} per rank on average",
            hint="use more pipeline ranks, more tp or fsdp, smaller microbatches, or a larger --memory",
        )


def _shortest(trials: Iterable[Trial | None]) -> Trial | None:
    return min((t for t in trials if t is not None), key=lambda t: t.total, default=None)


def partition_stages(
    folded: Folded,
    options: LoweringOptions,
    cluster: Cluster,
    recipe: Recipe,
    budget: float | None,
    *,
    fixed: bool,
) -> Staging:
    """The stages of a plan whose pipeline is not cut yet; see `StagePartition`."""
    return StagePartition(folded, options, cluster, recipe, budget).best(fixed=fixed)
