"""What every op of forward costs as a part of a stage, of a program that is placed and not cut yet.

A deep model is looked at without most of its equal layers, whose slots are then copies
(`passes/stages/truncate_layers.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType

import numpy as np

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cost.collective import AxisLink, seconds
from autoshard.cost.orthogonal import owner_seconds
from autoshard.cost.recipe import Recipe
from autoshard.cost.stage_machines import StageMachine, boundary_links, bounding_machine, stage_machines
from autoshard.ir import Call, Folded, Port
from autoshard.ir.collectives import is_collective
from autoshard.ir.placement import R
from autoshard.ir.slices import Slices
from autoshard.ir.statements import Statement, Statements
from autoshard.passes.pipeline import LoweringOptions, place
from autoshard.passes.sequence.slice_places import ATTENTION, ATTENTION_BACKWARD
from autoshard.passes.stages.stage_assignment import places_apart
from autoshard.passes.stages.stage_boundaries import stays
from autoshard.passes.stages.truncate_layers import Gap, Shortened, Shorter
from autoshard.passes.stages.unpartitioned import Unpartitioned
from autoshard.planner.stage_link import in_parts, pipe_link
from autoshard.planner.stage_slots import Shared, Slot, SlotCosts, Slots
from autoshard.planner.stage_state import state_of
from autoshard.program.program import Program, Signature
from autoshard.simulate.estimate import Estimator

#: of parameters that no stage has yet
NO_STAGES: Mapping[str, frozenset[int]] = MappingProxyType({})


def slots_of(
    folded: Folded,
    options: LoweringOptions,
    cluster: Cluster,
    recipe: Recipe,
    ranks: int,
    stages: Mapping[str, frozenset[int]] = NO_STAGES,
) -> Slots:
    """The slots of a model. cluster: the devices of the full pipeline. ranks: of it. stages: that have
    parameters already, by name."""
    if stages:
        priced = _Pricing(folded, options, cluster, recipe, ranks)
        return replace(priced.slots(), stages=priced.stages_of(stages))
    slots = _filled(folded, options, cluster, recipe, ranks)
    return _Pricing(folded, options, cluster, recipe, ranks).slots() if slots is None else slots


def _filled(
    folded: Folded, options: LoweringOptions, cluster: Cluster, recipe: Recipe, ranks: int
) -> Slots | None:
    """The same by copies of equal layers; None where there are too few, or one more of them changes more
    than its own slots: a sum over layers somewhere else, say."""
    shorter = Shorter(folded, options.flow, options.plan)
    less, more = (shorter.model(more=k) for k in (0, 1))
    if less is None or more is None:
        return None

    def slots(short: Shortened) -> Slots:
        return _Pricing(short.folded, options.of(short), cluster, recipe, ranks).slots()

    few = _with_all(slots(less), [gap.of(1) for gap in less.gaps])
    if few is None:
        return None
    slots_ = slots(more)
    return _with_all(slots_, more.gaps) if slots_.equals(few) else None


def _with_all(slots: Slots, gaps: Iterable[Gap]) -> Slots | None:
    """With the layers of all gaps; None if those at one of them do not look as these would."""
    result: Slots | None = slots
    for gap in gaps:
        result = None if result is None else result.filled(gap)
    return result


class _Pricing:
    """Fills the arrays of `SlotCosts`; see there."""

    def __init__(
        self, folded: Folded, options: LoweringOptions, cluster: Cluster, recipe: Recipe, ranks: int
    ) -> None:
        self.folded, self.options, self.cluster, self.recipe = folded, options, cluster, recipe
        self.homes = places_apart(Unpartitioned.of(place(folded, options)), folded.joint)
        lowered = self.homes.uncut.whole  # with copies of gradients that serve several parameters
        self.whole = lowered
        sliced = Slices.equal(1) if options.plan.pipeline is None else options.plan.pipeline.sliced
        self.slices, self.units = len(sliced), sliced.units
        mesh = Mesh.parse(options.plan.mesh)
        bound = bounding_machine(cluster, mesh, ranks)
        self.estimator = Estimator(_bare(lowered, folded, options), cluster, machine=bound)
        self.link = pipe_link(cluster, mesh, ranks)
        #: of every rank, with the link behind it; () where all are alike
        self.unlike = _unlike(cluster, mesh, ranks, bound, self.link)
        #: by identity of their type and layout, which the program keeps
        self._bytes: dict[int, float] = {}
        self.ops = [s for s in lowered.all if not s.backward]
        self.count = len(self.ops)
        self.makers = self._makers()

    def slots(self) -> Slots:
        forward, input_, weight, seen, seen_back = self._seconds(self.estimator)
        held, held_weight, produced, state, update, shared = self._held()
        costs = SlotCosts(
            forward,
            input_,
            weight,
            held,
            held_weight,
            produced,
            state,
            update / self.cluster.device.traffic,
            seen,
            seen_back,
            self._steps(self.link),
        )
        distinct = tuple(dict.fromkeys(self.unlike))
        kinds = tuple(self._on(costs, update, *kind) for kind in distinct)
        of = tuple(distinct.index(kind) for kind in self.unlike)
        return Slots(tuple(self._named()), costs, self.link, self.slices, kinds, of, shared, units=self.units)

    def _on(self, costs: SlotCosts, update: np.ndarray, machine: StageMachine, link: AxisLink) -> SlotCosts:
        """The costs on another machine, with another link behind it. update: bytes that AdamW moves."""
        estimator = Estimator(self.estimator.program, self.cluster, machine=machine)
        forward, input_, weight, seen, seen_back = self._seconds(estimator)
        return replace(
            costs,
            forward=forward,
            input=input_,
            weight=weight,
            update=update / machine.device.traffic,
            seen=seen,
            seen_back=seen_back,
            steps=self._steps(link),
        )

    def stages_of(self, stages: Mapping[str, frozenset[int]]) -> tuple[frozenset[int] | None, ...]:
        """Per slot, the stages that have all of its parameters; None if it has none."""
        targets = {p.name: p.target for p in self.folded.joint.ports if p.kind == "param"}
        result: list[frozenset[int] | None] = [None] * self.count
        for slot, statement in self._placed():
            for value in self._sources(statement.uses):
                having = stages.get(targets.get(value, ""))
                if having is not None:
                    known = result[slot]
                    result[slot] = having if known is None else known & having
        return tuple(result)

    def bytes_of(self, value: str) -> float:
        """Bytes of a value on a rank; the values of alike layers have one type and layout between them."""
        value_ = self.whole.values[value]
        cached = self._bytes.get(id(value_))
        if cached is None:
            cached = self._bytes[id(value_)] = self.estimator.bytes_of(value_.type, value_.layout)
        return cached

    def _named(self) -> Iterator[Slot]:
        main = self.whole.lowered.main
        calls = [i for i in main if isinstance(i, Call) and not i.backward]
        numbers = {id(call): k for k, call in enumerate(calls)}
        stay = [
            there
            for there, s in zip(stays(self.whole, self.options.mesh), self.whole.all, strict=True)
            if not s.backward
        ]
        for k, statement in enumerate(self.ops):
            item = main[statement.item]
            last = k + 1 == self.count or self.ops[k + 1].item != statement.item
            if isinstance(item, Call):
                open_ = self.homes.at[k] is not None and stay[k] and k not in self.homes.uncut_ends
                yield Slot(numbers[id(item)], item.label, statement.node.name, last, open_)
            else:
                yield Slot(-1, "", "", last, False)

    def _seconds(self, estimator: Estimator) -> tuple[np.ndarray, ...]:
        """forward, input, weight, seen, seen_back."""
        forward, input_, weight, seen, seen_back = (np.zeros(self.count) for _ in range(5))
        cache: dict[tuple[str, int, bool], float] = {}
        tables = {name: s.placed() for name, s in self.whole.lowered.segments.items()}
        for place_, statement in enumerate(self.whole.all):
            slot = self.homes.at[place_]
            message = is_collective(statement.node)
            if slot is None or (message and place_ in self.homes.weight):
                continue  # collectives of parameters run beside the pipeline
            item = self.whole.lowered.main[statement.item]
            if isinstance(item, Call):
                key = (item.segment, statement.number, statement.backward)
                if key not in cache:
                    node = self.whole.lowered.segments[item.segment].graph.nodes[statement.number]
                    cache[key] = estimator.node(node, tables[item.segment]).seconds
                cost = cache[key]
            else:
                cost = estimator.node(item, self.whole.lowered.values).seconds
            if not statement.backward:
                forward[slot] += cost
            elif place_ in self.homes.weight:
                weight[slot] += cost
            else:
                input_[slot] += cost
            if statement.node.op in (ATTENTION, ATTENTION_BACKWARD):
                (seen_back if statement.backward else seen)[slot] += cost
        return forward, input_, weight, seen, seen_back

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

    def _by_owners(self, recipe: Recipe, port: Port) -> tuple[float, float]:
        """Bytes of a rank: of state that it owns, and moved in the time that owners take."""
        device, links = self.cluster.device, self.estimator.links
        held = recipe.owned_bytes(port) / prod(link.size for link in links)
        return held, device.traffic * owner_seconds(recipe, port.type, device, links)

    def _held(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, Shared]:
        """held, held_weight, made, state and what the optimizer moves, in bytes; and what slots share."""
        once = self.options.plan.microbatches * self.slices == 1
        state = state_of(
            self.homes,
            self.folded,
            self.options,
            self.recipe,
            self.bytes_of,
            self._by_owners,
            once=once,
        )
        held, held_weight, produced = (np.zeros(self.count) for _ in range(3))
        late = set(self._sources({v for p in self.homes.weight for v in self.whole.all[p].uses}))
        saved = dict.fromkeys(self._sources(v for s in self.whole.all if s.backward for v in s.uses))
        for value in saved:
            if value not in self.whole.values or value in state.copies:
                continue
            nbytes = self.bytes_of(value)
            if value in self.makers:
                held[self.makers[value]] += nbytes
                held_weight[self.makers[value]] += nbytes * (value in late)
        for place_, statement in enumerate(self.whole.all):
            slot = self.homes.at[place_]
            if statement.backward and slot is not None and place_ not in self.homes.weight:
                ready = [v for v in statement.makes if v in late and v in self.whole.values]
                produced[slot] += sum(self.bytes_of(v) for v in ready)
        return held, held_weight, produced, state.held, state.updated, state.shared

    def _steps(self, link: AxisLink) -> np.ndarray:
        """What starts and stops to cross behind every slot, in seconds of a send one way."""
        makers = self.makers
        last: dict[str, int] = {}
        for slot, statement in self._placed():
            last.update((v, slot) for v in self._sources(statement.uses) if v in makers)
        steps = np.zeros(self.count)
        for value, end in last.items():
            if end > makers[value] and value in self.whole.values:
                cost = self._send(value, link)
                steps[makers[value]] += cost
                steps[end] -= cost
        return steps

    def _send(self, value: str, link: AxisLink) -> float:
        """Seconds to send a value on: whole, or in parts over an axis on which it is replicated."""
        nbytes, placed_value = self.bytes_of(value), self.whole.values[value]
        full = float(seconds("send", nbytes, link))
        axes = zip(placed_value.layout, self.estimator.links, strict=True)
        inside = (axis for p, axis in axes if p == R and axis.size > 1)
        return min([full, *(in_parts(nbytes, link, axis) for axis in inside)])


def _unlike(
    cluster: Cluster, mesh: Mesh, ranks: int, bound: StageMachine, slowest: AxisLink
) -> tuple[tuple[StageMachine, AxisLink], ...]:
    """(machine, link behind it) of every pipeline rank; () on a cluster of one kind."""
    if cluster.alike:
        return ()
    machines = stage_machines(cluster, mesh, ranks) or (bound,) * ranks
    links = boundary_links(cluster, mesh.world_size, ranks) or (slowest,) * ranks
    return tuple(zip(machines, links, strict=True))


def _bare(whole: Statements, folded: Folded, options: LoweringOptions) -> Program:
    """The placed program as one that can be priced."""
    return Program(options.plan.mesh, whole.lowered, Signature.of(folded.joint), {})
