"""Products taken apart beside the gather before them, or the reduce-scatter after them.

``g = all_gather(x); y = g @ w`` becomes one op, in which chunks of x go round the ranks of the axis and are
multiplied as they come by; so does ``reduce_scatter(a @ w)``, in which sums go round (`ir.rings`; Wang et
al., ASPLOS 2023). Views between the two are left out; several products of one gather, and a sum of several
products, are one op.

An op is made where it makes its segment shorter by the prices of its chunks, against the ops apart in the
order that `overlap` gives them. Collectives of parameters and of their gradients stay: there is always
something else beside which they are on their way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import prod

from autoshard.ir import Graph, Node, Ref, TensorType, refs_of
from autoshard.ir.collectives import ALL_GATHER, ALL_GATHER_MM, MM_REDUCE_SCATTER, REDUCE_SCATTER, is_message
from autoshard.ir.lowered import Lowered, LoweredSegment
from autoshard.ir.views import RESHAPES, TRANSPOSES
from autoshard.passes.fuse.fuse_bias import fused
from autoshard.passes.overlap.schedule_ops import Seconds, node_seconds, shortest
from autoshard.passes.segment_parts import derived_values
from autoshard.passes.simplify.segment_cache import SegmentCache
from autoshard.rules.local import MeshShape, symbolic_shape

_MM, _ADD = "aten.mm.default", "aten.add.Tensor"
#: what a parameter may go through before it is a factor
_LIGHT = RESHAPES | TRANSPOSES | {ALL_GATHER.op}
#: a ring has to save this share of its segment
_WORTH = 1e-3


@dataclass(frozen=True)
class Rings:
    """By what rings are made.

    seconds: prices of nodes. without: axes over which there are none. moving: whether ops are ordered beside
    messages afterwards.
    """

    mesh: MeshShape
    seconds: Seconds
    without: frozenset[str] = frozenset()
    moving: bool = True


@dataclass(frozen=True)
class _Found:
    """A ring in place of some nodes. at: name of the node whose place it takes."""

    node: Node
    at: str
    gone: frozenset[str]


def ring_products(
    lowered: Lowered, parameters: Collection[str], gradients: Collection[str], how: Rings, known: SegmentCache
) -> Lowered:
    """The program with rings where they make a segment shorter; each says by how much.

    parameters: inputs of the program that are. gradients: values of main that are results.
    """
    stored = derived_values(lowered, parameters, lambda node: node.op in _LIGHT)
    grads = _grads(lowered, gradients)

    def made(name: str, segment: LoweredSegment) -> LoweredSegment:
        own, out = frozenset(stored.get(name, ())), grads.get(name, frozenset())
        return known.of("rings", segment, (own, out, how), lambda: _Segment(segment, own, out, how).run())

    return replace(lowered, segments={name: made(name, s) for name, s in lowered.segments.items()})


# -- what belongs to parameters ----------------------------------------------------------------------------


def _grads(lowered: Lowered, gradients: Collection[str]) -> dict[str, frozenset[str]]:
    """Segment -> its values that are gradients of parameters, before views, collectives and sums of them."""
    known = set(gradients)
    result: dict[str, set[str]] = {}
    for item in reversed(lowered.main):
        if isinstance(item, Node):
            if not known.isdisjoint(item.outs):
                known.update(refs_of(item))
            continue
        graph = lowered.segments[item.segment].graph
        own = result.setdefault(item.segment, set())
        own |= {inner for o, inner in zip(item.outs, graph.outputs, strict=True) if o in known}
        for node in reversed(graph.nodes):
            if (node.op in _LIGHT or node.op == REDUCE_SCATTER.op) and not own.isdisjoint(node.outs):
                own.update(refs_of(node))
        known |= {arg for (n, _), arg in zip(graph.inputs, item.args, strict=True) if n in own}
    return {name: frozenset(own) for name, own in result.items()}


# -- one segment -------------------------------------------------------------------------------------------


class _Segment:
    def __init__(
        self, segment: LoweredSegment, stored: Collection[str], grads: Collection[str], how: Rings
    ) -> None:
        self.segment, self.stored, self.grads, self.how = segment, stored, grads, how
        graph = segment.graph
        self.types = graph.types()
        self.makers = {out: node for node in graph.nodes for out in node.outs}
        self.users: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in dict.fromkeys(refs_of(node)):
                self.users.setdefault(name, []).append(node)
        self.uses = Counter(r for n in graph.nodes for r in refs_of(n)) + Counter(graph.outputs)

    def run(self) -> LoweredSegment:
        segment, gone = self.segment, set[str]()
        places = [*self._gathers(), *self._scatters()]
        before = self._seconds(segment) if places else 0.0
        for options in places:
            left = [ring for ring in options if gone.isdisjoint(ring.gone)]
            new = {ring: _with(segment, ring) for ring in left}
            took = {ring: self._seconds(new[ring]) for ring in left}
            best = min(left, key=took.__getitem__, default=None)
            if best is not None and took[best] < before * (1 - _WORTH):
                node = best.node
                why = {**new[best].why, node.name: _note(node, before, took[best])}
                segment = replace(new[best], why=why)
                gone |= best.gone
                before = took[best]
        return segment

    def _seconds(self, segment: LoweredSegment) -> float:
        """Seconds of a segment, but for its gathers of parameters, which are on their way before."""
        segment = fused(segment)
        each = zip(segment.graph.nodes, node_seconds(segment, self.how.seconds), strict=True)
        costs = [0.0 if is_message(n) and n.name in self.stored else s for n, s in each]
        return shortest(segment.graph, costs, moving=self.how.moving)

    # what there is

    def _gathers(self) -> Iterator[list[_Found]]:
        """Per gather, with all products of it, or with the largest alone: small ones lose in chunks."""
        for node in self.segment.graph.nodes:
            out = node.name
            rank = len(self.types[out].shape) if out in self.types else 0
            if node.op != ALL_GATHER.op or not self._fits(node, rank) or out in self.stored:
                continue
            type_ = self.types[out]
            flat = TensorType((prod(type_.shape[:-1]), type_.shape[-1]), type_.dtype)
            rows = [out] if rank == 2 else self._views(out, flat)
            products = [
                n
                for row in rows
                for n in self.users.get(row, ())
                if n.op == _MM and n.args[0] == Ref(row) and self._is_weight(n.args[1], out)
            ]
            if products:
                largest = max(products, key=lambda n: self.types[n.name].numel)
                yield [_gather_of(node, chosen) for chosen in (products, [largest])[: len(products)]]

    def _scatters(self) -> Iterator[list[_Found]]:
        for node in self.segment.graph.nodes:
            type_ = node.types[0]
            if node.op != REDUCE_SCATTER.op or type_ is None or not self._fits(node, len(type_.shape)):
                continue
            if node.name in self.grads:
                continue
            gone: set[str] = {node.name}
            products = self._sum(node.args[0].name, type_, gone)
            if products:
                shape = symbolic_shape(type_.shape, self.segment.layouts[node.name], self.how.mesh)
                factors = tuple(a for n in products for a in n.args)
                ring = replace(node, op=MM_REDUCE_SCATTER.op, args=(factors, *node.args[1:], shape))
                yield [_Found(ring, node.name, frozenset(gone))]

    def _fits(self, node: Node, rank: int) -> bool:
        """Whether a collective moves equal chunks of rows over an axis that has rings."""
        even = set(dict(node.kwargs)) <= {"outer"} and node.kwarg("outer", 1) > 0
        return even and node.args[1] not in self.how.without and node.args[2] < rank - 1

    def _views(self, name: str, type_: TensorType) -> list[str]:
        """Views of a value that have a type."""
        return [n.name for n in self.users.get(name, ()) if n.op in RESHAPES and n.types[0] == type_]

    def _is_weight(self, factor: object, gathered: str) -> bool:
        """Whether a factor is an input of the segment, looked at in some way, and not what is gathered."""
        if not isinstance(factor, Ref):
            return False
        name = factor.name
        while name in self.makers:
            node = self.makers[name]
            if node.op not in _LIGHT or name == gathered:
                return False
            name = next(refs_of(node))
        return True

    def _sum(self, name: str, type_: TensorType, gone: set[str]) -> list[Node]:
        """The products whose sum, from left to right, a value is, none if it is no such; all that is between
        them and it goes into ``gone``."""
        node = self.makers.get(name)
        if node is None or self.uses[name] != 1:
            return []
        gone.add(name)
        if node.op == _ADD and not node.kwargs and len(node.args) == 2:
            left, right = node.args
            if not isinstance(left, Ref) or not isinstance(right, Ref):
                return []
            if self.types[left.name] != type_ or self.types[right.name] != type_:
                return []
            first = self._sum(left.name, type_, gone)
            last = self._product(right.name, type_, gone)
            return [*first, last] if first and last is not None else []
        product = self._product(name, type_, gone)
        return [] if product is None else [product]

    def _product(self, name: str, type_: TensorType, gone: set[str]) -> Node | None:
        """The product that a value is a view of, in the layout of the sum."""
        node = self.makers.get(name)
        if node is None or self.uses[name] != 1 or self.types[name] != type_:
            return None
        gone.add(name)
        if node.op in RESHAPES and len(type_.shape) > 2:
            name = next(refs_of(node))
            flat = TensorType((prod(type_.shape[:-1]), type_.shape[-1]), type_.dtype)
            node = self.makers.get(name)
            if node is None or self.uses[name] != 1 or self.types[name] != flat:
                return None
            gone.add(name)
        return node if node.op == _MM and all(isinstance(a, Ref) for a in node.args) else None


def _gather_of(gather: Node, products: Sequence[Node]) -> _Found:
    """A gather and products of what it gives as a ring."""
    names = tuple(n.name for n in products)
    factors = (gather.args[0], *(n.args[1] for n in products))
    ring = replace(
        gather,
        op=ALL_GATHER_MM.op,
        args=(factors, *gather.args[1:]),
        outs=(gather.name, *names),
        types=(gather.types[0], *(n.types[0] for n in products)),
    )
    return _Found(ring, gather.name, frozenset((gather.name, *names)))


def _note(ring: Node, before: float, after: float) -> str:
    """What a ring does to the seconds of its segment."""
    axis, factors = ring.args[1], len(ring.args[0])
    products = factors - 1 if ring.op == ALL_GATHER_MM.op else factors // 2
    beside = f"{products} products" if products > 1 else "its product"
    return f"chunks go round {axis} beside {beside}: {before * 1e6:.0f} us, now {after * 1e6:.0f} us"


def _with(segment: LoweredSegment, ring: _Found) -> LoweredSegment:
    """The segment with a ring; what nothing uses any more is gone, and what its factors need comes first."""
    graph = segment.graph
    gone = ring.gone - {ring.at}
    nodes = [ring.node if n.name == ring.at else n for n in graph.nodes if n.name not in gone]
    used = Counter(r for n in nodes for r in refs_of(n)) + Counter(graph.outputs)
    nodes = [n for n in nodes if n.op not in RESHAPES or used[n.name]]
    nodes = _sorted(nodes)
    new = Graph(graph.name, graph.inputs, tuple(nodes), graph.outputs)
    known = new.types()
    layouts = {n: lay for n, lay in segment.layouts.items() if n in known}
    why = {n: text for n, text in segment.why.items() if n in known}
    return replace(segment, graph=new, layouts=layouts, why=why)


def _sorted(nodes: Sequence[Node]) -> list[Node]:
    """The nodes in an order that respects their uses, as near to theirs as that allows."""
    makers: Mapping[str, int] = {out: k for k, node in enumerate(nodes) for out in node.outs}
    needs = [{makers[r] for r in refs_of(node) if r in makers} for node in nodes]
    users: list[list[int]] = [[] for _ in nodes]
    for k, result in enumerate(needs):
        for need in result:
            users[need].append(k)
    left = [len(n) for n in needs]
    ready = [k for k, n in enumerate(left) if not n]
    heapify(ready)
    order: list[Node] = []
    while ready:
        at = heappop(ready)
        order.append(nodes[at])
        for user in users[at]:
            left[user] -= 1
            if not left[user]:
                heappush(ready, user)
    return order
