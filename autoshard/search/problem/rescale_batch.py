"""The same model with another batch, without capturing it again.

Every dim that holds the batch is known by its class (see `rules.factor_splits`), so types, factors and digits
can be scaled. What comes out serves the search alone: arguments of calls still hold the old numbers.

A batch of one sequence is no factor of anything, so that rules lose theirs and digits are found anew, as for
a model that was captured with one sequence. From such a model there is no way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from autoshard.ir import Arg, Folded, Graph, Node, TensorType, refs_of
from autoshard.ir.flow import Flow, Place, PortClass
from autoshard.ir.row_tiles import BATCH, BOTH, OTHER, TILES, tiles_of
from autoshard.ir.scans import SCAN
from autoshard.rules.core import Factored
from autoshard.rules.factor_splits import DigitTable, find_digits
from autoshard.rules.registry import RULES
from autoshard.rules.scans import with_given
from autoshard.rules.states import Digit
from autoshard.search.problem.problem import Model, batch_of


class NotRescalable(Exception):
    """The batch takes part in a way that scaling does not follow; the model must be captured again."""


def distinct_batch(folded: Folded) -> int:
    """The least batch that shares no factor with any size in the model, so that nothing is taken for it."""
    types = [t for g in folded.segments.values() for t in g.types().values()]
    types += [p.type for p in folded.joint.ports]
    sizes = {n for t in types for n in t.shape}
    batch = 3
    while any(gcd(batch, n) > 1 for n in sizes):
        batch += 1
    return batch


def with_batch(model: Model, batch: int) -> Model:
    """The model with ``batch`` sequences. Raises NotRebatchable."""
    old = batch_of(model.folded)
    if batch == old:
        return model
    if batch < 1:
        raise NotRescalable(f"{batch} sequences are no batch")
    if old < 2:
        raise NotRescalable("dims of one sequence leave no trace in a graph")
    return _Scaling(model, old, batch).run()


class _Scaling:
    def __init__(self, model: Model, old: int, new: int) -> None:
        self.model, self.old, self.new = model, old, new
        self.batch = model.digits.batch

    def run(self) -> Model:
        folded = self.model.folded
        segments = {name: self._graph(name, graph) for name, graph in folded.segments.items()}
        rules = {key: self._rule(key, rule) for key, rule in self.model.rules.items()}
        for (name, number), rule in list(rules.items()):
            node = segments[name].nodes[number]
            types = segments[name].types()
            ins = [types[r] for r in refs_of(node)]
            try:
                rule.check(ins, node.types)
            except ValueError as error:
                raise NotRescalable(str(error)) from None
            if rule.tile is not None:
                rules[name, number] = replace(rule, tile=RULES[node.op](node, ins).tile)
        flow = self._flow(self.model.flow)
        ports = {p.name: p for group in flow.classes.values() for p in group.ports}
        joint = replace(folded.joint, ports=tuple(ports.get(p.name, p) for p in folded.joint.ports))
        scaled = Folded(segments, folded.calls, joint)
        if self.new == 1:
            rules = {key: rule.without_units() for key, rule in rules.items()}
            return Model(scaled, flow, rules, find_digits(scaled, flow, rules), self.model.expert_chunks)
        return Model(scaled, flow, rules, self._table(), self.model.expert_chunks, orders=self.model.orders)

    def _table(self) -> DigitTable:
        digits = self.model.digits
        values = {k: self._digits(d) for k, d in digits.values.items()}
        factors = {k: tuple(self._digits(d) for d in per) for k, per in digits.factors.items()}
        return replace(digits, values=values, factors=factors)

    def _digits(self, digits: Sequence[Digit]) -> tuple[Digit, ...]:
        """Parts of one dim: those that hold the batch grow, those inside it move."""
        digit = next((d for d in digits if d[2] in self.batch), None)
        if digit is None:
            return tuple(digits)
        above, size, _ = digit
        if size != self.old:
            raise NotRescalable(f"a part of {size} belongs to the batch of {self.old}")
        scaled = []
        for outer, part, cls in digits:
            if outer % (above * size) == 0:
                scaled.append((outer // size * self.new, part, cls))
            elif above % outer == 0 and (outer * part) % (above * size) == 0:
                scaled.append((outer, part // size * self.new, cls))
            elif above % (outer * part) == 0:
                scaled.append((outer, part, cls))
            else:
                raise NotRescalable(f"a part of {part} cuts across the batch of {size}")
        return tuple(sorted(scaled))

    def _has(self, digits: Sequence[Digit]) -> bool:
        return any(cls in self.batch for _, _, cls in digits)

    def _type(self, place: Place, type_: TensorType) -> TensorType:
        shape = tuple(
            n // self.old * self.new if self._has(self.model.digits.values.get((*place, dim), ())) else n
            for dim, n in enumerate(type_.shape)
        )
        return type_ if shape == type_.shape else replace(type_, shape=shape)

    def _graph(self, name: str, graph: Graph) -> Graph:
        inputs = tuple((v, self._type((name, v), t)) for v, t in graph.inputs)
        return Graph(graph.name, inputs, tuple(self._node(name, n) for n in graph.nodes), graph.outputs)

    def _node(self, name: str, node: Node) -> Node:
        types = tuple(
            None if t is None else self._type((name, v), t)
            for v, t in zip(node.outs, node.types, strict=True)
        )
        args = node.args
        if node.op == TILES:
            args = self._tiles(name, node)
        elif node.op == SCAN:
            before = self.model.folded.segments[name].types()
            ins = [self._type((name, ref.name), before[ref.name]) for ref in node.args[0]]
            args = with_given(node, ins, RULES).args
        if types == node.types and args is node.args:
            return node
        return Node(node.op, args, node.kwargs, node.outs, types, node.origin, node.backward)

    def _tiles(self, name: str, node: Node) -> tuple[Arg, ...]:
        """A body holds types of all rows, by which programs are priced."""
        tiles, types = tiles_of(node), self.model.folded.segments[name].types()
        body, given = tiles.body, node.args[0]
        had = {k: n for v, t in body.types().items() for k, n in zip(tiles.kinds[v], t.shape, strict=True)}
        sizes: dict[str, int] = {}
        for ref, (value, _) in zip(given, body.inputs, strict=True):
            scaled = self._type((name, ref.name), types[ref.name])
            dims = list(zip(tiles.kinds[value], scaled.shape, strict=True))
            if any(k == OTHER and n != m for (k, n), m in zip(dims, types[ref.name].shape, strict=True)):
                raise NotRescalable("a tile has rows of all sequences at once")
            sizes |= dims
        for kind, of in ((BATCH, BOTH), (BOTH, BATCH)):
            if kind in had and kind not in sizes:
                sizes[kind] = had[kind] * sizes[of] // had[of]
        sizes = had | sizes

        def scale(value: str, type_: TensorType) -> TensorType:
            dims = zip(tiles.kinds[value], type_.shape, strict=True)
            return replace(type_, shape=tuple(n if k == OTHER else sizes[k] for k, n in dims))

        def scale_outs(n: Node) -> Node:
            return replace(n, types=tuple(t and scale(v, t) for v, t in zip(n.outs, n.types, strict=True)))

        inputs = tuple((v, scale(v, t)) for v, t in body.inputs)
        graph = replace(body, inputs=inputs, nodes=tuple(map(scale_outs, body.nodes)))
        return replace(tiles, body=graph).args(given)

    def _rule(self, key: tuple[str, int], rule: Factored) -> Factored:
        scaled = [self._has(d) for d in self.model.digits.factors[key]]
        if not any(scaled):
            return rule
        sizes = tuple(
            n // self.old * self.new if hit else n for n, hit in zip(rule.sizes, scaled, strict=True)
        )
        flops, recomputed = (f / self.old * self.new for f in (rule.flops, rule.recomputed))
        return replace(rule, sizes=sizes, flops=flops, recomputed=recomputed)

    def _flow(self, flow: Flow) -> Flow:
        return replace(flow, classes={key: self._group(key, group) for key, group in flow.classes.items()})

    def _group(self, key: Place, group: PortClass) -> PortClass:
        """Ports of a class are alike: those of a deep model are many, and hardly any holds the batch."""
        if self._type(key, group.first.type) is group.first.type:
            return group
        return replace(group, ports=tuple(replace(p, type=self._type(key, p.type)) for p in group.ports))
