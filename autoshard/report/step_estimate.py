"""The step of a program, simulated: what its time is spent on, and what every rank holds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.cluster.cluster import Cluster
from autoshard.ir import Node
from autoshard.program.messages import phases_of
from autoshard.program.program import Program
from autoshard.report.kept import Held
from autoshard.report.layers import layers_of_stages
from autoshard.report.pricing import Pricer, SegmentCost, placed_of
from autoshard.report.stage_costs import StagePrices, StepEnd
from autoshard.schedules.check import in_flight_of_stages
from autoshard.schedules.schedule import Action
from autoshard.simulate.pipeline import StageCosts, Timeline, makespan, simulate

#: segments that backward runs again, and parts of them (`passes.recompute`, `ir.statements.Taker`)
_AGAIN = re.compile(r"_again\d*(_part(_\d+)?)?(_\d+)?$")


@dataclass(frozen=True)
class StageRow:
    """One stage. rank: of the pipeline. layers: what it is made of.

    forward, backward: seconds per microbatch. in_flight: most microbatches whose forward has begun and whose
    backward has not ended. kept: bytes per microbatch from forward to backward.
    """

    stage: int
    rank: int
    layers: str
    forward: float
    backward: float
    in_flight: int
    kept: float


@dataclass(frozen=True)
class RankRow:
    """One pipeline rank. busy, idle: seconds of a step. held: bytes at the peak."""

    rank: int
    stages: tuple[int, ...]
    busy: float
    idle: float
    held: Held


@dataclass(frozen=True)
class Spent:
    """Seconds of a step, each a mean over the pipeline ranks; they add up to the whole step.

    compute: with what is computed again. exposed: collectives, none of them hidden behind computing, and
    the reduction of gradients at the end. p2p: by how much messages between stages make the step longer.
    bubble: waiting that is left if messages take no time. update: of the optimizer.
    """

    compute: float
    exposed: float
    p2p: float
    bubble: float
    update: float

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.p2p + self.bubble + self.update


@dataclass(frozen=True)
class StepEstimate:
    """A simulated step of all ranks.

    mfu: FLOP of the model (what is computed again not counted) over what all devices could do at their peak
    in this time. model_flop: of all microbatches.
    """

    timeline: Timeline
    costs: StageCosts
    spent: Spent
    stages: tuple[StageRow, ...]
    ranks: tuple[RankRow, ...]
    mfu: float
    model_flop: float

    @property
    def seconds(self) -> float:
        return self.timeline.makespan

    @property
    def fullest(self) -> RankRow:
        """The rank that holds most."""
        return max(self.ranks, key=lambda row: row.held.total)


def estimate_step(program: Program, cluster: Cluster, rank: int = 0) -> StepEstimate:
    """The simulated step of a program on a cluster; of one stage, its microbatches one after the other.

    rank: which rank of a stage is priced (default: the fullest).
    """
    return _Step(program, cluster, rank).estimate


class _Step:
    def __init__(self, program: Program, cluster: Cluster, rank: int) -> None:
        self.program, self.cluster = program, cluster
        self.prices = StagePrices(program, cluster, rank)
        self.schedule = self.prices.schedule
        self.timeline = simulate(self.schedule, self.prices.costs)

    @cached_property
    def estimate(self) -> StepEstimate:
        flop, dtype = program_flop(self.prices.pricer)
        device, world = self.cluster.device, self.prices.whole.world_size
        possible = self.timeline.makespan * world * device.peak_flops.get(dtype, device.peak_flops["f32"])
        return StepEstimate(
            self.timeline,
            self.prices.costs.per_microbatch(self.schedule.slices),
            self._spent(),
            tuple(self._stages()),
            tuple(self._rank(r) for r in range(self.schedule.ranks)),
            flop / possible if possible else 0.0,
            flop,
        )

    def _spent(self) -> Spent:
        ranks, ends = self.schedule.ranks, self.prices.ends
        costs = self.prices.costs
        nothing = (0.0,) * len(costs.send_forward)
        at_once = makespan(self.schedule, replace(costs, send_forward=nothing, send_backward=nothing))
        run = [self._cost(a) for row in self.schedule.actions for a in row]
        busy = sum(self.timeline.busy) / ranks
        return Spent(
            compute=sum(c.compute for c in run) / ranks,
            exposed=(sum(c.comm for c in run) + sum(_talk(end) for end in ends)) / ranks,
            p2p=self.timeline.makespan - at_once,
            bubble=at_once - busy,
            update=sum(end.update for end in ends) / ranks,
        )

    def _cost(self, action: Action) -> SegmentCost:
        return self.prices.part(action.stage, *phases_of(action, self.schedule), slice=action.slice)

    def _stages(self) -> Iterable[StageRow]:
        layers, slices = layers_of_stages(self.program), self.schedule.slices
        costs = self.prices.costs.per_microbatch(slices)
        flying = [-(-n // slices) for n in in_flight_of_stages(self.schedule, "BI")]
        for stage, owner in enumerate(self.schedule.owner):
            yield StageRow(
                stage,
                owner,
                layers[stage],
                costs.forward[stage],
                costs.backward[stage],
                flying[stage],
                costs.held[stage],
            )

    def _rank(self, rank: int) -> RankRow:
        state, timeline = self.prices.states[rank], self.timeline
        busy = timeline.busy[rank]
        held = Held(state.parameters, state.gradients, state.optimizer, timeline.peak[rank] - state.total)
        return RankRow(rank, self.prices.stages_of[rank], busy, timeline.makespan - busy, held)


def program_flop(pricer: Pricer) -> tuple[float, str]:
    """(FLOP of a step of the model on all ranks, the type that most of them are done in).

    What backward computes again counts once.
    """
    lowered = pricer.program.lowered
    done: dict[str, float] = {}
    for item in lowered.main:
        if isinstance(item, Node):
            found = pricer.flop((item,), lowered.values)
        elif _AGAIN.search(item.segment):
            continue
        else:
            segment = lowered.segments[item.segment]
            found = pricer.flop(segment.graph.nodes, placed_of(segment))
        for dtype, flop in found.items():
            done[dtype] = done.get(dtype, 0.0) + flop
    total = pricer.program.microbatches * sum(done.values())
    return total, max(done, key=lambda d: done[d], default="f32")


def _talk(end: StepEnd) -> float:
    return end.reduce + end.shared
