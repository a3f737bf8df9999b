"""What instructions of a program cost on one rank: seconds of its ops, bytes on the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cost.on_mesh import cost_model
from autoshard.cost.stage_machines import StageMachine
from autoshard.ir import Call, Node, TensorType, refs_of
from autoshard.ir.collectives import is_message, is_ring
from autoshard.ir.lowered import Instruction, PlacedValue
from autoshard.ir.placement import Layout
from autoshard.ir.rings import ring_flop
from autoshard.ir.row_tiles import TILES
from autoshard.ir.scans import SCAN
from autoshard.program.program import Program
from autoshard.rules.chains import ALONE, NOT_FUSED, FusedKernels, InKernel
from autoshard.rules.stops import PRODUCTS
from autoshard.simulate.behaviour import Behaviour, behaviour_on
from autoshard.simulate.op_work import Ops, product_flops, product_of
from autoshard.simulate.streams import pricer
from autoshard.simulate.work import CollectiveWork

#: bytes that a rank sends, as a part of the full tensor's bytes times (p - 1) / p
_WIRE = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "all_reduce": 2.0}


@dataclass(frozen=True)
class NodeCost:
    """One op on one rank. compute, comm: seconds. wire: bytes that the rank sends."""

    compute: float = 0.0
    comm: float = 0.0
    wire: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.comm


@dataclass(frozen=True)
class SegmentCost:
    """One call of a segment (or main outside its calls): sums over its ops."""

    compute: float
    comm: float
    wire: float
    collectives: int


class Pricer:
    """Prices of one rank of a stage (default: the fullest, at coordinate 0 of every axis) on a cluster.

    rank: of the mesh of one stage. Collectives go over the links that the axes have in the mesh of all
    ranks, where pp may lie between two of them. machine: of the pipeline rank, in place of what bounds all.
    """

    def __init__(
        self,
        program: Program,
        cluster: Cluster,
        rank: int = 0,
        behaviour: Behaviour | None = None,
        machine: StageMachine | None = None,
    ) -> None:
        self.program, self.cluster = program, cluster
        self.mesh = Mesh.parse(program.mesh)
        self.coords = self.mesh.coords(rank)
        if machine is None:
            links = cost_model(cluster, Mesh.parse(program.full_mesh)).reshard.links
            at = None if program.stages is None else program.stages.position
            machine = StageMachine(cluster.device, tuple(link for k, link in enumerate(links) if k != at))
        self.links = machine.links
        self.ops = Ops(self.mesh, self.coords, behaviour or behaviour_on(machine.device, program.codegen))
        self.price = pricer(machine.device, self.links)

    def bytes_of(self, type_: TensorType, layout: Layout) -> float:
        """Bytes of a value on the rank."""
        return self.ops.bytes_of(type_, layout)

    def node(self, node: Node, values: Mapping[str, PlacedValue], kernel: InKernel = ALONE) -> NodeCost:
        """One op, given where the values of its graph lie. kernel: that it is a part of."""
        compute = comm = wire = 0.0
        for work in self.ops.work(node, values, kernel):
            if isinstance(work, CollectiveWork):
                size = self.mesh.sizes[work.axis]
                comm += self.price(work)
                wire += work.nbytes * _WIRE[work.kind] * (size - 1) / size
            else:
                compute += self.price(work)
        return NodeCost(compute, comm, wire)

    def flop(self, nodes: Iterable[Node], values: Mapping[str, PlacedValue]) -> dict[str, float]:
        """FLOP of the products among ops on all ranks of a stage together, by the type they are done in."""
        result: dict[str, float] = {}
        for each in nodes:
            node = product_of(each)
            if is_ring(node):
                types = {n: values[n].type for n in (*refs_of(node), *node.outs)}
                dtype = values[node.outs[0]].type.dtype
                result[dtype] = result.get(dtype, 0.0) + ring_flop(node, types)
            if node.op in (TILES, SCAN):
                dtype = values[node.outs[0]].type.dtype
                result[dtype] = result.get(dtype, 0.0) + self.ops.body_flop(node, values)
            if node.op in PRODUCTS:
                ins = [values[name].type for name in refs_of(node)]
                outs = [t for t in node.types if t is not None]
                dtype = next((t.dtype for t in outs if t.is_float), "f32")
                result[dtype] = result.get(dtype, 0.0) + product_flops(node, ins, outs)
        return result

    # -- sums ----------------------------------------------------------------------------------------

    @cached_property
    def _segments(self) -> dict[str, SegmentCost]:
        return {
            name: self._sum(segment.graph.nodes, segment.placed(), self.fusions.get(name, NOT_FUSED))
            for name, segment in self.program.lowered.segments.items()
        }

    @cached_property
    def fusions(self) -> Mapping[str, FusedKernels]:
        """The fused kernels of every segment; none where every op is a kernel."""
        segments = self.program.lowered.segments if self.ops.behaviour.fused else {}
        return {k: FusedKernels.of(s.graph.nodes, s.graph.outputs) for k, s in segments.items()}

    def kernel(self, segment: str, node: Node) -> InKernel:
        """The fused kernel that an op of a segment is a part of."""
        return self.fusions.get(segment, NOT_FUSED).of_node(node)

    def segment(self, name: str) -> SegmentCost:
        """One call of a segment."""
        return self._segments[name]

    def priced(self, items: Sequence[Instruction]) -> SegmentCost:
        """Instructions of main, one after the other, nothing hidden behind anything."""
        own = self._sum([i for i in items if isinstance(i, Node)], self.program.lowered.values)
        return total([own, *(self.segment(i.segment) for i in items if isinstance(i, Call))])

    def _sum(
        self, nodes: Iterable[Node], values: Mapping[str, PlacedValue], fused: FusedKernels = NOT_FUSED
    ) -> SegmentCost:
        costs = [(n, self.node(n, values, fused.of_node(n))) for n in nodes]
        return SegmentCost(
            sum(c.compute for _, c in costs),
            sum(c.comm for _, c in costs),
            sum(c.wire for _, c in costs),
            sum(is_message(n) for n, _ in costs),
        )


def total(parts: Sequence[SegmentCost]) -> SegmentCost:
    """The sum of costs."""
    return SegmentCost(
        sum(p.compute for p in parts),
        sum(p.comm for p in parts),
        sum(p.wire for p in parts),
        sum(p.collectives for p in parts),
    )
