"""What the stages of a program cost: the seconds and bytes from which its step is simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from autoshard.cluster.cluster import Cluster, Device, host_of
from autoshard.cluster.mesh import Axis, Mesh
from autoshard.cluster.order import RankOrder
from autoshard.cost.collective import seconds
from autoshard.cost.kernel_time import traffic_seconds
from autoshard.cost.link import AxisLink, link_of
from autoshard.cost.orthogonal import owner_seconds
from autoshard.cost.recipe import SUM_BYTES
from autoshard.cost.stage_machines import StageMachine, stage_machines
from autoshard.ir import DTYPES, Call, Port
from autoshard.ir.boundaries import wires_of
from autoshard.ir.lowered import Phase
from autoshard.program.holders import accumulated, holders_of
from autoshard.program.messages import moves_of
from autoshard.program.program import Program
from autoshard.schedules.schedule import Schedule
from autoshard.schedules.sharing import Sharing
from autoshard.schedules.timeline import StageCosts
from autoshard.simulate.behaviour import Behaviour, behaviour_on
from autoshard.simulate.part_times import Parts
from autoshard.simulate.pricing import Pricer
from autoshard.simulate.saved_for_backward import (
    ResidentBytes,
    SavedBytes,
    SliceStorages,
    gathered_bytes,
    gathered_ports,
    kept_by,
    kept_of_slices,
)
from autoshard.simulate.segment_cache import OfSegments
from autoshard.simulate.segment_work import Sheets
from autoshard.simulate.streams import NOTHING

_HALF = ("bf16", "f16")


def stage_costs(program: Program, cluster: Cluster, rank: int = 0) -> StageCosts:
    """Seconds and bytes of the stages of a program on a cluster; see `StagePrices`.

    rank: which rank of a stage is priced (default: the fullest).
    """
    return StagePrices(program, cluster, rank).costs


def schedule_of(program: Program) -> Schedule:
    """The schedule of a pipeline; one microbatch after the other for a program of one stage."""
    if program.stages is not None:
        return program.stages.schedule
    (moves,) = moves_of(program)
    return Schedule("one stage", program.microbatches, (0,), (tuple(m.action for m in moves),))


@dataclass(frozen=True)
class StepEnd:
    """Seconds of a rank beside its microbatches.

    reduce: of gathering parameters that stay gathered and of reducing gradients over the ranks of a stage,
    beyond what computing hides, and of handing over parameters and gradients; axes: how much of it each mesh
    axis is exposed. shared: of gradients that several stages add to, over the ranks that hold those stages.
    update: of AdamW, which is bound by memory (`Recipe.update_bytes`).
    """

    reduce: float
    shared: float
    update: float
    axes: tuple[float, ...] = ()

    @property
    def total(self) -> float:
        return self.reduce + self.shared + self.update


class StagePrices:
    """Prices of all stages of a program on a cluster, for one rank of each (default: the fullest).

    Between stages on different ranks, a value is sent once to every rank that uses it. What skips stages is
    priced with the first hop on its way that leaves a rank: it takes its sender's link, and has arrived
    when it is needed, as whoever uses it waits for the stages between as well. Ranks of a pipeline that lie
    in unlike groups of the cluster are each priced where they lie.
    """

    def __init__(
        self,
        program: Program,
        cluster: Cluster,
        rank: int = 0,
        behaviour: Behaviour | None = None,
        known: OfSegments | None = None,
    ) -> None:
        self.whole = Mesh.parse(program.full_mesh)
        self.program, self.cluster, self.rank = program, cluster.used_by(self.whole.world_size), rank
        self.behaviour = behaviour or behaviour_on(self.cluster.device, program.codegen)
        self.recipe = self.behaviour.recipe
        self.schedule = schedule_of(program)
        self.pricer = Pricer(program, self.cluster, rank, self.behaviour)
        self.sheets = Sheets(program, self.behaviour, rank, known)
        device = self.cluster.device
        #: on what bounds all ranks
        self.parts = Parts(program, self.sheets, self.pricer.price, device, self.behaviour, self.pricer.links)
        self.stages_of = tuple(
            tuple(s for s, owner in enumerate(self.schedule.owner) if owner == rank)
            for rank in range(self.schedule.ranks)
        )
        self.holders = holders_of(program)

    def repriced(self, cluster: Cluster) -> StagePrices:
        """The same on another cluster; what does not depend on it is kept."""
        new = copy(self)
        for name in ("costs", "ends", "sends", "waits", "machines", "_own", "_links", "_sharing"):
            new.__dict__.pop(name, None)
        new.cluster = cluster.used_by(self.whole.world_size)
        new.pricer = Pricer(self.program, new.cluster, self.rank, self.behaviour)
        new.parts = self.parts.repriced(new.pricer.price, new.cluster.device, new.pricer.links)
        return new

    @cached_property
    def machines(self) -> tuple[StageMachine, ...]:
        """Of every pipeline rank; () where all are as what bounds them."""
        stages = self.program.stages
        if stages is None or stages.position != 0:
            return ()
        return stage_machines(self.cluster, self.pricer.mesh, self.schedule.ranks)

    def device(self, rank: int) -> Device:
        """The slowest of a pipeline rank."""
        return self.machines[rank].device if self.machines else self.cluster.device

    def parts_of(self, stage: int) -> Parts:
        """The parts of a stage, on the machine of its rank."""
        return self._own[self.machines[self.schedule.owner[stage]]] if self.machines else self.parts

    @cached_property
    def _own(self) -> Mapping[StageMachine, Parts]:
        result = {}
        for machine in dict.fromkeys(self.machines):
            own = Pricer(self.program, self.cluster, self.rank, self.behaviour, machine)
            result[machine] = self.parts.repriced(own.price, machine.device, own.links)
        return result

    @cached_property
    def held(self) -> StageCosts:
        """The bytes of `costs`, without its seconds."""
        count, slices = self.schedule.stages, self.schedule.slices
        if slices > 1:  # backward is not split
            beside = [self.parts.beside(s) * share for s in range(count) for share in self.slice_shares]
            parts = self.kept_of_slices
            held = [x + y for x, y in zip((x for p in parts for x in p.added), beside, strict=True)]
            freed = [x + y for x, y in zip((x for p in parts for x in p.freed), beside, strict=True)]
            weight = made = [0.0] * len(held)
        else:
            kept = [self.kept[s] for s in range(count)]
            held, weight, made = ([getattr(k, n) for k in kept] for n in ("held", "weight", "made"))
            freed = []
        nothing, hops = (0.0,) * (count * slices), (0.0,) * ((count - 1) * slices)
        return StageCosts(
            *(nothing,) * 4,
            hops,
            hops,
            held=tuple(held),
            held_weight=tuple(weight),
            base=tuple(state.total for state in self.states),
            update=(0.0,) * self.schedule.ranks,
            made_weight=tuple(made),
            freed=tuple(freed),
        )

    @cached_property
    def kept_of_slices(self) -> tuple[SliceStorages, ...]:
        """What every stage keeps of the slices of a microbatch."""
        slices, size_of = self.schedule.slices, self.pricer.bytes_of
        return tuple(kept_of_slices(self.program, s, slices, size_of) for s in range(self.schedule.stages))

    @property
    def slice_shares(self) -> tuple[float, ...]:
        """Part of a microbatch that each slice is."""
        return (1.0,) if self.program.stages is None else self.program.stages.slices.shares

    # -- time ------------------------------------------------------------------------------------------

    @cached_property
    def costs(self) -> StageCosts:
        """For one microbatch each, or one slice of it, of which each keeps as much."""
        count, slices = self.schedule.stages, self.schedule.slices
        up, down = self.sends
        ahead, back = self.waits
        if self.behaviour.blocking_sends:  # what a stage has waited for has arrived
            up, down = (0.0,) * len(up), (0.0,) * len(down)

        def each(waits: Sequence[float], *phases: Phase) -> tuple[float, ...]:
            units = ((s, c) for s in range(count) for c in range(slices))
            return tuple(self.parts_of(s).of(s, *phases, slice=c).seconds + waits[s] for s, c in units)

        return replace(
            self.held,
            forward=each(ahead, "forward"),
            backward=each(back, "backward", "weight"),
            backward_input=each(back, "backward"),
            backward_weight=each((0.0,) * count, "weight"),
            send_forward=up,
            send_backward=down,
            update=tuple(end.total for end in self.ends),
            sharing=self._sharing,
            paired={
                (f, b): self.parts_of(f).paired(f, b).seconds + ahead[f] + back[b]
                for f, b in self.schedule.pairs
            },
        )

    @cached_property
    def _sharing(self) -> Sharing | None:
        """Which pipeline ranks share processors: those on the same node, where a device is faster while the
        others of its node wait."""
        alone, stages = self.cluster.device.alone, self.program.stages
        if alone == 1 or stages is None:
            return None
        node = self.cluster.levels[0].size or self.whole.world_size
        first = self.pricer.mesh.coords(0)
        at = stages.position
        devices = (self.whole.rank((*first[:at], r, *first[at:])) for r in range(self.schedule.ranks))
        return Sharing(alone, tuple(device // node for device in devices))

    @cached_property
    def waits(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds that every stage sends for instead of computing, in forward and in backward.

        Where ranks share processors, these move the messages, too: half of a message's time at either end.
        """
        count, slices = self.schedule.stages, self.schedule.slices
        up, down = self.sends
        if self.behaviour.blocking_sends:
            return (*up, 0.0), (0.0, *down)
        if self._sharing is None:
            return (0.0,) * count, (0.0,) * count

        def halves(sends: Sequence[float]) -> tuple[float, ...]:
            hops = [sum(sends[k : k + slices]) / slices / 2 for k in range(0, len(sends), slices)]
            return tuple(a + b for a, b in zip((0.0, *hops), (*hops, 0.0), strict=True))

        return halves(up), halves(down)

    @cached_property
    def ends(self) -> tuple[StepEnd, ...]:
        """What every pipeline rank does at the end of a step."""
        return tuple(self._end(rank) for rank in range(self.schedule.ranks))

    def _end(self, rank: int) -> StepEnd:
        trained = [p for p in self.held_by(rank) if p.target in self.trained]
        touched = sum(
            self.size(p.name) / _width(p) * self.recipe.of(p).update_bytes(_width(p)) for p in trained
        )
        shared = 0.0
        for port in trained:
            ranks = self._ranks_of(port)
            if len(ranks) > 1:
                shared += float(seconds("all_reduce", self.size(port.name), self.link(ranks)))
        around = [self.parts_of(stage).around(stage) for stage in self.stages_of[rank]]
        full = sum(around, NOTHING)
        handed = len(trained) * self.device(rank).kernels.hand
        links = self.pricer.links
        by_owners = sum(owner_seconds(self.recipe.of(p), p.type, self.device(rank), links) for p in trained)
        update = self._update(rank, touched) + by_owners
        return StepEnd(full.seconds + handed, shared, update, full.exposed)

    def _update(self, rank: int, touched: float) -> float:
        """Seconds of the optimizer. touched: bytes that it reads and writes, on the device or in its host.

        In host memory beside parameters on the device, gradients come down and parameters go up while others
        are updated (`runtime.optim.host_optimizer`): the slowest of the three counts.
        """
        away = self.program.offload
        if not away.states:
            return traffic_seconds(touched, self.device(rank))
        host = host_of(self.device(rank))
        copied = 0.0 if away.parameters else host.seconds(self.shard_bytes(rank, trained=True))
        return max(host.update_seconds(touched), copied)

    # -- messages --------------------------------------------------------------------------------------

    @cached_property
    def crossing(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Bytes per microbatch that leave a rank, from stage s to s + 1, and from s + 1 to s.

        With slices, per slice: slice c of hop s stands at s * slices + c.
        """
        owner, slices = self.schedule.owner, self.schedule.slices
        hops = (self.schedule.stages - 1) * slices
        up, down = [0.0] * hops, [0.0] * hops
        sent: set[tuple[int, str, str, int]] = set()
        for wire in wires_of(self.program.lowered, {p.name for p in self.program.signature.ports}):
            source, receiver = wire.source, owner[wire.target]
            key = (source, wire.phase, wire.value, receiver)
            if owner[source] == receiver or key in sent:
                continue
            sent.add(key)
            if wire.target > source:
                way = range(source, wire.target)
                hop = next(s for s in way if owner[s] != owner[s + 1])
                up[hop * slices + wire.slice] += self.size(wire.value)
            else:
                way = range(source - 1, wire.target - 1, -1)
                hop = next(s for s in way if owner[s] != owner[s + 1])
                down[hop * slices + wire.slice] += self.size(wire.value)
        return tuple(up), tuple(down)

    @cached_property
    def sends(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds per microbatch, as `crossing`: one message per hop (`cost.collective`)."""
        owner = self.schedule.owner
        up, down = self.crossing
        links = [
            None if owner[s] == owner[s + 1] else self.link((owner[s], owner[s + 1]))
            for s in range(self.schedule.stages - 1)
            for _ in range(self.schedule.slices)
        ]

        def each(sizes: Sequence[float]) -> tuple[float, ...]:
            return tuple(
                0.0 if link is None else float(seconds("send", size, link))
                for size, link in zip(sizes, links, strict=True)
            )

        return each(up), each(down)

    def link(self, ranks: Sequence[int]) -> AxisLink:
        """The link between pipeline ranks, as seen by the ranks of a stage that use it at once.

        Where pp stands in the mesh of all ranks decides which devices these are, and so which levels of
        wiring are crossed.
        """
        stages = self.program.stages
        if stages is None:
            return AxisLink(0.0, float("inf"), 1)
        ordered = tuple(sorted(set(ranks)))
        if ordered not in self._links:
            inner = self.pricer.mesh.world_size
            at = stages.position
            devices = []
            for pipe_rank in ordered:
                for place in range(inner):
                    coords = self.pricer.mesh.coords(place)
                    devices.append(self.whole.rank((*coords[:at], pipe_rank, *coords[at:])))
            if self.cluster.order is not None:
                devices = [self.cluster.order.devices[r] for r in devices]
            mesh = Mesh((Axis("pp", len(ordered)), Axis("inside", inner)))
            self._links[ordered] = link_of(self.cluster, mesh, 0, RankOrder(tuple(devices)))
        return self._links[ordered]

    @cached_property
    def _links(self) -> dict[tuple[int, ...], AxisLink]:
        return {}

    # -- bytes -----------------------------------------------------------------------------------------

    def size(self, value: str) -> float:
        """Bytes of a main value on the rank."""
        return self.pricer.ops.nbytes(self.program.lowered.values[value])

    @cached_property
    def kept(self) -> Mapping[int, SavedBytes]:
        """What every stage keeps of a microbatch."""
        result: dict[int, SavedBytes] = {}
        per_logit = self.behaviour.loss_kept
        for stages in self.stages_of:
            result |= kept_by(self.program, stages, self.pricer.bytes_of, self.sheets.keeping, per_logit)
        return {s: replace(kept, held=kept.held + self.parts.beside(s)) for s, kept in result.items()}

    @cached_property
    def states(self) -> tuple[ResidentBytes, ...]:
        """What every pipeline rank holds beside activations; gradients as they are summed up.

        A parameter that several ranks share is on each of them.
        """
        return tuple(self._state(rank) for rank in range(self.schedule.ranks))

    def optimizer_bytes(self, rank: int) -> float:
        """What the optimizer of a pipeline rank keeps, in whichever memory."""
        sharing = prod(link.size for link in self.pricer.links)
        return sum(
            self.size(p.name) / _width(p) * self.recipe.of(p).optimizer_bytes(_width(p))
            + self.recipe.of(p).owned_bytes(p) / sharing
            for p in self.held_by(rank)
            if p.target in self.trained
        )

    def shard_bytes(self, rank: int, *, trained: bool = False) -> float:
        """Parameters of a pipeline rank (or trained ones), without gathered copies, in whichever memory."""
        held = self.held_by(rank)
        return sum(self.size(p.name) for p in held if not trained or p.target in self.trained)

    def updated(self, rank: int) -> float:
        """Elements of parameters that a rank of a stage updates."""
        trained = (p for p in self.held_by(rank) if p.target in self.trained)
        return sum(self.size(p.name) / _width(p) for p in trained)

    def _stand_ins(self, rank: int) -> float:
        """Bytes of a tensor for every shape that weights of layers have, as wide as the weights."""
        lowered, stages = self.program.lowered, self.stages_of[rank]
        parts = [p for p in lowered.parts if p.stage in stages and p.phase == "forward"]
        calls = [i for p in parts for i in lowered.of(p) if isinstance(i, Call) and i.label]
        shapes: dict[tuple[tuple[int, ...], str], float] = {}
        full = {
            v for p in lowered.parts if p.phase in ("gather", "count") for i in lowered.of(p) for v in i.outs
        }
        ports = {p.name for p in self.program.signature.ports if p.kind == "param"}
        for value in (v for call in calls for v in call.args if v in ports or v in full):
            placed = lowered.values[value]
            if len(placed.type.shape) > 1:
                shapes[self.pricer.ops.shape(placed), placed.type.dtype] = self.size(value)
        return sum(shapes.values())

    def _state(self, rank: int) -> ResidentBytes:
        held = self.held_by(rank)
        away = self.program.offload
        optimizer = 0.0 if away.states else self.optimizer_bytes(rank)
        gradients = sum(self.gradients_of[rank].values())
        copies = sum(gathered_bytes(self.program, stage, self.size) for stage in self.stages_of[rank])
        full = gathered_ports(self.program, self.stages_of[rank]) if self.behaviour.full_parameters else ()
        own = 0.0 if away.parameters else sum(self.size(p.name) for p in held if p.name not in full)
        if self.behaviour.stand_ins:
            gradients += self._stand_ins(rank)
        return ResidentBytes(own + copies, gradients, optimizer, 0.0)

    @cached_property
    def gradients_of(self) -> tuple[Mapping[int, float], ...]:
        """Per pipeline rank, stage -> bytes of its gradients as they are summed up."""
        return tuple(
            {s: sum(self.sum_bytes(v) for v in accumulated(self.program, s)) for s in stages}
            for stages in self.stages_of
        )

    def sum_bytes(self, value: str) -> float:
        """Bytes of a gradient while it is summed over microbatches or slices: f32 if of half precision, or as
        wide as the buffers of the recipe."""
        if value in self.program.lowered.hosted:
            return 0.0
        dtype = self.program.lowered.values[value].type.dtype
        if self.behaviour.gradient_buffers:
            width = DTYPES[dtype][1]
            return self.size(value) * self.recipe.gradient_bytes(width) / width
        wide = dtype in _HALF and self.program.microbatches * self.schedule.slices > 1
        return self.size(value) * (SUM_BYTES / DTYPES[dtype][1] if wide else 1.0)

    @cached_property
    def trained(self) -> frozenset[str]:
        return frozenset(r.target for r in self.program.signature.results if r.kind == "grad")

    def held_by(self, rank: int) -> Sequence[Port]:
        """Parameters of a pipeline rank."""
        return self._parameters.get(rank, ())

    @cached_property
    def _parameters(self) -> Mapping[int, Sequence[Port]]:
        result: dict[int, list[Port]] = {}
        for port in self.program.signature.ports:
            if port.kind == "param":
                for rank in self._ranks_of(port):
                    result.setdefault(rank, []).append(port)
        return result

    def _ranks_of(self, port: Port) -> tuple[int, ...]:
        owner = self.schedule.owner
        return tuple(sorted({owner[s] for s in self.holders[port.name]}))


def _width(port: Port) -> int:
    return DTYPES[port.type.dtype][1]
