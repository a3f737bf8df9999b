"""The step of a program, simulated: what its time is spent on, and what every rank holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autoshard.cluster.cluster import Cluster
from autoshard.ir import Node
from autoshard.program.layers import layers_of_stages
from autoshard.program.messages import phases_of
from autoshard.program.program import Program
from autoshard.schedules.check import in_flight_of_stages
from autoshard.schedules.schedule import Action
from autoshard.schedules.timeline import StageCosts, Timeline, simulate, step_seconds
from autoshard.simulate.behaviour import Behaviour, behaviour_on
from autoshard.simulate.host_bytes import HostHeld, host_bytes
from autoshard.simulate.op_work import AGAIN
from autoshard.simulate.peaks import Peaks
from autoshard.simulate.pricing import Pricer
from autoshard.simulate.saved_for_backward import ResidentBytes
from autoshard.simulate.stage_costs import StagePrices
from autoshard.simulate.streams import Played


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
    """One pipeline rank.

    busy, idle: seconds of a step. held: most bytes between its parts, all gradients counted. peak: bytes
    where it holds most at all, with what lives within a part; at_peak: what it held as that part began.
    """

    rank: int
    stages: tuple[int, ...]
    busy: float
    idle: float
    held: ResidentBytes
    peak: float
    at_peak: ResidentBytes


@dataclass(frozen=True)
class Spent:
    """Seconds of a step, each a mean over the pipeline ranks; they add up to the full step.

    compute: with what is recomputed. exposed: collectives that no computing hides; axes: the same per
    mesh axis (pp: gradients of parameters that stages share; host: copies to its memory and back). p2p: by
    how much messages between stages make the step longer.
    bubble: waiting that is left if messages take no time. update: of the optimizer.
    """

    compute: float
    exposed: float
    p2p: float
    bubble: float
    update: float
    axes: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.p2p + self.bubble + self.update


@dataclass(frozen=True)
class StepEstimate:
    """A simulated step of all ranks.

    seconds: of a step. mfu: FLOP of the model (what is recomputed not counted) over what all devices
    could do at their peak in this time. model_flop: of all microbatches. host: what every pipeline rank keeps
    in the memory of its node, empty if nothing is offloaded.
    """

    timeline: Timeline
    costs: StageCosts
    spent: Spent
    stages: tuple[StageRow, ...]
    ranks: tuple[RankRow, ...]
    mfu: float
    model_flop: float
    seconds: float
    host: tuple[HostHeld, ...] = ()

    @property
    def fullest(self) -> RankRow:
        """The rank that holds most."""
        return max(self.ranks, key=lambda row: row.peak)


def estimate_step(
    program: Program, cluster: Cluster, rank: int = 0, behaviour: Behaviour | None = None
) -> StepEstimate:
    """The simulated step of a program on a cluster; of one stage, its microbatches one after the other.

    rank: which rank of a stage is priced (default: the fullest). behaviour: of the code that runs it
    (default: our own runtime).
    """
    return simulated(program, cluster, rank, behaviour)[0]


def simulated(
    program: Program, cluster: Cluster, rank: int = 0, behaviour: Behaviour | None = None
) -> tuple[StepEstimate, StagePrices]:
    """`estimate_step`, with the prices it was made of."""
    behaviour = behaviour or behaviour_on(cluster.device, program.codegen)
    prices = StagePrices(program, cluster, rank, behaviour)
    return _Step(prices).estimate, prices


def spent_in(prices: StagePrices) -> Spent:
    """What the simulated step of a program that was priced is spent on."""
    return _Step(prices).spent


class _Step:
    def __init__(self, prices: StagePrices) -> None:
        self.prices, self.program, self.behaviour = prices, prices.program, prices.behaviour
        self.schedule = prices.schedule
        self.timeline = simulate(self.schedule, prices.costs)

    @cached_property
    def peaks(self) -> Peaks:
        return Peaks(self.prices)

    @cached_property
    def estimate(self) -> StepEstimate:
        flop, dtype = program_flop(self.prices.pricer)
        possible = self.seconds * self.prices.cluster.peak(dtype, self.prices.whole.world_size)
        return StepEstimate(
            self.timeline,
            self.prices.costs.per_microbatch(self.schedule.slices),
            self.spent,
            tuple(self._stages()),
            tuple(self._rank(r) for r in range(self.schedule.ranks)),
            flop / possible if possible else 0.0,
            flop,
            self.seconds,
            host_bytes(self.prices) if self.program.offload else (),
        )

    @cached_property
    def seconds(self) -> float:
        return self._length(self.prices.costs)

    def _length(self, costs: StageCosts) -> float:
        return step_seconds(self.schedule, costs, self.behaviour.steps_overlap)

    @property
    def spent(self) -> Spent:
        ranks, ends = self.schedule.ranks, self.prices.ends
        costs = self.prices.costs
        at_once = self._length(self._without_sends(costs))
        # counted by plain tuples: there are as many actions as microbatches times stages
        kinds = Counter(
            tuple([(a.kind, a.stage, a.slice) for a in turn]) for row in self.schedule.turns for turn in row
        )
        often = {tuple(Action(k, stage, 0, c) for k, stage, c in turn): n for turn, n in kinds.items()}
        run = [(self._played(turn), n) for turn, n in often.items()]
        around = sum(end.reduce - sum(end.axes) for end in ends)
        ahead, back = self.prices.waits
        waits = {"F": ahead, "B": back, "I": back}
        waited = sum(n * waits[a.kind][a.stage] for turn, n in often.items() for a in turn if a.kind in waits)
        mesh = self.prices.pricer.mesh
        streams = max((len(p.exposed) for p, _ in run), default=len(mesh.sizes))
        axes = [
            sum(p.exposed[k] * n for p, n in run if p.exposed) + sum(end.axes[k] for end in ends if end.axes)
            for k in range(max(streams, len(mesh.sizes)))
        ]
        named = {name: seconds / ranks for name, seconds in zip(mesh.names, axes, strict=False)}
        if len(axes) > len(mesh.names):
            named["host"] = sum(axes[len(mesh.names) :]) / ranks
        shared = sum(end.shared for end in ends) / ranks
        return Spent(
            compute=(sum(p.compute * n for p, n in run) + around) / ranks,
            exposed=sum(axes) / ranks + shared,
            p2p=self.seconds - at_once,
            bubble=at_once - (sum(self.timeline.busy) - waited) / ranks,
            update=sum(end.update for end in ends) / ranks,
            axes={**named, "pp": shared} if shared else named,
        )

    def _without_sends(self, costs: StageCosts) -> StageCosts:
        """The costs if messages between stages took no time."""
        nothing = (0.0,) * len(costs.send_forward)
        slices = self.schedule.slices
        ahead, back = ([w for w in side for _ in range(slices)] for side in self.prices.waits)
        return replace(
            costs,
            send_forward=nothing,
            send_backward=nothing,
            forward=tuple(a - b for a, b in zip(costs.forward, ahead, strict=True)),
            backward=tuple(a - b for a, b in zip(costs.backward, back, strict=True)),
            paired={
                (f, b): seconds - ahead[f * slices] - back[b * slices]
                for (f, b), seconds in costs.paired.items()
            },
            backward_input=tuple(a - b for a, b in zip(costs.backward_input, back, strict=True)),
        )

    def _played(self, turn: Sequence[Action]) -> Played:
        action = turn[0]
        parts = self.prices.parts_of(action.stage)
        if len(turn) > 1:
            return parts.paired(action.stage, turn[1].stage)
        return parts.of(action.stage, *phases_of(action, self.schedule), slice=action.slice)

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
        held = ResidentBytes(
            state.parameters, state.gradients, state.optimizer, timeline.peak[rank] - state.total
        )
        at_peak, peak = self.peaks.all[rank]
        stages = self.prices.stages_of[rank]
        return RankRow(rank, stages, busy, self.seconds - busy, held, peak, at_peak)


def program_flop(pricer: Pricer) -> tuple[float, str]:
    """(FLOP of a step of the model on all ranks, the type that most of them are done in).

    What backward recomputes counts once.
    """
    lowered = pricer.program.lowered
    done: dict[str, float] = {}
    for item in lowered.main:
        if isinstance(item, Node):
            result = pricer.flop((item,), lowered.values)
        elif AGAIN.search(item.segment):
            continue
        else:
            segment = lowered.segments[item.segment]
            nodes = [n for n in segment.graph.nodes if not any(map(AGAIN.search, n.outs))]
            result = pricer.flop(nodes, segment.placed())
        for dtype, flop in result.items():
            done[dtype] = done.get(dtype, 0.0) + flop
    total = pricer.program.microbatches * sum(done.values())
    return total, max(done, key=lambda d: done[d], default="f32")
