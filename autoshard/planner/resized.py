"""The decisions of a plan for the same model with arguments of other sizes.

A placement is written in sizes: a shard of a dim that joins batch and length says how many rows lie above it.
Each is found anew as the same part of the same dim, and each op's states have to be among those that its rule
allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from autoshard.cluster.mesh import Mesh
from autoshard.ir import TensorType
from autoshard.ir.flow import Place
from autoshard.ir.placement import Layout, Placement, Shard, layout_ok, shard_of_digit
from autoshard.planner.analysis import Analysis
from autoshard.rules.states import OpState, op_states
from autoshard.search.plan.plan import Plan
from autoshard.search.problem.problem import batch_of


class NotResizableError(Exception):
    """The plan has no counterpart: what divides there does not here, or the graph is another one."""


def resized(plan: Plan, planned: Analysis, analysis: Analysis) -> Plan:
    """The same decisions for another analysis. planned: the one that the plan was made from.

    Raises NotResizableError.
    """
    if not _same_graph(planned, analysis):
        raise NotResizableError("another graph")
    move = _Resizing(planned, analysis, Mesh.parse(plan.mesh).sizes)
    return replace(
        plan,
        fingerprint=analysis.fingerprint,
        batch=batch_of(analysis.folded) if plan.batch else 0,
        nodes={key: move.node(key, state) for key, state in plan.nodes.items()},
        values={place: move.layout(place, layout) for place, layout in plan.values.items()},
        ports={place: move.layout(place, layout) for place, layout in plan.ports.items()},
        results={
            number: move.layout(analysis.flow.results[number][0], layout)
            for number, layout in plan.results.items()
        },
    )


def _same_graph(one: Analysis, other: Analysis) -> bool:
    """Whether two have the same ops in the same places, with values of the same names."""
    calls = [[(c.segment, c.args, c.outs) for c in a.folded.calls] for a in (one, other)]
    if one.folded.segments.keys() != other.folded.segments.keys() or calls[0] != calls[1]:
        return False
    return all(
        [(n.op, n.outs) for n in graph.nodes] == [(n.op, n.outs) for n in other.folded.segments[name].nodes]
        for name, graph in one.folded.segments.items()
    )


class _Resizing:
    """sizes: of the mesh."""

    def __init__(self, old: Analysis, new: Analysis, sizes: Sequence[int]) -> None:
        self.old, self.new, self.sizes = old, new, sizes
        self.types = [{name: g.types() for name, g in a.folded.segments.items()} for a in (old, new)]
        self.kinds = new.model.kinds
        #: of ops that divide alike: layouts of inputs and outputs -> state
        self.states: dict[int, dict[tuple[Layout | None, ...], OpState]] = {}

    def _types(self, place: Place) -> tuple[TensorType, TensorType]:
        segment, value = place
        if segment == "":
            old, new = (a.flow.classes[place].first.type for a in (self.old, self.new))
        else:
            old, new = (types[segment][value] for types in self.types)
        return old, new

    def layout(self, place: Place, layout: Layout) -> Layout:
        """The layout of a value."""
        return self._layouts(place, layout)[0]

    def _layouts(self, place: Place, layout: Layout) -> list[Layout]:
        """All layouts that are as one was, the finest first: where a dim joins several, a shard of the first
        of them and one of all may have been the same, and be no more."""
        old, new = self._types(place)
        if old == new:
            return [layout]
        each = [
            self._shards(place, old, new, placed, axis) if isinstance(placed, Shard) else [placed]
            for axis, placed in enumerate(layout)
        ]
        result = [built for built in product(*each) if layout_ok(new.shape, built, self.sizes)]
        if not result:
            raise NotResizableError(f"{place}: {new} has no layout that is as {layout} of {old}")
        return result

    def _shards(
        self, place: Place, old: TensorType, new: TensorType, placed: Shard, axis: int
    ) -> list[Placement]:
        key, dim, ways = (*place, placed.dim), placed.dim, self.sizes[axis]
        # sizes that are odd have no zigzags, outer < 0
        zigzag = placed.outer < 0
        before, after = (
            [digit for digit in a.digits.values.get(key, ()) if (digit[0] < 0) == zigzag]
            for a in (self.old, self.new)
        )
        result: dict[Placement, int] = {}
        if len(before) == len(after):
            for (outer, part, _), (other, rest, _) in zip(before, after, strict=True):
                if shard_of_digit(old.shape[dim], dim, outer, part, ways) == placed:
                    built = shard_of_digit(new.shape[dim], dim, other, rest, ways)
                    if built is not None:
                        result[built] = min(rest, result.get(built, rest))
        return sorted(result, key=result.__getitem__)

    def node(self, key: tuple[str, int], state: OpState) -> OpState:
        """The state of an op."""
        segment, number = key
        node, kind = self.new.folded.segments[segment].nodes[number], self.kinds.ops[key]
        pairs = [*zip(kind.refs, state.inputs, strict=True), *zip(node.outs, state.outputs, strict=True)]
        wanted: list[Sequence[Layout | None]] = [
            [None] if x is None else self._layouts((segment, value), x) for value, x in pairs
        ]
        if kind.divided not in self.states:
            rule, digits = self.new.rules[key], self.new.digits.factors[key]
            every = op_states(rule, kind.ins, node.types, digits, self.sizes, lambda axis, classes: True)
            self.states[kind.divided] = {(*s.inputs, *s.outputs): s for s in every}
        states = self.states[kind.divided]
        if all(len(w) == 1 for w in wanted):
            result = states.get(tuple(w[0] for w in wanted))
        else:
            fits = [
                (sum(w.index(x) for w, x in zip(wanted, layouts, strict=True)), n, s)
                for n, (layouts, s) in enumerate(states.items())
                if all(x in w for w, x in zip(wanted, layouts, strict=True))
            ]
            result = min(fits)[2] if fits else None
        if result is None:
            raise NotResizableError(f"{node.op} {node.name} does not run so with {kind.ins}")
        return result
