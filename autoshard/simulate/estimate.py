"""What a program is thought to cost on one rank: seconds of its ops, bytes on the wire, bytes held.

An estimate is always computed anew from the program's text and a cluster; it is never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.cluster.cluster import Cluster
from autoshard.cost.stage_machines import StageMachine
from autoshard.ir import Call, Node, refs_of
from autoshard.ir.collectives import axes_of, exact_transfer, is_message, kind_of
from autoshard.ir.lowered import LoweredSegment, PlacedValue, StagePart
from autoshard.ir.placement import R, Shard, is_even
from autoshard.program.program import Program
from autoshard.simulate.pricing import Pricer, SegmentCost, total
from autoshard.simulate.saved_for_backward import ResidentBytes, gathered_bytes, kept_by
from autoshard.simulate.step import StepEstimate, estimate_step


@dataclass(frozen=True)
class AxisTraffic:
    """All collectives of one kind over one axis in one step. wire: bytes that a rank sends."""

    kind: str
    axis: str
    count: int
    wire: float


@dataclass(frozen=True)
class Facts:
    """Things to look at first. full_gathers: activations made whole on every rank."""

    uneven: int
    full_gathers: int
    without_rule: int


class Estimator(Pricer):
    """Prices of one rank (default: the fullest, at coordinate 0 of every axis) of a program on a cluster.

    Of a pipeline, sums and bytes are those of one pipeline rank: the one that computes and talks longest,
    or holds most. What its step takes is `pipeline`.
    """

    def __init__(
        self, program: Program, cluster: Cluster, rank: int = 0, machine: StageMachine | None = None
    ) -> None:
        super().__init__(program, cluster, rank, machine=machine)
        self.rank = rank

    @cached_property
    def pipeline(self) -> StepEstimate:
        """The simulated step."""
        return estimate_step(self.program, self.cluster, self.rank)

    def step(self) -> SegmentCost:
        """All microbatches of a step and what comes once after them, nothing hidden behind anything."""
        if self.program.stages is None and self.program.microbatches == 1:
            return self.priced(self.program.lowered.main)
        ranks = [self._times(stages) for stages in self._stages_of_ranks()]
        return max(ranks, key=lambda cost: cost.compute + cost.comm)

    def _times(self, stages: Sequence[int]) -> SegmentCost:
        return total([_often(self.priced(self.program.lowered.of(p)), n) for p, n in self._runs(stages)])

    def _stages_of_ranks(self) -> list[tuple[int, ...]]:
        """The stages of every pipeline rank."""
        if self.program.stages is None:
            return [(0,)]
        schedule = self.program.stages.schedule
        return [tuple(s for s, r in enumerate(schedule.owner) if r == k) for k in range(schedule.ranks)]

    def _runs(self, stages: Sequence[int]) -> list[tuple[StagePart, int]]:
        """The parts of some stages, and how often each runs in a step."""
        m = self.program.microbatches
        parts = [p for p in self.program.lowered.parts if p.stage in stages]
        return [(p, 1 if p.phase in ("gather", "reduce") else m) for p in parts]

    def traffic(self) -> list[AxisTraffic]:
        """All collectives of one step, by kind and axis, most bytes first.

        Of a pipeline, those of the rank that `step` is for.
        """
        lowered = self.program.lowered
        result: dict[tuple[str, str], tuple[int, float]] = {}
        costs = {stages: self._times(stages) for stages in self._stages_of_ranks()}
        busiest = max(costs, key=lambda stages: costs[stages].compute + costs[stages].comm)
        for part, times in self._runs(busiest):
            for item in lowered.of(part):
                if isinstance(item, Call):
                    segment = lowered.segments[item.segment]
                    nodes, values = segment.graph.nodes, segment.placed()
                else:
                    nodes, values = (item,), lowered.values
                for node in filter(is_message, nodes):
                    key = (kind_of(node), "+".join(axes_of(node)))
                    count, wire = result.get(key, (0, 0.0))
                    result[key] = (count + times, wire + times * self.node(node, values).wire)
        rows = [AxisTraffic(kind, axis, count, wire) for (kind, axis), (count, wire) in result.items()]
        return sorted(rows, key=lambda t: (-t.wire, t.kind, t.axis))

    def held(self) -> ResidentBytes:
        """Bytes on this rank between and within steps, with Adam."""
        if self.program.stages is not None:
            return max((r.held for r in self.pipeline.ranks), key=lambda held: held.total)
        lowered, signature = self.program.lowered, self.program.signature
        trained = {r.target for r in signature.results if r.kind == "grad"}
        sizes = [
            (p, self.bytes_of(lowered.values[p.name].type, lowered.values[p.name].layout))
            for p in signature.ports
            if p.kind == "param"
        ]
        grads = sum(n for p, n in sizes if p.target in trained)
        kept = kept_by(self.program, (0,), self.bytes_of)[0].held
        values = lowered.values
        copies = gathered_bytes(self.program, 0, lambda v: self.bytes_of(values[v].type, values[v].layout))
        return ResidentBytes(sum(n for _, n in sizes) + copies, grads, 2 * grads, kept)

    def facts(self) -> Facts:
        """Counts over the text of the program, every segment once."""
        lowered = self.program.lowered
        everything = [p for s in lowered.segments.values() for p in s.placed().values()]
        everything += [lowered.values[p.name] for p in self.program.signature.ports]
        uneven = sum(1 for v in everything if not self._even(v))
        gathers = sum(
            1
            for segment in lowered.segments.values()
            for node in segment.graph.nodes
            if exact_transfer(node) == "all_gather" and self._makes_whole(node, segment)
        )
        return Facts(uneven, gathers, 0)

    def _even(self, value: PlacedValue) -> bool:
        return all(
            not isinstance(p, Shard) or is_even(value.type.shape[p.dim], p, size)
            for p, size in zip(value.layout, self.mesh.sizes, strict=True)
        )

    def _makes_whole(self, node: Node, segment: LoweredSegment) -> bool:
        """Whether a gather leaves a value that is no input of the segment (a parameter) whole everywhere."""
        inputs = {n for n, _ in segment.graph.inputs}
        sources = zip(refs_of(node), node.outs, strict=True)
        return any(n not in inputs and all(p == R for p in segment.layouts[o]) for n, o in sources)


def _often(cost: SegmentCost, times: int) -> SegmentCost:
    """The same so many times."""
    return SegmentCost(times * cost.compute, times * cost.comm, times * cost.wire, times * cost.collectives)
