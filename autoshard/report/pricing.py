"""What instructions of a program cost on one rank: seconds of its ops, bytes on the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cost.collective import seconds
from autoshard.cost.compute import compute_seconds
from autoshard.cost.on_mesh import cost_model
from autoshard.ir import DTYPES, Call, Node, TensorType, refs_of
from autoshard.ir.lowered import Instruction, LoweredSegment, Placed
from autoshard.placement import Layout, Shard, local_shape
from autoshard.program.program import Program
from autoshard.rules import attention, experts, matmul

#: bytes that a rank sends, as a part of the whole tensor's bytes times (p - 1) / p
_WIRE = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "all_reduce": 2.0, "slice": 0.0}
#: products for which rows change ranks -> the op on whole tensors
_EXCHANGES = {
    "expert_mm": "autoshard.expert_mm.default",
    "expert_outer": "autoshard.expert_outer.default",
}
#: ops that only look at their input in another way
VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default",
        "reshape.default",
        "_unsafe_view.default",
        "permute.default",
        "transpose.int",
        "t.default",
        "expand.default",
        "unsqueeze.default",
        "squeeze.default",
        "squeeze.dim",
        "squeeze.dims",
        "slice.Tensor",
        "select.int",
        "split.Tensor",
        "split_with_sizes.default",
        "unbind.int",
        "alias.default",
        "detach.default",
    )
)
_PRODUCTS = frozenset(
    (*matmul.RULES, *attention.RULES, *experts.RULES, *experts.LOWERED, "aten.addmm.default")
)


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
    ranks, where pp may lie between two of them.
    """

    def __init__(self, program: Program, cluster: Cluster, rank: int = 0) -> None:
        self.program, self.cluster = program, cluster
        self.mesh = Mesh.parse(program.mesh)
        self.coords = self.mesh.coords(rank)
        links = cost_model(cluster, Mesh.parse(program.whole_mesh)).plain.links
        at = None if program.stages is None else program.stages.position
        self.links = tuple(link for k, link in enumerate(links) if k != at)

    def bytes_of(self, type_: TensorType, layout: Layout) -> float:
        shape = local_shape(type_.shape, layout, self.mesh.sizes, self.coords)
        return float(prod(shape) * DTYPES[type_.dtype][1])

    def node(self, node: Node, values: Mapping[str, Placed]) -> NodeCost:
        """One op, given where the values of its graph lie."""
        if node.op.startswith("comm."):
            return self._collective(node, values)
        if node.op in VIEWS:
            return NodeCost()
        ins = [values[name] for name in refs_of(node)]
        outs = [values[name] for name, type_ in zip(node.outs, node.types, strict=True) if type_ is not None]
        moved = sum(self.bytes_of(v.type, v.layout) for v in [*ins, *outs])
        dtype = next((v.type.dtype for v in outs if v.type.is_float), "f32")
        flops = self._flops(node, ins, outs)
        return NodeCost(float(compute_seconds(flops, moved, dtype, self.cluster.device, matmul=flops > 0)))

    def flop(self, nodes: Iterable[Node], values: Mapping[str, Placed]) -> dict[str, float]:
        """FLOP of the products among ops on all ranks of a stage together, by the type they are done in."""
        found: dict[str, float] = {}
        for node in map(_product_of, nodes):
            if node.op in _PRODUCTS:
                ins = [values[name].type for name in refs_of(node)]
                outs = [t for t in node.types if t is not None]
                dtype = next((t.dtype for t in outs if t.is_float), "f32")
                found[dtype] = found.get(dtype, 0.0) + product_flops(node, ins, outs)
        return found

    def _flops(self, node: Node, ins: Sequence[Placed], outs: Sequence[Placed]) -> float:
        if node.op not in _PRODUCTS:
            return 0.0
        ways = prod(
            size
            for axis, size in enumerate(self.mesh.sizes)
            if any(isinstance(v.layout[axis], Shard) for v in ins)
        )
        return product_flops(node, [v.type for v in ins], [v.type for v in outs]) / ways

    def _collective(self, node: Node, values: Mapping[str, Placed]) -> NodeCost:
        kind = collective_kind(node)
        if kind == "slice":
            return NodeCost()
        if kind in _EXCHANGES:
            return self._exchange(node, values)
        axis = self.mesh.index(str(node.args[1]))
        counted = node.outs if kind == "all_gather" else tuple(refs_of(node))
        nbytes = sum(self.bytes_of(values[n].type, values[n].layout) for n in counted)
        size = self.mesh.sizes[axis]
        wire = nbytes * _WIRE[kind] * (size - 1) / size
        return NodeCost(0.0, float(seconds(kind, nbytes, self.links[axis])), wire)

    def _exchange(self, node: Node, values: Mapping[str, Placed]) -> NodeCost:
        """Rows sent to the ranks of their experts and back, as if spread evenly, and the products."""
        parts, axis_name, _, _ = node.args
        product = self.node(_product_of(node), values)
        axis = self.mesh.index(str(axis_name))
        rows = [values[r.name] for r in parts]
        rows = [v for v in rows if len(v.type.shape) < 3]
        rows += [values[o] for o, t in zip(node.outs, node.types, strict=True) if t and len(t.shape) < 3]
        sizes = [self.bytes_of(v.type, v.layout) for v in rows]
        comm = sum(float(seconds("all_to_all", n, self.links[axis])) for n in sizes)
        ways = self.mesh.sizes[axis]
        return NodeCost(product.compute, comm, sum(sizes) * _WIRE["all_to_all"] * (ways - 1) / ways)

    # -- sums ----------------------------------------------------------------------------------------

    @cached_property
    def _segments(self) -> dict[str, SegmentCost]:
        return {
            name: self._sum(segment.graph.nodes, placed_of(segment))
            for name, segment in self.program.lowered.segments.items()
        }

    def segment(self, name: str) -> SegmentCost:
        """One call of a segment."""
        return self._segments[name]

    def priced(self, items: Sequence[Instruction]) -> SegmentCost:
        """Instructions of main, one after the other, nothing hidden behind anything."""
        own = self._sum([i for i in items if isinstance(i, Node)], self.program.lowered.values)
        return total([own, *(self.segment(i.segment) for i in items if isinstance(i, Call))])

    def _sum(self, nodes: Iterable[Node], values: Mapping[str, Placed]) -> SegmentCost:
        costs = [(n, self.node(n, values)) for n in nodes]
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


def _product_of(node: Node) -> Node:
    """The product on whole tensors, for one that exchanges rows; other ops as they are."""
    whole = _EXCHANGES.get(collective_kind(node))
    if whole is None:
        return node
    parts, _, transposed, count = node.args
    args = (*parts, transposed) if whole == _EXCHANGES["expert_mm"] else (*parts, count, transposed)
    return replace(node, op=whole, args=args)


def placed_of(segment: LoweredSegment) -> dict[str, Placed]:
    """Type and layout of every value of a segment."""
    return {n: Placed(t, segment.layouts[n]) for n, t in segment.graph.types().items()}


def collective_kind(node: Node) -> str:
    """``all_reduce`` for itself and its bucket; "" for an op that is no collective."""
    return node.op.split(".")[1].removesuffix("_bucket") if node.op.startswith("comm.") else ""


def is_message(node: Node) -> bool:
    """Whether ranks exchange anything."""
    return collective_kind(node) not in ("", "slice")


def product_flops(node: Node, ins: Sequence[TensorType], outs: Sequence[TensorType]) -> float:
    """FLOP of a whole matrix product or attention; 0 where the rule does not know."""
    if node.op == "aten.addmm.default":
        return 2.0 * ins[1].shape[0] * ins[1].shape[1] * ins[2].shape[1]
    for rules in (matmul.RULES, attention.RULES, experts.RULES, experts.LOWERED):
        if node.op in rules:
            try:
                return rules[node.op](node, ins).flops
            except (ValueError, AssertionError, IndexError):
                return 0.0  # the call was rewritten for shards, and the rule reads whole sizes from it
    return 0.0
