"""Cut a planned model into pipeline stages and choose their schedule, by the simulated step.

What is priced is the placed program, op by op: the search says how every op runs, this where the stages
end. Every schedule gets the cuts that are best for it, and the one with the shortest simulated step is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Axis, Mesh
from autoshard.cost.collective import AxisLink, link_of, seconds
from autoshard.cost.recipe import Recipe
from autoshard.errors import InfeasibleError
from autoshard.ir import Call, Folded
from autoshard.ir.statements import Statement, Statements
from autoshard.passes.pipeline import Lowering, place
from autoshard.passes.slice_places import ATTENTION, ATTENTION_BACKWARD
from autoshard.passes.stage_ends import stays
from autoshard.passes.stage_places import places_apart
from autoshard.passes.uncut import Uncut
from autoshard.placement import R
from autoshard.program.program import Program, Signature
from autoshard.report.estimate import Estimator, placed_of
from autoshard.schedules.check import in_flight_of_stages
from autoshard.schedules.registry import make
from autoshard.schedules.schedule import Schedule
from autoshard.search.amounts import bytes_up
from autoshard.search.cuts import Ask, Line, best_cuts, places_of
from autoshard.search.pipe import TRIED
from autoshard.search.plan import Cut, Pipeline
from autoshard.search.problems import layer_calls
from autoshard.search.settle import Placed as Placement
from autoshard.simulate.pipeline import (
    StageCosts,
    Timeline,
    least_makespan,
    makespan,
    peak_bytes,
    simulate,
)
from autoshard.simulate.slices import in_slices
from autoshard.staged_state import state_of

#: by more than this share a simulated step never differs from another for rounding alone
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Staging:
    """A pipeline, cut.

    schedule: of the whole step. costs: of its stages. seconds: of its simulated step, collectives of
    parameters left out. tried: schedule -> seconds of a step with the best cuts for it, None where nothing
    fits. layers: costs of stages with the same number of layers in each, None where there are too few layers.
    """

    pipeline: Pipeline
    schedule: Schedule
    costs: StageCosts
    seconds: float
    tried: dict[str, float | None]
    layers: StageCosts | None = None

    @cached_property
    def timeline(self) -> Timeline:
        """Of the simulated step."""
        return simulate(self.schedule, self.costs)

    @cached_property
    def equal(self) -> float | None:
        """Seconds with the same number of layers in every stage, None where there are too few layers."""
        return None if self.layers is None else makespan(self.schedule, self.layers)


def bare_seconds(placed: Placement) -> float:
    """Seconds of collectives of parameters that nothing hides, in one step on a rank of a pipeline."""
    sums, setting = placed.setting.sums(placed.taken), placed.setting
    talk = setting.microbatches * (sums.talk_forward + sums.talk_backward) / setting.pipe.ranks
    return max(0.0, placed.step.exposed - talk)


def microbatch_seconds(placed: Placement) -> float:
    """Seconds of computing and talking in one microbatch of the whole model, as the search counts them."""
    sums = placed.setting.sums(placed.taken)
    return sums.work_forward + sums.work_backward + sums.talk_forward + sums.talk_backward


def in_parts(nbytes: float, link: AxisLink, inside: AxisLink) -> float:
    """Seconds to send a value between stages in a part per rank of an axis, and to gather it behind."""
    return float(seconds("send", nbytes / inside.size, link) + seconds("all_gather", nbytes, inside))


def pipe_link(cluster: Cluster, inner: Mesh, ranks: int) -> AxisLink:
    """Between neighbouring pipeline ranks, each of which is a whole inner mesh."""
    whole = Mesh((Axis("pp", ranks), *inner.axes))
    return link_of(cluster.used_by(whole.world_size), whole, 0)


class Schedules:
    """Schedules by what they are made of, each made once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int, int, int], Schedule] = {}

    def of(self, name: str, ranks: int, microbatches: int, chunks: int, slices: int = 1) -> Schedule:
        key = (name, ranks, microbatches, chunks, slices)
        if key not in self._known:
            self._known[key] = make(*key)
        return self._known[key]


@dataclass(frozen=True)
class _Trial:
    """A schedule with its best cuts. ends: the slots behind which its stages end."""

    schedule: Schedule
    chunks: int
    ends: tuple[int, ...]
    costs: StageCosts
    seconds: float


class Cutting:
    """The stages of a plan whose pipeline is not cut yet; every schedule is cut once.

    microbatch: seconds that the search counts for computing and talking in one microbatch of the whole model;
    the ops, which are priced one by one here, are scaled to that, so that plans with and without a pipeline
    are compared by one measure. budget: bytes per rank.
    """

    def __init__(
        self,
        folded: Folded,
        how: Lowering,
        cluster: Cluster,
        recipe: Recipe,
        budget: float | None,
        *,
        microbatch: float | None = None,
        schedules: Schedules | None = None,
    ) -> None:
        assert how.plan.pipeline is not None
        self.pipeline, self.microbatches, self.budget = how.plan.pipeline, how.plan.microbatches, budget
        self.schedules = schedules or Schedules()
        self._layers = sum(layer_calls(folded).values())
        #: placed, for whoever goes on to lower it with its cuts
        self.uncut = Uncut.of(place(folded, how))
        devices = Mesh.parse(how.plan.mesh).world_size * self.pipeline.ranks
        self._line = _Slots(self.uncut, folded, how, cluster.used_by(devices), recipe, self.pipeline.ranks)
        if microbatch is not None:
            self._line.scale(microbatch)
        self._trials: dict[tuple[str, int], _Trial | None] = {}
        #: bytes that are not to be used, of those of the budget
        self._spare = 0.0

    def seconds(self, *, fixed: bool = False) -> float:
        """Of a simulated step by the plan's own schedule, or the best one that was cut already; where no cut
        fits the own one, by the best other one.

        Raises InfeasibleError if no cut fits any.
        """
        self._trial(self.pipeline.schedule, self.pipeline.chunks)
        found = _shortest(self._trials.values())
        if found is None and not fixed:
            found = _shortest(self._trial(*kind) for kind in self._kinds())
        if found is None:
            raise self._no_room()
        return found.seconds

    def spare(self, nbytes: float) -> None:
        """Cut so that at least so many bytes of the budget stay free: what stages hold for a moment inside
        their ops is not in their costs."""
        self._spare = nbytes
        self._trials.clear()

    def _kinds(self) -> list[tuple[str, int]]:
        """(schedule, chunks) that may be tried."""
        ranks = self.pipeline.ranks
        kinds = [(n, v) for n, vs in TRIED.items() for v in vs if ranks * v <= max(self._layers, ranks)]
        return list(dict.fromkeys([(self.pipeline.schedule, self.pipeline.chunks), *kinds]))

    def best(self, *, fixed: bool) -> Staging:
        """The stages. fixed: whether the schedule was asked for, or others may be tried, too.

        Raises InfeasibleError if no cut fits the memory.
        """
        kinds = self._kinds()
        found = {kind: self._trial(*kind) for kind in (kinds[:1] if fixed else kinds)}
        best = _shortest(found.values())
        if best is None:
            raise self._no_room()
        tried = {
            f"{name} x {chunks}" if chunks > 1 else name: None if trial is None else trial.seconds
            for (name, chunks), trial in found.items()
        }
        pipeline, layers = self._line.pipeline(best), self._line.equal(best.schedule)
        return Staging(pipeline, best.schedule, best.costs, best.seconds, tried, layers)

    def _trial(self, name: str, chunks: int) -> _Trial | None:
        """The best cuts for one schedule; None if nothing fits."""
        if (name, chunks) not in self._trials:
            found = None
            if self.pipeline.ranks * chunks <= self._line.most_stages:
                asked = self.pipeline
                schedule = self.schedules.of(name, asked.ranks, self.microbatches, chunks, asked.slices)
                budget = None if self.budget is None else self.budget - self._spare
                found = self._line.cut(schedule, chunks, budget)
            self._trials[name, chunks] = found
        return self._trials[name, chunks]

    def _no_room(self) -> InfeasibleError:
        ranks = self.pipeline.ranks
        least = float(self._line.state.sum()) / ranks
        return InfeasibleError(
            f"no stages of pp={ranks} fit {bytes_up(self.budget or 0.0)} per rank",
            why=f"parameters and optimizer state alone are {bytes_up(least)} per rank on average",
            hint="use more pipeline ranks, more tp or fsdp, smaller microbatches, or a larger --memory",
        )


def _shortest(trials: Iterable[_Trial | None]) -> _Trial | None:
    return min((t for t in trials if t is not None), key=lambda t: t.seconds, default=None)


def staged(
    folded: Folded,
    how: Lowering,
    cluster: Cluster,
    recipe: Recipe,
    budget: float | None,
    *,
    fixed: bool,
    microbatch: float | None = None,
) -> Staging:
    """The stages of a plan whose pipeline is not cut yet; see `Cutting`."""
    return Cutting(folded, how, cluster, recipe, budget, microbatch=microbatch).best(fixed=fixed)


class _Slots:
    """The ops of forward in order, with what each of them costs as a part of a stage."""

    def __init__(
        self, uncut: Uncut, folded: Folded, how: Lowering, cluster: Cluster, recipe: Recipe, ranks: int
    ) -> None:
        self.homes = places_apart(uncut, folded.joint)
        whole = self.homes.uncut.whole  # with copies of gradients that serve several parameters
        self.whole, self.how = whole, how
        self.ranks = ranks
        self.slices = how.plan.pipeline.slices if how.plan.pipeline is not None else 1
        inner = Mesh.parse(how.plan.mesh)
        self.estimator = Estimator(_bare(whole, folded, how), cluster)
        self.link = pipe_link(cluster, inner, ranks)
        self.links = self.estimator.links
        #: by identity of their type and layout, which the program keeps
        self._bytes: dict[int, float] = {}
        self.ops = [s for s in whole.all if not s.backward]
        calls = [i for i in whole.lowered.main if isinstance(i, Call) and not i.backward]
        self.numbers = {id(call): k for k, call in enumerate(calls)}
        self.count = len(self.ops)
        self.forward, self.input, self.weight = (np.zeros(self.count) for _ in range(3))
        #: bytes of a microbatch: kept from forward on, the part of it that weight gradients need, and what
        #: backward makes for those
        self.held, self.held_weight, self.made = (np.zeros(self.count) for _ in range(3))
        once = how.plan.microbatches * self.slices == 1
        state = state_of(self.homes, folded, how, recipe, self.bytes_of, once=once)
        self.state, self.update = state.held, state.updated / cluster.device.memory_bandwidth
        self.copies = state.copies
        #: the part of forward and backward that is attention
        self.seen, self.seen_back = np.zeros(self.count), np.zeros(self.count)
        self.makers = self._makers()
        self._seconds()
        self._kept()
        self.send = self._sends()
        self.places = self._places()

    def scale(self, microbatch: float) -> None:
        """Make all ops together take so many seconds."""
        total = float((self.forward + self.input + self.weight).sum())
        factor = microbatch / total if total else 1.0
        self.forward, self.input, self.weight = (
            factor * self.forward,
            factor * self.input,
            factor * self.weight,
        )
        self.seen, self.seen_back = factor * self.seen, factor * self.seen_back

    def bytes_of(self, value: str) -> float:
        """Bytes of a value on a rank; the values of alike layers have one type and layout between them."""
        placed = self.whole.values[value]
        found = self._bytes.get(id(placed))
        if found is None:
            found = self._bytes[id(placed)] = self.estimator.bytes_of(placed.type, placed.layout)
        return found

    def _seconds(self) -> None:
        known: dict[tuple[str, int, bool], float] = {}
        tables = {name: placed_of(s) for name, s in self.whole.lowered.segments.items()}
        for place_, statement in enumerate(self.whole.all):
            slot = self.homes.at[place_]
            message = statement.node.op.startswith("comm.")
            if slot is None or (message and place_ in self.homes.weight):
                continue  # collectives of parameters run beside the pipeline
            item = self.whole.lowered.main[statement.item]
            if isinstance(item, Call):
                key = (item.segment, statement.number, statement.backward)
                if key not in known:
                    node = self.whole.lowered.segments[item.segment].graph.nodes[statement.number]
                    known[key] = self.estimator.node(node, tables[item.segment]).seconds
                cost = known[key]
            else:
                cost = self.estimator.node(item, self.whole.lowered.values).seconds
            if not statement.backward:
                self.forward[slot] += cost
            elif place_ in self.homes.weight:
                self.weight[slot] += cost
            else:
                self.input[slot] += cost
            if statement.node.op in (ATTENTION, ATTENTION_BACKWARD):
                (self.seen_back if statement.backward else self.seen)[slot] += cost

    def _placed(self) -> Iterator[tuple[int, Statement]]:
        """The ops of forward that stand in one stage, with their slots."""
        for place_, statement in enumerate(self.whole.all):
            slot = self.homes.at[place_]
            if not statement.backward and slot is not None:
                yield slot, statement

    def _sources(self, values: Iterable[str]) -> Iterator[str]:
        """The values, views as what they are views of."""
        for value in values:
            yield from self.homes.bases.get(value, (value,))

    def _makers(self) -> dict[str, int]:
        """Value of forward that one stage makes and others are sent -> its slot."""
        return {value: slot for slot, statement in self._placed() for value in statement.makes}

    def _kept(self) -> None:
        """What backward reads of forward, at the slot that makes it."""
        late = set(self._sources({v for p in self.homes.weight for v in self.whole.all[p].uses}))
        wanted = set(self._sources({v for s in self.whole.all if s.backward for v in s.uses}))
        for value in wanted:
            if value not in self.whole.values or value in self.copies:
                continue
            nbytes = self.bytes_of(value)
            if value in self.makers:
                self.held[self.makers[value]] += nbytes
                self.held_weight[self.makers[value]] += nbytes * (value in late)
        for place_, statement in enumerate(self.whole.all):
            slot = self.homes.at[place_]
            if statement.backward and slot is not None and place_ not in self.homes.weight:
                made = [v for v in statement.makes if v in late and v in self.whole.values]
                self.made[slot] += sum(self.bytes_of(v) for v in made)

    def _sends(self) -> np.ndarray:
        """Seconds for what crosses behind every slot, there and (its gradient) back."""
        makers = self.makers
        last: dict[str, int] = {}
        for slot, statement in self._placed():
            last.update((v, slot) for v in self._sources(statement.uses) if v in makers)
        steps = np.zeros(self.count + 1)
        for value, end in last.items():
            if end > makers[value] and value in self.whole.values:
                cost = self._send(value)
                steps[makers[value]] += cost
                steps[end] -= cost
        return 2 * np.cumsum(steps)[:-1]

    def _send(self, value: str) -> float:
        """Seconds to send a value on: whole, or in parts over an axis on which it is replicated."""
        nbytes, placed = self.bytes_of(value), self.whole.values[value]
        whole = float(seconds("send", nbytes, self.link))
        axes = (link for p, link in zip(placed.layout, self.links, strict=True) if p == R and link.size > 1)
        return min([whole, *(in_parts(nbytes, self.link, link) for link in axes)])

    def _places(self) -> list[int]:
        """Slots behind which a cut may be, in calls; see `places_of`."""
        rows: dict[int, list[int]] = {}
        there = stays(self.whole, self.how.mesh)
        fixed = [
            stay for stay, statement in zip(there, self.whole.all, strict=True) if not statement.backward
        ]
        for slot, statement in enumerate(self.ops[:-1]):
            inside = isinstance(self.whole.lowered.main[statement.item], Call)
            if inside and self.homes.at[slot] is not None and fixed[slot]:
                rows.setdefault(statement.item, []).append(slot)
        calls = list(rows.values())
        # sums of the same sends differ by rounding
        crossing = [[float(f"{float(self.send[slot]):.6e}") for slot in row] for row in calls]
        return [calls[call][number] for call, number in places_of(crossing)]

    @property
    def most_stages(self) -> int:
        return len(self.places) + 1

    def cut(self, schedule: Schedule, chunks: int, budget: float | None) -> _Trial | None:
        """The best cuts for one schedule, simulated; None if nothing fits."""
        edges = [0, *(p + 1 for p in self.places), self.count]
        flying = tuple(-(-n // self.slices) for n in in_flight_of_stages(schedule))
        ask = Ask(schedule.stages, schedule.microbatches, chunks, flying, budget)
        found = best_cuts(self._line(edges), ask)
        tried = [] if found is None else [[edges[e + 1] - 1 for e in found.ends]]
        # the formula is not the simulation: what people do by hand is tried as well
        alike = self._alike(schedule.stages)
        tried += [alike] if alike and alike not in tried else []
        best: _Trial | None = None
        for ends in tried:
            costs = self.costs(schedule, ends)
            if best is not None and least_makespan(schedule, costs) > (1 + _ROUNDING) * best.seconds:
                continue
            if budget is not None and max(peak_bytes(schedule, costs)) > budget:
                continue
            seconds = makespan(schedule, costs)
            if best is None or seconds < best.seconds:
                best = _Trial(schedule, chunks, tuple(ends), costs, seconds)
        return best

    def pipeline(self, trial: _Trial) -> Pipeline:
        """The pipeline with its cuts."""
        schedule, cuts = trial.schedule, tuple(self._cut(e) for e in trial.ends)
        return Pipeline(schedule.ranks, 0, schedule.name, trial.chunks, cuts, self.slices)

    def _line(self, edges: Sequence[int]) -> Line:
        """The slots between places that may be cut, as one each."""

        def grouped(x: np.ndarray) -> np.ndarray:
            return np.add.reduceat(x, edges[:-1])

        send = np.array([*(self.send[e - 1] for e in edges[1:-1]), 0.0])
        return Line(
            grouped(self.forward),
            grouped(self.input + self.weight),
            grouped(self.held),
            grouped(self.state),
            send,
        )

    def costs(self, schedule: Schedule, ends: Sequence[int]) -> StageCosts:
        """Of the stages that end behind these slots."""
        edges = [0, *(e + 1 for e in ends)]

        def total(x: np.ndarray) -> tuple[float, ...]:
            return tuple(float(v) for v in np.add.reduceat(x, edges))

        sends = tuple(float(self.send[e]) / 2 for e in ends)
        held, made = total(self.held), total(self.made)
        held_weight = tuple(min(a, b) for a, b in zip(total(self.held_weight), held, strict=True))
        state, update = total(self.state), total(self.update)
        base, updates = [0.0] * schedule.ranks, [0.0] * schedule.ranks
        for stage, rank in enumerate(schedule.owner):
            base[rank] += state[stage]
            updates[rank] += update[stage]
        whole = total(self.input + self.weight)
        parts = total(self.input), total(self.weight)
        costs = StageCosts(
            total(self.forward),
            whole,
            *parts,
            sends,
            sends,
            held,
            held_weight,
            tuple(base),
            tuple(updates),
            made,
        )
        if schedule.slices == 1:
            return costs
        return in_slices(costs, total(self.seen), total(self.seen_back), self.link.latency, schedule.slices)

    def _cut(self, slot: int) -> Cut:
        """The cut behind a slot, by the call it is in."""
        statement: Statement = self.ops[slot]
        item = self.whole.lowered.main[statement.item]
        assert isinstance(item, Call)
        last = slot + 1 == len(self.ops) or self.ops[slot + 1].item != statement.item
        return Cut(self.numbers[id(item)], "" if last else statement.node.name, item.label)

    @cached_property
    def _layers(self) -> list[int]:
        """The last op of every layer."""
        layers: list[int] = []
        for slot, statement in enumerate(self.ops):
            item = self.whole.lowered.main[statement.item]
            last = slot + 1 == len(self.ops) or self.ops[slot + 1].item != statement.item
            if last and isinstance(item, Call) and item.label:
                layers.append(slot)
        return layers

    def _alike(self, stages: int) -> list[int]:
        """The ends of stages with equally many layers, embedding and head at the ends; [] with too few."""
        layers = self._layers
        if len(layers) < stages:
            return []
        return [layers[len(layers) * k // stages - 1] for k in range(1, stages)]

    def equal(self, schedule: Schedule) -> StageCosts | None:
        """Of stages with equally many layers, None where there are too few."""
        ends = self._alike(schedule.stages)
        return self.costs(schedule, ends) if ends else None


def _bare(whole: Statements, folded: Folded, how: Lowering) -> Program:
    """The placed program as one that can be priced."""
    return Program(how.plan.mesh, whole.lowered, Signature.of(folded.joint), {})
