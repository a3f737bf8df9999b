"""The ops that a ring stands for, so that each of them is proved as if it stood alone.

What lies between them has no name in the program. Where it must lie follows from what the ring takes and
makes, product by product; whether the ops may run like that is for their rules to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from autoshard.ir import Node, Ref, TensorType, refs_of
from autoshard.ir.collectives import EXPERT_RELAY, TensorTransfer, TransferKind, collective, is_ring, spec_of
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.placement import P, Partial, Placement, R, Shard
from autoshard.ir.quantized import WIRE_BITS
from autoshard.ir.rings import Ring, ring_of
from autoshard.rules.attention import is_windowed
from autoshard.rules.core import RuleFn
from autoshard.rules.local import LocalCall, MeshShape, symbolic_shape

_MM, _VIEW, _ADD = "aten.mm.default", "aten.reshape.default", "aten.add.Tensor"


def opened(
    node: Node, values: Mapping[str, PlacedValue], rules: Mapping[str, RuleFn], mesh: MeshShape
) -> tuple[tuple[Node, ...], dict[str, PlacedValue]] | str:
    """(the ops in order, as ranks run them; all values around and between them), or what is wrong with the
    text of the ring. Values between the ops have names that no program can have."""
    ring = ring_of(node)
    if ring is None:
        return "its arguments are not those of such a ring"
    if ring.axis not in mesh.names:
        return f"the mesh has no axis {ring.axis!r}"
    shape = values[ring.moved].type.shape
    if not 0 <= ring.dim < len(shape) - 1:
        return f"dim {ring.dim} of {values[ring.moved].type} is not one of its rows"
    outs = node.outs[1:] if ring.gathers else node.outs * len(ring.products)
    for (left, right), out in zip(ring.products, outs, strict=True):
        a, b, y = (_matrix(values[n].type, rows=n != right) for n in (left, right, out))
        if a is None or b is None or y is None or (a[1], (a[0], b[1])) != (b[0], y):
            types = ", ".join(str(values[n].type) for n in (left, right, out))
            return f"{left} times {right} does not give {out}: they are {types}"
    if not ring.gathers:
        placed = values[ring.moved]
        part = symbolic_shape(placed.type.shape, placed.layout, mesh)
        if repr(ring.shape) != repr(part):
            return f"a rank's part of {ring.moved} has the shape {part}, not {ring.shape}"
    new = _Opening(node, ring, dict(values), rules, mesh)
    nodes = new.gather() if ring.gathers else new.scatter()
    return tuple(nodes), new.values


def on_levels(node: Node) -> bool:
    """Whether a node may go over an axis on levels (`passes/partition/axis_levels.py`)."""
    spec = spec_of(node)
    return spec is not None and (spec.family == "experts" or (spec.family == "ring" and bool(spec.product)))


def broken_levels(node: Node, values: Mapping[str, PlacedValue], mesh: MeshShape) -> str:
    """What is wrong with the levels of a node; "" if nothing is. They do not change what is computed, if
    tokens find their experts: every rank has as many."""
    told = dict(node.kwargs)
    inside, axis = told.pop("inside", 1), node.args[1]
    ways = mesh.sizes[mesh.names.index(axis)] if axis in mesh.names else 0
    relayed, bits, group = (told.pop(key, None) for key in ("relayed", "bits", "group"))
    if (bits, type(group)) not in ((None, type(None)), (WIRE_BITS, int)) or (bits and is_ring(node)):
        return f"no tokens travel with {bits} bits in groups of {group}"
    if node.op == EXPERT_RELAY.op:
        source = next(refs_of(node), "")
        if relayed is not None or source not in values or values[source] != values[node.name]:
            return f"{source} is no message that could become {node.name}"
    elif relayed not in (None, True):
        told["relayed"] = relayed
    uneven = not is_ring(node) and (ways == 0 or node.args[2] % ways)
    uneven = uneven or (is_ring(node) and is_windowed(node))  # whose keys go to the next rank alone
    if told or type(inside) is not int or inside < 1 or ways % inside or uneven:
        return f"{dict(node.kwargs)} says no levels of the {ways} ranks of {axis}"
    return ""


def _matrix(type_: TensorType, *, rows: bool) -> tuple[int, int] | None:
    """Rows and columns of a factor or a product, None if it is none. rows: whether its leading dims may be
    several, which are then seen as one."""
    shape = type_.shape
    if len(shape) < 2 or (len(shape) > 2 and not rows):
        return None
    return prod(shape[:-1]), shape[-1]


class _Opening:
    def __init__(
        self,
        node: Node,
        ring: Ring,
        values: dict[str, PlacedValue],
        rules: Mapping[str, RuleFn],
        mesh: MeshShape,
    ) -> None:
        self.node, self.ring, self.values, self.rules, self.mesh = node, ring, values, rules, mesh
        self.axis = mesh.names.index(ring.axis)

    def gather(self) -> list[Node]:
        ring, node = self.ring, self.node
        full = node.outs[0]
        type_ = self.values[full].type
        nodes = [self._collective("all_gather", ring.moved, full)]
        rows = full
        if len(type_.shape) > 2:
            rows = f"{full}.rows"
            flat = TensorType((prod(type_.shape[:-1]), type_.shape[-1]), type_.dtype)
            # every product needs the rows in the same place; the first says where
            out, weight = self.values[node.outs[1]].layout, self.values[ring.products[0][1]].layout
            self.values[rows] = PlacedValue(flat, tuple(map(_rows_of, out, weight)))
            nodes.append(self._op(_VIEW, (Ref(full), flat.shape), rows))
        for (_, weight_name), product in zip(ring.products, node.outs[1:], strict=True):
            nodes.append(self._op(_MM, (Ref(rows), Ref(weight_name)), product))
        return nodes

    def scatter(self) -> list[Node]:
        ring, out = self.ring, self.node.outs[0]
        placed = self.values[out]
        type_, layout = placed.type, tuple(P if k == self.axis else p for k, p in enumerate(placed.layout))
        nodes: list[Node] = []
        total = ""
        for k, (left, right) in enumerate(ring.products):
            a, b = self.values[left], self.values[right]
            part = f"{out}.product{k}"
            flat = TensorType((a.type.shape[0], b.type.shape[1]), type_.dtype)
            self.values[part] = PlacedValue(flat, tuple(map(_product_of, a.layout, b.layout)))
            nodes.append(self._op(_MM, (Ref(left), Ref(right)), part))
            if len(type_.shape) > 2:
                self.values[f"{out}.shaped{k}"] = PlacedValue(type_, layout)
                nodes.append(self._op(_VIEW, (Ref(part), type_.shape), f"{out}.shaped{k}"))
                part = f"{out}.shaped{k}"
            if total:
                self.values[f"{out}.sum{k}"] = PlacedValue(type_, layout)
                nodes.append(self._op(_ADD, (Ref(total), Ref(part)), f"{out}.sum{k}"))
                part = f"{out}.sum{k}"
            total = part
        return [*nodes, self._collective("reduce_scatter", total, out)]

    def _collective(self, transfer: TransferKind, source: str, out: str) -> Node:
        ring, node = self.ring, self.node
        moved = TensorTransfer(source, out, (ring.dim, ring.outer, 1, None))
        types = (self.values[out].type,)
        return collective(transfer, ring.axis, (moved,), types, node.origin, node.backward)

    def _op(self, op: str, args: tuple[object, ...], out: str) -> Node:
        """One of the ops, with the arguments of a rank."""
        node = Node(op, args, (), (out,), (self.values[out].type,), self.node.origin, self.node.backward)
        return on_a_rank(node, self.values, self.rules, self.mesh)


def on_a_rank(
    node: Node, values: Mapping[str, PlacedValue], rules: Mapping[str, RuleFn], mesh: MeshShape
) -> Node:
    """An op of one result with the arguments of a rank. values: it takes and makes."""
    names, placed = list(refs_of(node)), values[node.name]
    ins, fn = tuple(values[n].type for n in names), rules.get(node.op)
    # a view of other elements has no rule that could read it: its terms do not fit, which says so
    if fn is None or (node.op == _VIEW and ins[0].numel != placed.type.numel):
        return node
    rule = fn(node, ins)
    if rule.local is None:
        return node
    layouts = tuple(values[n].layout for n in names)
    return rule.local(LocalCall(node, ins, layouts, (placed.layout,), mesh))


def _rows_of(product: Placement, weight: Placement) -> Placement:
    """Where the rows of a product lie on an axis, given the product and its right factor."""
    if isinstance(product, Shard):
        return product if product.dim == 0 else R
    if isinstance(weight, Shard) and weight.dim == 0:
        return Shard(1, weight.outer, weight.inner)
    return P if isinstance(product, Partial) and weight == R else R


def _product_of(left: Placement, right: Placement) -> Placement:
    """Where a product lies on an axis, given its factors."""
    if isinstance(left, Shard) and left.dim == 0:
        return left
    if isinstance(right, Shard) and right.dim == 1:
        return right
    return R if left == R and right == R else P
