"""Run what is wide on some rows (tokens) at a time: MLPs, the head and its loss.

Between the products that widen a row and those that narrow it again, a layer makes values several times as
wide as what it takes and gives: of a loss, logits [tokens, vocabulary]. Such a stretch becomes one op
(`ir.row_tiles`), in forward and in backward, which repeats what forward did. Nothing wide exists for all
rows, or is saved for backward (of MLPs: Bekman et al., "Arctic Long Sequence Training", 2025, section 3.3 and
3.4; of the loss: Hsu et al., "Liger Kernel", 2024). Logits that a model returns beside its loss are not made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from autoshard.ir import Call, Folded, Graph, Joint, Node, Ref, TensorType, refs_of
from autoshard.ir.graph import renamed
from autoshard.ir.joint import NOT_MADE
from autoshard.ir.row_tiles import SHAPED, TILES, RowTiles, without_rows
from autoshard.ir.views import ALIASES, RESHAPES, TRANSPOSES
from autoshard.passes.memory.sink_masks import sink_masks
from autoshard.passes.memory.wide_values import (
    WIDER,
    WideValues,
    between,
    makes_mask,
    weights_of,
    wide_values,
    widens,
)
from autoshard.passes.segment_parts import fresh, without_dead
from autoshard.rules.body_factors import BodyFactors, NoFactorsError, body_factors
from autoshard.rules.core import RuleFn
from autoshard.rules.row_tiles import kinds_of

#: views of all elements
_VIEWS = RESHAPES | TRANSPOSES | ALIASES


def tile_rows(folded: Folded, rows: int, table: Mapping[str, RuleFn]) -> Folded:
    """The model with its wide stretches in tiles; the same where it has none.

    rows: tokens of a tile on a rank, at most. table: the rules of ops, by which a stretch is known to treat
    every row by itself.
    """
    folded = sink_masks(folded, table)
    for name in dict.fromkeys(c.segment for c in folded.calls):
        tried: set[str] = set()
        while (begin := _next_begin(folded, name, tried, table)) is not None:
            tried.add(begin)
            folded = _with_stretch(folded, name, begin, rows, table)
    return folded


def _with_stretch(folded: Folded, name: str, begin: str, rows: int, table: Mapping[str, RuleFn]) -> Folded:
    """The model with as much in tiles as can be around an op; as it is where not every row is treated by
    itself."""
    for full in (True, False):
        try:
            return _Stretch(folded, name, begin, rows, table, whole=full).tiled()
        except NoFactorsError:
            continue
    return folded


def _next_begin(folded: Folded, name: str, tried: Collection[str], table: Mapping[str, RuleFn]) -> str | None:
    """The first op of a segment that makes its rows wider, of those that were not tried; of a backward
    segment, the first that makes a mask."""
    graph, weights = folded.segments[name], weights_of(folded, name)
    backward = any(c.backward for c in folded.calls if c.segment == name)
    for node in graph.nodes:
        if node.name in tried:
            continue
        if makes_mask(node, graph, table) or (not backward and widens(node, graph, weights)):
            return node.name
    return None


class _Stretch:
    """One stretch of a forward segment, with what backward makes of it."""

    def __init__(
        self,
        folded: Folded,
        name: str,
        begin: str,
        rows: int,
        table: Mapping[str, RuleFn],
        *,
        whole: bool,
    ) -> None:
        """whole: with other wide values that only elementwise ops lie between, and with what is elementwise
        behind it; backward then repeats all that it reads of it, else what is wide."""
        self.folded, self.name, self.rows, self.table, self.whole = folded, name, rows, table, whole
        self.graph = folded.segments[name]
        self.weights = weights_of(folded, name)
        self.makers = {o: n for n in self.graph.nodes for o in n.outs}
        node = next(n for n in self.graph.nodes if n.name == begin)
        types = self.graph.types()
        narrow = [next(refs_of(node))]
        if makes_mask(node, self.graph, table):
            narrow = [n for n, t in self.graph.inputs if t.is_float and n not in self.weights]
        self.limit = WIDER * max((types[n].nbytes for n in narrow), default=0)
        self.wide = self._stretch(begin)
        self.calls = [c for c in folded.calls if c.segment == name]
        self.users: dict[str, list[Call]] = {}
        for call in folded.calls:
            for arg in call.args:
                self.users.setdefault(arg, []).append(call)
        self.taken = {v for g in folded.segments.values() for v in g.types()}
        self.taken |= {p.name for p in folded.joint.ports} | {o for c in folded.calls for o in c.outs}
        self.segments = dict(folded.segments)
        #: per backward call, its arguments
        self.args: dict[tuple[str, ...], tuple[str, ...]] = {}
        #: values of the forward segment -> what backward calls them in main, per forward call
        self.handed: dict[str, list[str]] = {}

    def _stretch(self, begin: str) -> WideValues:
        """The stretch of the forward segment."""
        result = self._around(begin)
        if not self.whole:
            return result
        for node in self.graph.nodes:
            if node.name not in result.nodes and widens(node, self.graph, self.weights):
                result = self._joined(result, self._around(node.name))
        return replace(result, nodes=self._absorbed(self.graph, result.nodes, self.weights))

    def _around(self, begin: str) -> WideValues:
        first = len(self.graph.types()[begin].shape) - 2
        return wide_values(self.graph, {begin: first}, self.limit, self.weights)

    def _joined(self, one: WideValues, other: WideValues) -> WideValues:
        """Both, if one follows the other and only elementwise ops lie between; else the first."""
        nodes = one.nodes | other.nodes
        inner = between(self.graph, nodes) - nodes
        types = self.graph.types()
        beside = any(
            (node.name in one.nodes and maker in other.nodes - one.nodes)
            or (node.name in other.nodes - one.nodes and maker in one.nodes)
            for node in self.graph.nodes
            for maker in (self.makers[r].name for r in refs_of(node) if r in self.makers)
        )
        if not inner and not beside:
            return one
        if any(n.name in inner and self._kind(n, types) == "matmul" for n in self.graph.nodes):
            return one
        return WideValues({**other.dims, **one.dims}, nodes | inner)

    def _kind(self, node: Node, types: Mapping[str, TensorType]) -> str:
        fn = self.table.get(node.op)
        return "matmul" if fn is None else fn(node, [types[r] for r in refs_of(node)]).kind

    def _absorbed(self, graph: Graph, nodes: frozenset[str], weights: Collection[str]) -> frozenset[str]:
        """With elementwise ops of which nothing but what these nodes make has rows."""
        types = graph.types()
        result = set(nodes)
        new = {o for n in graph.nodes if n.name in nodes for o in n.outs}
        for node in graph.nodes:
            rows = [r for r in refs_of(node) if r not in weights]
            if node.name in result or not rows or not new.issuperset(rows):
                continue
            if node.op in _VIEWS - TRANSPOSES or self._kind(node, types) == "pointwise":
                result.add(node.name)
                new.update(node.outs)
        return frozenset(result)

    def tiled(self) -> Folded:
        """The model with the stretch as one op. Raises NoFactorsError if it cannot be that."""
        inside = [n for n in self.graph.nodes if n.name in self.wide.nodes]
        lost = [k for k, v in enumerate(self.graph.outputs) if v in self.wide.dims or self._repeated(v, k)]
        self._check_results({c.outs[k] for c in self.calls for k in lost})
        self._check_worth(inside, lost)
        for segment in self._backward_segments(lost):
            self._backward(segment, lost)
        graph = self._with_tiles(self.graph, inside, lost)
        outputs = [v for k, v in enumerate(graph.outputs) if k not in lost]
        added = [v for v in self.handed if v not in self.graph.outputs]
        self.segments[self.name] = without_dead(replace(graph, outputs=(*outputs, *added)))
        return self._rebuilt(lost, added)

    def _check_worth(self, inside: Sequence[Node], lost: Sequence[int]) -> None:
        """Less must be handed on than there is inside: not so where wide rows are cut into parts."""
        types = self.graph.types()
        used = {r for n in self.graph.nodes if n.name not in self.wide.nodes for r in refs_of(n)}
        used |= {v for k, v in enumerate(self.graph.outputs) if k not in lost}
        given = sum(types[o].nbytes for n in inside for o in n.outs if o in used and o in types)
        if given >= max(types[v].nbytes for v in self.wide.dims):
            raise NoFactorsError("as much is handed on as is made")

    def _repeated(self, value: str, number: int) -> bool:
        """Whether backward repeats a narrow value, which it alone reads. number: of the output."""
        maker = self.makers.get(value)
        if not self.whole or maker is None or value in self.weights or self.calls[0].backward:
            return False
        if not self._is_recomputed(maker):
            return False
        outs = [c.outs[number] for c in self.calls]
        users = [u for o in outs for u in self.users.get(o, ())]
        returned = {r.value for r in self.folded.joint.results}
        return bool(users) and all(u.backward for u in users) and returned.isdisjoint(outs)

    def _is_recomputed(self, maker: Node) -> bool:
        """Whether backward recomputes what a node does: not products, whose narrow results it is given."""
        return maker.name in self.wide.nodes and self._kind(maker, self.graph.types()) != "matmul"

    # -- what backward reads ---------------------------------------------------------------------------

    def _check_results(self, gone: Collection[str]) -> None:
        """Of what is no longer made, only backward and the caller of the model may have asked for."""
        left = [r for r in self.folded.joint.results if r.kind == "output" and r.value not in gone]
        for result in self.folded.joint.results:
            if result.value in gone and (result.kind != "output" or not left):
                raise NoFactorsError("the model returns it")
        tangents = {p.target for p in self.folded.joint.ports if p.kind == "tangent"}
        if any(r.value in gone and r.target in tangents for r in self.folded.joint.results):
            raise NoFactorsError("gradients of it are asked for")
        if any(not call.backward for value in gone for call in self.users.get(value, ())):
            raise NoFactorsError("other layers use it")

    def _backward_segments(self, lost: Sequence[int]) -> list[str]:
        values = [c.outs[k] for c in self.calls for k in lost]
        return list(dict.fromkeys(u.segment for v in values for u in self.users.get(v, ())))

    def _backward(self, segment: str, lost: Sequence[int]) -> None:
        """Let a backward segment make again what it was given."""
        graph = self.folded.segments[segment]
        calls = [c for c in self.folded.calls if c.segment == segment]
        sources = {o: (c, k) for c in self.calls for k, o in enumerate(c.outs)}
        #: position among the inputs -> the value of the forward segment
        given: dict[int, str] = {}
        partners: list[Call] = []
        for call in calls:
            own = {p: sources[a] for p, a in enumerate(call.args) if a in sources and sources[a][1] in lost}
            origins = {id(c): c for c, _ in own.values()}
            now = {p: self.graph.outputs[k] for p, (_, k) in own.items()}
            if len(origins) != 1 or (given and now != given):
                raise NoFactorsError("backward reads several layers at once")
            given = now
            partners += origins.values()
        names = [n for n, _ in graph.inputs]
        weights = weights_of(self.folded, segment)
        seeds = {names[p]: self.wide.dims[v] for p, v in given.items() if v in self.wide.dims}
        wide = wide_values(graph, seeds, self.limit, weights)
        if self.whole:
            readers = {n.name for n in graph.nodes for r in refs_of(n) if r in {names[p] for p in given}}
            nodes = wide.nodes | readers
            nodes = self._absorbed(graph, nodes | between(graph, nodes), weights)
            wide = replace(wide, nodes=nodes | between(graph, nodes))
        if any(o in wide.dims for o in graph.outputs):
            raise NoFactorsError("backward hands on wide values")
        recomputed, starts = self._recomputed([given[p] for p in sorted(given)])
        inner = {v: fresh(v, self.taken, "tile") for node in recomputed for v in node.outs}
        args = [list(c.args) for c in calls]
        inputs = list(graph.inputs)
        for value in starts:
            main = [self._handed(value, partner) for partner in partners]
            at = next((p for p in range(len(inputs)) if [a[p] for a in args] == main), None)
            if at is None:
                at = len(inputs)
                inputs.append((fresh(value, self.taken, "tile"), self.graph.types()[value]))
                for row, name in zip(args, main, strict=True):
                    row.append(name)
            inner[value] = inputs[at][0]
        instead = {names[p]: inner[v] for p, v in given.items()}
        body = [
            *renamed(recomputed, inner),
            *renamed([n for n in graph.nodes if n.name in wide.nodes], instead),
        ]
        full = replace(graph, inputs=tuple(inputs), nodes=renamed(graph.nodes, instead))
        new = self._with_tiles(full, body, (), len(recomputed))
        small = without_dead(new)
        used = {r for n in small.nodes for r in refs_of(n)} | set(small.outputs)
        kept = [p for p, (n, _) in enumerate(inputs) if n in used]
        self.segments[segment] = replace(small, inputs=tuple(inputs[p] for p in kept))
        for call, row in zip(calls, args, strict=True):
            self.args[call.outs] = tuple(row[p] for p in kept)

    def _recomputed(self, values: Iterable[str]) -> tuple[list[Node], list[str]]:
        """(nodes that make wide values again, what they start from)."""
        wanted, starts = list(values), dict[str, None]()
        nodes: set[str] = set()
        while wanted:
            value = wanted.pop()
            node = self.makers.get(value)
            repeated = value in self.wide.dims or (
                node is not None and (node.op in _VIEWS or (self.whole and self._is_recomputed(node)))
            )
            if node is None or not repeated:
                starts[value] = None  # among them what is wide and given: a mask, say
            elif node.name not in nodes:
                nodes.add(node.name)
                wanted += refs_of(node)
        order = [n for n in self.graph.nodes if n.name in nodes]
        return order, sorted(starts)

    def _handed(self, value: str, call: Call) -> str:
        """What a value of a forward call is in main, handed on for backward if it was not."""
        inputs = [n for n, _ in self.graph.inputs]
        if value in inputs:
            return call.args[inputs.index(value)]
        if value in self.graph.outputs:
            return call.outs[self.graph.outputs.index(value)]
        if value not in self.handed:
            self.handed[value] = [fresh(value, self.taken, "tile") for _ in self.calls]
        return self.handed[value][next(k for k, c in enumerate(self.calls) if c is call)]

    # -- the op ------------------------------------------------------------------------------------------

    def _with_tiles(
        self,
        graph: Graph,
        body: Sequence[Node],
        lost: Collection[int],
        recomputed: int = 0,
    ) -> Graph:
        """The graph with a body in place of its nodes. lost: positions of outputs that are no longer made.
        recomputed: nodes of the body that repeat what forward did, at its begin."""
        gone = {n.name for n in body}
        new = {o for n in body for o in n.outs}
        rest = [n for n in graph.nodes if n.name not in gone]
        wanted = {v for k, v in enumerate(graph.outputs) if k not in lost}
        wanted |= {r for n in rest for r in refs_of(n)} | set(self.handed)
        outs = [o for n in body for o in n.outs if o in wanted]
        try:
            tile = self._node(graph, body, outs, recomputed)
        except NoFactorsError:
            # what the rows are views of may tell sequences apart
            views = self._views(graph, body, new)
            tile = self._node(graph, [*views, *body], outs, recomputed and recomputed + len(views))
        return replace(graph, nodes=_ordered([n for n, _ in graph.inputs], rest, tile))

    def _node(self, graph: Graph, body: Sequence[Node], outs: Sequence[str], recomputed: int) -> Node:
        """The op with this body. outs: values of it that others use. recomputed: see `_with_tiles`."""
        new = [o for n in body for o in n.outs]
        given = list(dict.fromkeys(r for n in body for r in refs_of(n) if r not in new))
        types = {**graph.types()} | {o: t for n in body for o, t in zip(n.outs, n.types, strict=True) if t}
        inner = {v: f"x{k}" for k, v in enumerate(given)} | {o: f"v{k}" for k, o in enumerate(new)}
        inputs = tuple((inner[v], types[v]) for v in given)
        small = without_dead(Graph("tile", inputs, renamed(body, inner), tuple(inner[o] for o in outs)))
        kept = {n.name for n in small.nodes}
        repeated = sum(inner[n.name] in kept for n in body[:recomputed])
        args = self._cut(small, body_factors(small, self.table), repeated).args([Ref(v) for v in given])
        results = tuple(types[o] for o in outs)
        return Node(TILES, args, (), tuple(outs), results, body[recomputed].origin, body[-1].backward)

    def _views(self, graph: Graph, body: Sequence[Node], made: Collection[str]) -> list[Node]:
        """Views of rows that the body takes."""
        makers = {o: n for n in graph.nodes for o in n.outs}
        result: dict[str, Node] = {}
        wanted = [r for n in body for r in refs_of(n) if r not in made]
        while wanted:
            node = makers.get(wanted.pop())
            if (
                node is not None
                and node.op in _VIEWS
                and node.name not in result
                and not ({*refs_of(node)} & {*made})
            ):
                result[node.name] = node
                wanted += refs_of(node)
        return [n for n in graph.nodes if n.name in result]

    def _cut(self, body: Graph, result: BodyFactors, recomputed: int) -> RowTiles:
        """Which dims are rows: all but the last of what is wide. recomputed: as of `RowTiles`."""
        types = body.types()
        wide = [o for n in body.nodes for o in n.outs if types[o].nbytes > self.limit]
        leading = [tuple(f for d in result.dims[v][:-1] for f in d) for v in wide]
        rows = max(leading, key=leading.count, default=())[-1:]
        if not rows or result.fixed.intersection(rows):
            raise NoFactorsError("rows are not treated alike")
        # of rows of all sequences in one dim, a tile has those of one sequence
        outside = {d[:-1] for laid in result.dims.values() for d in laid if len(d) > 1 and d[-1:] == rows}
        if len(outside) > 1 or any(len(d) != 1 or result.fixed.intersection(d) for d in outside):
            raise NoFactorsError("rows lie in several orders")
        # and so it has where sequences have a dim of their own, in front
        sequences = self.folded.joint.sequences
        first = {result.dims[v][0] for v in wide} - {rows, ()}
        if not outside and sequences > 1 and len(first) == 1:
            free = (d for d in first if not result.fixed.intersection(d))
            outside = {d for d in free if [result.sizes[f] for f in d] == [sequences]}
        batch = next((d[0] for d in outside), None)
        both = rows if batch is None else (batch, *rows)
        if any(result.reduce.get(f, "sum") != "sum" for f in both):
            raise NoFactorsError("what is made of all rows is no sum")
        kinds: dict[str, str] = {}
        for value in types:
            kind = kinds_of(result.dims[value], batch, rows[-1])
            if kind is None:
                raise NoFactorsError("rows lie in another order")
            kinds[value] = kind
        given = [kinds[n] for n, _ in body.inputs]
        if "b" in "".join(kinds.values()) and "s" not in "".join(given):
            raise NoFactorsError("the rows of a sequence are not told")
        shaped = tuple(
            without_rows(n, types[n.name].shape, kinds[n.name]) if n.op in SHAPED else n for n in body.nodes
        )
        return RowTiles(self.rows, replace(body, nodes=shaped), kinds, recomputed)

    # -- main --------------------------------------------------------------------------------------------

    def _rebuilt(self, lost: Sequence[int], added: Sequence[str]) -> Folded:
        gone = {c.outs[k] for c in self.calls for k in lost}
        calls: list[Call] = []
        for call in self.folded.calls:
            if call.segment == self.name:
                number = next(k for k, c in enumerate(self.calls) if c is call)
                outs = [o for k, o in enumerate(call.outs) if k not in lost]
                outs += [self.handed[v][number] for v in added]
                call = replace(call, outs=tuple(outs))
            elif call.outs in self.args:
                call = replace(call, args=self.args[call.outs])
            calls.append(call)
        return Folded(self.segments, tuple(calls), _without_outputs(self.folded.joint, gone))


def _without_outputs(joint: Joint, gone: Collection[str]) -> Joint:
    targets = {int(r.target) for r in joint.results if r.value in gone}
    if not targets:
        return joint
    leaves = tuple(NOT_MADE if k in targets else leaf for k, leaf in enumerate(joint.out_leaves))
    results = tuple(r for r in joint.results if r.value not in gone)
    return replace(joint, results=results, out_leaves=leaves)


def _ordered(inputs: Iterable[str], rest: Sequence[Node], tile: Node) -> tuple[Node, ...]:
    """Nodes in an order that respects their uses. Raises NoFactorsError if there is none."""
    known, waiting, order = set(inputs), [*rest, tile], list[Node]()
    while waiting:
        ready = next((n for n in waiting if known.issuperset(refs_of(n))), None)
        if ready is None:
            raise NoFactorsError("what uses it is used by it")
        waiting.remove(ready)
        order.append(ready)
        known.update(ready.outs)
    return tuple(order)
