"""What a program is thought to cost on one rank: seconds of its ops, bytes on the wire, bytes held.

An estimate is always computed anew from the program's text and a cluster; it is never stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cost.collective import seconds
from autoshard.cost.compute import compute_seconds
from autoshard.cost.on_mesh import cost_model
from autoshard.ir import DTYPES, Call, Node, TensorType, refs_of
from autoshard.ir.lowered import LoweredSegment, Placed
from autoshard.placement import Layout, R, Shard, is_even, local_shape
from autoshard.program.program import Program
from autoshard.rules import attention, experts, matmul

#: bytes that a rank sends, as a part of the whole tensor's bytes times (p - 1) / p
_WIRE = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "all_reduce": 2.0, "slice": 0.0}
#: products for which rows change ranks -> the op on whole tensors
_EXCHANGES = {
    "expert_mm": "autoshard.expert_mm.default",
    "expert_outer": "autoshard.expert_outer.default",
}
#: Adam keeps two moments per parameter
_MOMENTS = 2
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


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind over one axis in one step. wire: bytes that a rank sends."""

    kind: str
    axis: str
    count: int
    wire: float


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds. activations: kept from forward to backward."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Facts:
    """Things to look at first. full_gathers: activations made whole on every rank."""

    uneven: int
    full_gathers: int
    without_rule: int


class Estimator:
    """Prices of one rank (default: the fullest, at coordinate 0 of every axis) of a program on a cluster."""

    def __init__(self, program: Program, cluster: Cluster, rank: int = 0) -> None:
        self.program, self.cluster = program, cluster
        self.mesh = Mesh.parse(program.mesh)
        self.coords = self.mesh.coords(rank)
        self.links = cost_model(cluster, self.mesh).plain.links

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
        parts, axis_name, transposed, count = node.args
        whole = _EXCHANGES[collective_kind(node)]
        args = (*parts, transposed) if whole == _EXCHANGES["expert_mm"] else (*parts, count, transposed)
        product = self.node(replace(node, op=whole, args=args), values)
        axis = self.mesh.index(str(axis_name))
        rows = [values[r.name] for r in parts]
        rows = [v for v in rows if len(v.type.shape) < 3]
        rows += [values[o] for o, t in zip(node.outs, node.types, strict=True) if t and len(t.shape) < 3]
        sizes = [self.bytes_of(v.type, v.layout) for v in rows]
        comm = sum(float(seconds("all_to_all", n, self.links[axis])) for n in sizes)
        ways = self.mesh.sizes[axis]
        return NodeCost(product.compute, comm, sum(sizes) * _WIRE["all_to_all"] * (ways - 1) / ways)

    # -- sums ----------------------------------------------------------------------------------------

    def segment(self, name: str) -> SegmentCost:
        segment = self.program.lowered.segments[name]
        return self._sum(segment.graph.nodes, placed_of(segment))

    def main(self) -> SegmentCost:
        """Collectives between the calls."""
        lowered = self.program.lowered
        return self._sum([i for i in lowered.main if isinstance(i, Node)], lowered.values)

    def step(self) -> SegmentCost:
        """One forward and backward, nothing hidden behind anything."""
        costs = {name: self.segment(name) for name in self.program.lowered.segments}
        parts = [self.main()]
        parts += [costs[i.segment] for i in self.program.lowered.main if isinstance(i, Call)]
        return SegmentCost(
            sum(p.compute for p in parts),
            sum(p.comm for p in parts),
            sum(p.wire for p in parts),
            sum(p.collectives for p in parts),
        )

    def _sum(self, nodes: Iterable[Node], values: Mapping[str, Placed]) -> SegmentCost:
        costs = [(n, self.node(n, values)) for n in nodes]
        return SegmentCost(
            sum(c.compute for _, c in costs),
            sum(c.comm for _, c in costs),
            sum(c.wire for _, c in costs),
            sum(is_message(n) for n, _ in costs),
        )

    def traffic(self) -> list[Traffic]:
        """All collectives of one step, by kind and axis, most bytes first."""
        lowered = self.program.lowered
        found: dict[tuple[str, str], tuple[int, float]] = {}
        for item in lowered.main:
            if isinstance(item, Call):
                segment = lowered.segments[item.segment]
                nodes, values = segment.graph.nodes, placed_of(segment)
            else:
                nodes, values = (item,), lowered.values
            for node in filter(is_message, nodes):
                key = (collective_kind(node), str(node.args[1]))
                count, wire = found.get(key, (0, 0.0))
                found[key] = (count + 1, wire + self.node(node, values).wire)
        rows = [Traffic(kind, axis, count, wire) for (kind, axis), (count, wire) in found.items()]
        return sorted(rows, key=lambda t: (-t.wire, t.kind, t.axis))

    def held(self) -> Held:
        """Bytes on this rank between and within steps, with Adam."""
        lowered, signature = self.program.lowered, self.program.signature
        trained = {r.target for r in signature.results if r.kind == "grad"}
        sizes = [
            (p, self.bytes_of(lowered.values[p.name].type, lowered.values[p.name].layout))
            for p in signature.ports
            if p.kind == "param"
        ]
        grads = sum(n for p, n in sizes if p.target in trained)
        return Held(sum(n for _, n in sizes), grads, _MOMENTS * grads, self._kept())

    def _kept(self) -> float:
        """Bytes of what forward makes and backward reads, each storage once."""
        lowered = self.program.lowered
        storage: dict[str, tuple[object, float]] = {
            p.name: (p.name, 0.0) for p in self.program.signature.ports
        }
        kept: dict[object, float] = {}
        for number, item in enumerate(lowered.main):
            if item.backward:
                kept |= dict(storage[name] for name in _arguments(item) if name in storage)
            elif isinstance(item, Node):
                placed = lowered.values[item.name]
                storage[item.name] = (item.name, self.bytes_of(placed.type, placed.layout))
            else:
                self._call_storage(number, item, storage)
        return sum(kept.values())

    def _call_storage(self, number: int, call: Call, storage: dict[str, tuple[object, float]]) -> None:
        segment = self.program.lowered.segments[call.segment]
        types = segment.graph.types()
        given = dict(zip((n for n, _ in segment.graph.inputs), call.args, strict=True))
        base = view_roots(segment)
        for outer, inner in zip(call.outs, segment.graph.outputs, strict=True):
            root = base.get(inner, inner)
            if root in given:
                storage[outer] = storage.get(given[root], (given[root], 0.0))
            else:
                storage[outer] = ((number, root), self.bytes_of(types[root], segment.layouts[root]))

    def facts(self) -> Facts:
        """Counts over the text of the program, every segment once."""
        lowered = self.program.lowered
        everything = [p for s in lowered.segments.values() for p in placed_of(s).values()]
        everything += [lowered.values[p.name] for p in self.program.signature.ports]
        uneven = sum(1 for v in everything if not self._even(v))
        gathers = sum(
            1
            for segment in lowered.segments.values()
            for node in segment.graph.nodes
            if collective_kind(node) == "all_gather" and self._makes_whole(node, segment)
        )
        return Facts(uneven, gathers, 0)

    def _even(self, value: Placed) -> bool:
        return all(
            not isinstance(p, Shard) or is_even(value.type.shape[p.dim], p, size)
            for p, size in zip(value.layout, self.mesh.sizes, strict=True)
        )

    def _makes_whole(self, node: Node, segment: LoweredSegment) -> bool:
        """Whether a gather leaves a value that is no input of the segment (a parameter) whole everywhere."""
        inputs = {n for n, _ in segment.graph.inputs}
        sources = zip(refs_of(node), node.outs, strict=True)
        return any(n not in inputs and all(p == R for p in segment.layouts[o]) for n, o in sources)


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


def view_roots(segment: LoweredSegment) -> dict[str, str]:
    """For every view the value whose storage it shares."""
    roots: dict[str, str] = {}
    for node in segment.graph.nodes:
        if node.op in VIEWS:
            source = next(refs_of(node), None)
            if source is not None:
                roots |= {out: roots.get(source, source) for out in node.outs}
    return roots


def _arguments(item: Call | Node) -> tuple[str, ...]:
    return item.args if isinstance(item, Call) else tuple(refs_of(item))
