"""Turn every placement change that the plan implies into collectives.

A value is brought into a layout at most once per segment: further uses share the result. A change at
a segment's input happens inside the segment if all calls hand the value over in the same layout, and
in main otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count

from autoshard.cost.reshard import ReshardCost
from autoshard.ir import Arg, Call, Folded, Graph, Node, Origin, Ref, TensorType, refs_of, substitute
from autoshard.ir.collectives import TensorTransfer, TransferKind, collective, is_collective
from autoshard.ir.flow import Flow, Place
from autoshard.ir.lowered import Instruction, Lowered, LoweredSegment, PlacedValue
from autoshard.ir.placement import Layout, Shard
from autoshard.rules.local import MeshShape, symbolic_extent
from autoshard.search.plan.plan import Plan, why_key


def insert_collectives(
    folded: Folded, flow: Flow, plan: Plan, mesh: MeshShape, reshard: ReshardCost
) -> Lowered:
    """The folded graph with collectives, by the plan; all types stay global."""
    return _Inserter(folded, flow, plan, mesh, reshard).run()


class ReshardEmitter:
    """Makes the nodes of reshards, each layout of a value once."""

    def __init__(self, mesh: MeshShape, reshard: ReshardCost, fresh: Callable[[str], str]) -> None:
        self.mesh, self.reshard, self.fresh = mesh, reshard, fresh
        self.have: dict[str, dict[Layout, str]] = {}
        self.types: dict[str, TensorType] = {}
        self.layouts: dict[str, Layout] = {}
        self.nodes: list[Node] = []

    def define(self, name: str, type_: TensorType, layout: Layout) -> None:
        """Record a value that exists in one layout."""
        self.have[name] = {layout: name}
        self.types[name] = type_
        self.layouts[name] = layout

    def get(self, name: str, wanted: Layout, origin: Origin, backward: bool) -> str:
        """The name under which a value exists in the wanted layout, emitting steps where needed."""
        have = self.have[name]
        if wanted in have:
            return have[wanted]
        type_ = self.types[name]
        table = self.reshard.table(type_, [*have, wanted])
        goal = table.index[wanted]
        source = min(have, key=lambda lay: table.seconds[table.index[lay], goal])
        at, value = source, have[source]
        for step, arrived in table.steps(source, wanted):
            if arrived in have:
                at, value = arrived, have[arrived]
                continue
            out = self.fresh(name)
            layouts = (at, arrived)
            self.nodes.append(
                collective_node(self.mesh, step.kind, step.axis, value, type_, layouts, out, origin, backward)
            )
            have[arrived] = out
            self.layouts[out] = arrived
            self.types[out] = type_
            at, value = arrived, out
        return value


def collective_node(
    mesh: MeshShape,
    kind: TransferKind,
    axis: int,
    value: str,
    type_: TensorType,
    layouts: tuple[Layout, Layout],
    out: str,
    origin: Origin,
    backward: bool,
) -> Node:
    """The collective over an axis (its number) that brings a value from one layout into another.

    type_: global. layouts: before and after, which differ on the axis.
    """
    source, target = layouts
    reduce = getattr(source[axis], "reduce", "sum") if kind == "all_reduce" else "sum"
    where: tuple[Arg, ...] = ()
    if kind == "all_to_all":
        split, joined = _digit(mesh, type_, target, axis), _digit(mesh, type_, source, axis)
        where = (split[0], joined[0], split[1], joined[1])
    elif kind != "all_reduce":
        dim, outer, inner, size = _digit(mesh, type_, source if kind == "all_gather" else target, axis)
        where = (dim, outer, 1 if size is None else inner, size)
    moved = TensorTransfer(value, out, where)
    said = reduce if reduce != "sum" else None
    return collective(kind, mesh.names[axis], (moved,), (type_,), origin, backward, reduce=said)


def _digit(mesh: MeshShape, type_: TensorType, layout: Layout, axis: int) -> tuple[int, int, int, Arg]:
    """(dim, outer blocks on a rank, inner, size on a rank before the split or None if it is even).

    Other axes that split the same dim further outside leave fewer outer blocks on a rank.
    """
    placed = layout[axis]
    assert isinstance(placed, Shard)
    others = [k for k in range(len(layout)) if k != axis]
    rest = MeshShape(tuple(mesh.names[k] for k in others), tuple(mesh.sizes[k] for k in others))
    size = symbolic_extent(type_.shape[placed.dim], tuple(layout[k] for k in others), placed.dim, rest)
    outer = placed.blocks
    for k in others:
        other = layout[k]
        if isinstance(other, Shard) and other.dim == placed.dim and other.blocks < placed.blocks:
            outer //= mesh.sizes[k]
    even = isinstance(size, int) and (size // (outer * placed.inner)) % mesh.sizes[axis] == 0
    return placed.dim, outer if placed.outer > 0 else -outer, placed.inner, None if even else size


class _Inserter:
    def __init__(self, folded: Folded, flow: Flow, plan: Plan, mesh: MeshShape, reshard: ReshardCost) -> None:
        self.folded, self.flow, self.plan, self.mesh, self.reshard = folded, flow, plan, mesh, reshard
        self.types = {name: g.types() for name, g in folded.segments.items()}
        self.backward = folded.is_backward()
        self.param_ports = {p.target: p.name for p in folded.joint.ports if p.kind == "param"}
        #: what backward uses, of which there is something to keep
        self.for_backward = {source for source, target in flow.edges if self.backward[target[0]]}
        self.exported: dict[Place, Layout] = {}
        self.incoming: dict[Place, Layout] = {}
        self.sources: dict[Place, list[Place]] = {}
        self.first_use: dict[Place, Place] = {}
        for source, target in flow.edges:
            self.sources.setdefault(target, []).append(source)
            if not self.backward[target[0]]:
                self.first_use.setdefault(source, target)

    def run(self) -> Lowered:
        self._plan_interfaces()
        segments = {name: self._segment(name) for name in self.folded.segments}
        return self._main(segments)

    # -- interfaces --------------------------------------------------------------------------------

    def _offered(self, source: Place, target: Place) -> Layout:
        """The layout in which a source hands a value to a segment's input."""
        state = self.plan.params.get(source)
        if state is not None:
            return state.use if state.keep and self.backward[target[0]] else state.stored
        if source in self.plan.ports:
            return self.plan.ports[source]
        return self.exported[source]

    def _plan_interfaces(self) -> None:
        """Fix in which layout each value leaves and enters each segment."""
        for name, graph in self.folded.segments.items():
            makers = {out: (k, node) for k, node in enumerate(graph.nodes) for out in node.outs}
            for out in graph.outputs:
                if (name, out) in self.plan.values:
                    self.exported[name, out] = self.plan.values[name, out]
                    continue
                number, node = makers[out]
                layout = self.plan.nodes[name, number].outputs[node.outs.index(out)]
                assert layout is not None
                self.exported[name, out] = layout
        self.exported.update(self._grad_layouts())
        for target, sources in self.sources.items():
            layouts = {self._offered(source, target) for source in sources}
            self.incoming[target] = next(iter(layouts)) if len(layouts) == 1 else self.plan.values[target]

    def _stored(self, param: str) -> Layout:
        return self.plan.params[self.flow.class_of[self.param_ports[param]]].stored

    def _grad_layouts(self) -> dict[Place, Layout]:
        """Gradients that go nowhere else leave their segment as the parameter is stored."""
        wanted: dict[Place, set[Layout]] = {}
        elsewhere = {source for source, _ in self.flow.edges}
        for place, kind, target in self.flow.results:
            if kind == "grad" and place[0]:
                wanted.setdefault(place, set()).add(self._stored(target))
            else:
                elsewhere.add(place)
        return {p: next(iter(w)) for p, w in wanted.items() if len(w) == 1 and p not in elsewhere}

    # -- one segment -------------------------------------------------------------------------------

    def _segment(self, name: str) -> LoweredSegment:
        graph = self.folded.segments[name]
        emitter = ReshardEmitter(self.mesh, self.reshard, _namer(set(self.types[name])))
        backward = self.backward[name]
        why: dict[str, str] = {}
        for value, type_ in graph.inputs:
            emitter.define(value, type_, self.incoming[name, value])
        for number, node in enumerate(graph.nodes):
            state = self.plan.nodes[name, number]
            names = iter(
                [
                    self._bring(emitter, name, ref, layout, node.origin, backward)
                    for ref, layout in zip(refs_of(node), state.inputs, strict=True)
                ]
            )
            emitter.nodes.append(_refed(node, names))
            for out, out_type, layout in zip(node.outs, node.types, state.outputs, strict=True):
                if out_type is not None and layout is not None:
                    emitter.define(out, out_type, layout)
            reason = self.plan.why.get(why_key("node", name, number))
            if reason is not None:
                why[node.name] = str(reason)
        outputs = [
            self._bring(emitter, name, out, self.exported[name, out], Origin(), backward)
            for out in graph.outputs
        ]
        for value, use in self._keeps(name):
            outputs.append(emitter.get(value, use, Origin(), False))
        new = Graph(name, graph.inputs, _needed(emitter.nodes, outputs), tuple(outputs))
        return LoweredSegment(new, emitter.layouts, why)

    def _bring(
        self, emitter: ReshardEmitter, name: str, value: str, wanted: Layout, origin: Origin, backward: bool
    ) -> str:
        """The value in the wanted layout; by way of the layout in which it is offered to all uses."""
        shared = self.plan.values.get((name, value))
        if shared is not None and wanted not in emitter.have[value]:
            states = {self.plan.params.get(source) for source in self.sources.get((name, value), ())}
            state = next(iter(states)) if len(states) == 1 else None
            if state is not None:
                emitter.get(value, state.use, origin, backward)
            emitter.get(value, shared, origin, backward)
        return emitter.get(value, wanted, origin, backward)

    def _keeps(self, name: str) -> list[tuple[str, Layout]]:
        """Inputs of a forward segment whose gathered copy leaves it for the backward half, and as what.

        Classes of parameters that share an input but are kept in different layouts are gathered in main.
        """
        if self.backward[name]:
            return []
        result = [(v, self._kept_uses((name, v))) for v, _ in self.folded.segments[name].inputs]
        return [(v, next(iter(uses))) for v, uses in result if len(uses) == 1]

    def _kept_uses(self, target: Place) -> set[Layout]:
        """The layouts in which parameters are kept of which this input is the first forward use."""
        kept = [s for s in self.sources.get(target, ()) if self._keeps_at(s, target)]
        return {self.plan.params[s].use for s in kept}

    def _keeps_at(self, source: Place, target: Place) -> bool:
        """Whether a parameter that backward uses is kept from this input on, its first forward use."""
        state = self.plan.params.get(source)
        if state is None or not state.keep or self.first_use[source] != target:
            return False
        recompute = self.plan.recompute.get(target[0])
        # full recomputation uses whatever forward does
        return source in self.for_backward or (recompute is not None and recompute.policy == "full")

    # -- main --------------------------------------------------------------------------------------

    def _main(self, segments: dict[str, LoweredSegment]) -> Lowered:
        joint = self.folded.joint
        taken = {p.name for p in joint.ports} | {o for c in self.folded.calls for o in c.outs}
        emitter = ReshardEmitter(self.mesh, self.reshard, _namer(taken))
        for port in joint.ports:
            place = self.flow.class_of[port.name]
            state = self.plan.params.get(place)
            layout = state.stored if state is not None else self.plan.ports[place]
            emitter.define(port.name, port.type, layout)
        main: list[Instruction] = []
        results: dict[int, str] = {}
        for call in self.folded.calls:
            if call.backward and not results:
                # before backward may bring them where it needs them: forward gives them back
                results = self._results(emitter, backward=False)
            graph = self.folded.segments[call.segment]
            self._keep_apart(emitter, call)
            args = tuple(
                emitter.get(value, self.incoming[call.segment, inner], Origin(call.label), call.backward)
                for value, (inner, _) in zip(call.args, graph.inputs, strict=True)
            )
            main.extend(emitter.nodes)
            emitter.nodes.clear()
            for value, inner in zip(call.outs, graph.outputs, strict=True):
                emitter.define(value, self.types[call.segment][inner], self.exported[call.segment, inner])
            kept = tuple(self._kept_copy(emitter, call, *keep) for keep in self._keeps(call.segment))
            main.append(replace(call, args=args, outs=call.outs + kept))
        results = self._results(emitter, backward=False) | self._results(emitter, backward=True)
        main.extend(emitter.nodes)
        values = {n: PlacedValue(emitter.types[n], emitter.layouts[n]) for n in emitter.layouts}
        ordered = tuple(results[number] for number in range(len(joint.results)))
        return Lowered(segments, _forward_first(main), values, ordered)

    def _results(self, emitter: ReshardEmitter, backward: bool) -> dict[int, str]:
        """Number of a result of a phase -> its value, in the layout that it leaves in."""
        results = {}
        for number, result in enumerate(self.folded.joint.results):
            if (result.kind in ("grad", "input_grad")) is backward:
                stored = self._stored(result.target) if result.kind == "grad" else self.plan.results[number]
                results[number] = emitter.get(result.value, stored, Origin(), backward)
        return results

    def _keep_apart(self, emitter: ReshardEmitter, call: Call) -> None:
        """Gather in main what a forward call's segment cannot keep alike for all its calls."""
        if call.backward:
            return
        for port, (inner, _) in zip(call.args, self.folded.segments[call.segment].inputs, strict=True):
            target, source = (call.segment, inner), self.flow.class_of.get(port)
            if source is not None and self._keeps_at(source, target) and len(self._kept_uses(target)) > 1:
                emitter.get(port, self.plan.params[source].use, Origin(call.label), False)

    def _kept_copy(self, emitter: ReshardEmitter, call: Call, inner: str, use: Layout) -> str:
        """The main name of a gathered parameter that a forward call hands to the backward half."""
        inputs = [v for v, _ in self.folded.segments[call.segment].inputs]
        port = call.args[inputs.index(inner)]
        out = emitter.fresh(port)
        if self._keeps_at(self.flow.class_of[port], (call.segment, inner)):
            emitter.have[port][use] = out
        emitter.layouts[out], emitter.types[out] = use, emitter.types[port]
        return out


def _needed(nodes: Sequence[Node], outputs: Sequence[str]) -> tuple[Node, ...]:
    """Without collectives whose results nothing uses: from a layout on the way, another one may be nearer."""
    used = set(outputs)
    kept: list[Node] = []
    for node in reversed(nodes):
        if not is_collective(node) or not used.isdisjoint(node.outs):
            kept.append(node)
            used.update(refs_of(node))
    return tuple(reversed(kept))


def _refed(node: Node, names: Iterator[str]) -> Node:
    """The node with its uses replaced, in order of appearance."""
    return substitute(node, lambda _: Ref(next(names)))


def _forward_first(main: list[Instruction]) -> tuple[Instruction, ...]:
    """Stable: collectives on model outputs belong to the forward half."""
    return (*(i for i in main if not i.backward), *(i for i in main if i.backward))


def _namer(taken: set[str]) -> Callable[[str], str]:
    """Makes fresh names: ``x`` gives ``x_a``, ``x_b``, ..."""

    def fresh(base: str) -> str:
        for k in count():
            name = f"{base}_{chr(ord('a') + k)}" if k < 26 else f"{base}_z{k}"
            if name not in taken:
                taken.add(name)
                return name
        raise AssertionError

    return fresh
