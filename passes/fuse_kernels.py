"""Chains around a normalisation become one op each, with a kernel of its own (`kernels/norm.py`).

* sum, RMSNorm -> ``add_rms_norm`` (without a sum ``rms_norm``); its gradient, the gradient of its weight and
  the sum with what else arrives -> ``rms_norm_backward``;
* sum, LayerNorm -> ``add_layer_norm``; its gradient with that sum -> ``layer_norm_backward``.

This comes last, on what a rank runs: collectives between the parts of a chain then simply stand in the way of
a match, and neither rules nor search need to know of these ops. A backward makes the normalised rows again
from the row and its statistic, so that forward no longer keeps them, nor a wider copy of its input: for that,
both halves of a norm are matched together, across the calls of the two segments that they stand in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.ir import DTYPES, Call, Graph, Node, Ref, TensorType, refs_of
from autoshard.ir.lowered import Lowered, LoweredSegment, Placed
from autoshard.kernels.registry import Operand, specs
from autoshard.passes.norm_patterns import Backward, Forward, Index, backwards, forwards
from autoshard.placement import Layout, Partial, Shard, local_shape
from autoshard.rules.local import MeshShape

_ADD = "aten.add.Tensor"
_NORM, _NORM_BACKWARD = "aten.native_layer_norm.default", "aten.native_layer_norm_backward.default"
#: ops that move nothing
_FREE = ("aten.reshape.default", "aten.view.default", "aten.expand.default")


@dataclass(frozen=True)
class _Fused:
    """A new node and the values that need not be made any more. at: the value in whose place it stands."""

    node: Node
    at: str
    chain: tuple[str, ...]


@dataclass(frozen=True)
class _Source:
    """The rows that a norm was given, for its backward. names: in main, by call of the backward segment."""

    type: TensorType
    layout: Layout
    names: tuple[str, ...]


def fuse_kernels(lowered: Lowered, mesh: MeshShape, memory_bandwidth: float) -> Lowered:
    """The program with kernels where they move fewer bytes than the ops that they stand for.

    memory_bandwidth: bytes/s, for the gain that is noted beside each.
    """
    return _Fuser(lowered, mesh, memory_bandwidth).run()


class _Fuser:
    def __init__(self, lowered: Lowered, mesh: MeshShape, memory_bandwidth: float) -> None:
        self.lowered, self.mesh, self.bandwidth = lowered, mesh, memory_bandwidth
        self.index = {name: Index(s.graph) for name, s in lowered.segments.items()}
        self.calls = [(k, i) for k, i in enumerate(lowered.main) if isinstance(i, Call)]
        #: main value -> the call that makes it and the name it has there
        self.made: dict[str, tuple[Call, str]] = {}
        for _, call in self.calls:
            outputs = lowered.segments[call.segment].graph.outputs
            self.made.update((o, (call, inner)) for o, inner in zip(call.outs, outputs, strict=True))
        self.norms = {
            (name, norm.rstd): norm
            for name, index in self.index.items()
            for norm in forwards(index)
            if self._whole_rows(name, norm.x)
        }
        #: values that forward segments must hand out, and under which name each call does
        self.wanted: dict[tuple[str, str], dict[str, str]] = {}
        self.taken = {*lowered.values, *(o for i in lowered.main for o in i.outs)}

    def run(self) -> Lowered:
        fused: dict[str, list[_Fused]] = {name: [] for name in self.index}
        inputs: dict[str, dict[str, _Source]] = {name: {} for name in self.index}
        for name, index in self.index.items():
            for found in backwards(index):
                source = self._source(name, found)
                if source is None:
                    continue
                known = self._input_of(name, source)
                x = known or _unused(f"{found.rstd}_x", {*index.types, *inputs[name]})
                made = self._rms_backward(name, found, x)
                if self._gains(name, made, {x: source}):
                    fused[name].append(made)
                    if known is None:
                        inputs[name][x] = source
            fused[name] += self._layer_norms(name)
        for (name, _), norm in self.norms.items():
            fused[name].append(self._rms(name, norm))
        segments = {name: self._segment(name, fused[name], inputs[name]) for name in self.index}
        droppable = {name: {v for f in fused[name] for v in f.chain} for name in fused}
        for owner, value in self.wanted:
            droppable[owner].add(value)
        return _pruned(self._called(segments, inputs), droppable)

    # what backward needs

    def _source(self, name: str, found: Backward) -> _Source | None:
        """The rows of the norm that a gradient belongs to, if it is the gradient of one, in every call."""
        names: list[str] = []
        kinds: set[tuple[TensorType, Layout]] = set()
        for _, call in self.calls:
            if call.segment != name:
                continue
            inner = dict(zip((n for n, _ in self.index[name].graph.inputs), call.args, strict=True))
            norm = self._norm_of(found, inner)
            if norm is None:
                return None
            maker, forward = norm
            names.append(self._name_in_main(maker, forward.x))
            segment = self.lowered.segments[maker.segment]
            kinds.add((self.index[maker.segment].types[forward.x], segment.layouts[forward.x]))
        if len(kinds) != 1:
            return None
        type_, layout = kinds.pop()
        fits = self.index[name].types[found.dx] == type_
        return _Source(type_, layout, tuple(names)) if fits else None

    def _norm_of(self, found: Backward, inner: Mapping[str, str]) -> tuple[Call, Forward] | None:
        """The call and the norm whose gradient this is; ``inner``: what a call binds to inputs."""
        call, rstd = self.made.get(inner.get(found.rstd, ""), (None, ""))
        norm = self.norms.get((call.segment, rstd)) if call is not None else None
        if call is None or norm is None:
            return None
        graph = self.lowered.segments[call.segment].graph
        here = {n: a for (n, _), a in zip(graph.inputs, call.args, strict=True)}
        here.update(zip(graph.outputs, call.outs, strict=True))
        x = {here.get(norm.x), here.get(norm.wide)} - {None}
        rows = {here.get(r) for r in norm.rows} - {None}
        same = all(inner.get(raw) in x for raw in found.raw)
        return (call, norm) if same and (found.rows is None or inner.get(found.rows) in rows) else None

    def _name_in_main(self, call: Call, value: str) -> str:
        """What a call's value is called in main; of one that does not leave the call yet, what it will be."""
        graph = self.lowered.segments[call.segment].graph
        for (name, _), arg in zip(graph.inputs, call.args, strict=True):
            if name == value:
                return arg
        for name, out in zip(graph.outputs, call.outs, strict=True):
            if name == value:
                return out
        known = self.wanted.setdefault((call.segment, value), {})
        key = call.outs[0]
        if key not in known:
            known[key] = _unused(value, self.taken)
            self.taken.add(known[key])
        return known[key]

    def _input_of(self, name: str, source: _Source) -> str | None:
        """The input of a segment that all its calls bind to these values, if there is one."""
        args = [call.args for _, call in self.calls if call.segment == name]
        for place, (inner, type_) in enumerate(self.index[name].graph.inputs):
            if type_ == source.type and all(a[place] == n for a, n in zip(args, source.names, strict=True)):
                return inner
        return None

    # the new nodes

    def _whole_rows(self, name: str, x: str) -> bool:
        """Whether every rank holds whole rows of a value, and no part of a sum."""
        last = len(self.index[name].types[x].shape) - 1
        layout = self.lowered.segments[name].layouts[x]
        return not any(isinstance(p, Partial) or (isinstance(p, Shard) and p.dim == last) for p in layout)

    def _rms(self, name: str, norm: Forward) -> _Fused:
        y = self.index[name].makers[norm.y]
        own = (Ref(norm.weight), norm.eps, norm.narrow)
        if norm.parts is None:
            args = (Ref(norm.x), *own)
            return self._fused(name, "rms_norm", args, (norm.y, norm.rstd), y, norm.chain)
        both, outs = tuple(map(Ref, norm.parts)), (norm.x, norm.y, norm.rstd)
        return self._fused(name, "add_rms_norm", (*both, *own), outs, y, (*norm.chain, norm.x))

    def _rms_backward(self, name: str, found: Backward, x: str) -> _Fused:
        index = self.index[name]
        more = Ref(found.more) if found.more else None
        args = (Ref(found.grad), Ref(x), Ref(found.weight), Ref(found.rstd), more)
        dw = found.dw or _unused(f"{found.dx}_w", index.types)
        last = index.makers[found.dx]
        return self._fused(name, "rms_norm_backward", args, (found.dx, dw), last, found.chain)

    def _layer_norms(self, name: str) -> list[_Fused]:
        """LayerNorms after a sum, and their gradients before one, of fp32 statistics as kernels make them."""
        index, found = self.index[name], []
        for node in index.graph.nodes:
            made = None
            if node.op == _NORM:
                made = self._layer_norm(name, node)
            elif node.op == _NORM_BACKWARD:
                made = self._layer_norm_backward(name, node)
            if made is not None and self._gains(name, made, {}):
                found.append(made)
        return found

    def _layer_norm(self, name: str, node: Node) -> _Fused | None:
        index = self.index[name]
        x, width, weight, bias, eps = node.args
        added = index.made_by(x, _ADD)
        y, *stats = node.types
        wide = all(t is not None and t.dtype in ("f32", "f64") for t in stats)
        if added is None or added.kwargs or not wide or not weight or not bias or len(width) != 1:
            return None
        parts = added.args
        type_ = index.types[x.name]
        if len(parts) != 2 or not all(isinstance(p, Ref) and index.types[p.name] == type_ for p in parts):
            return None
        if y != type_ or any(index.depends(r.name, x.name) for r in (weight, bias)):
            return None
        args = (*parts, weight, bias, eps)
        return self._fused(name, "add_layer_norm", args, (x.name, *node.outs), node, (x.name, *node.outs))

    def _layer_norm_backward(self, name: str, node: Node) -> _Fused | None:
        index = self.index[name]
        grad, x, width, mean, rstd, weight, bias, mask = node.args
        dx, dw, db = node.outs
        last = index.only_use(dx, _ADD)
        usual = weight and bias and len(width) == 1 and tuple(mask) == (True, True, True)
        wide = all(index.types[s.name].dtype in ("f32", "f64") for s in (mean, rstd))
        if last is None or last.kwargs or len(last.args) != 2 or not usual or not wide:
            return None
        more = next((a for a in last.args if a != Ref(dx)), None)
        if not isinstance(more, Ref) or index.types[more.name] != index.types[dx]:
            return None
        if index.types[last.name] != index.types[dx] or any(index.depends(more.name, o) for o in node.outs):
            return None
        args = (grad, x, mean, rstd, weight, more)
        outs = (last.name, dw, db)
        return self._fused(name, "layer_norm_backward", args, outs, last, (*node.outs, last.name))

    def _fused(
        self,
        name: str,
        op: str,
        args: tuple[object, ...],
        outs: tuple[str, ...],
        at: Node,
        chain: Collection[str],
    ) -> _Fused:
        types = self.index[name].types
        known = tuple(types.get(o) for o in outs)
        node = Node(f"autoshard.{op}.default", args, (), outs, known, at.origin, at.backward)
        return _Fused(node, at.name, tuple(dict.fromkeys((*chain, *outs))))

    # what it is good for

    def _bytes(self, name: str, values: Collection[str], more: Mapping[str, _Source]) -> list[Operand]:
        """Values of a segment as the first rank holds them."""
        segment, types = self.lowered.segments[name], self.index[name].types
        found = []
        for value in values:
            placed = (
                (more[value].type, more[value].layout)
                if value in more
                else (types[value], segment.layouts[value])
            )
            shape = local_shape(placed[0].shape, placed[1], self.mesh.sizes, (0,) * len(self.mesh.sizes))
            found.append(Operand(shape, DTYPES[placed[0].dtype][1]))
        return found

    def _moved(self, name: str, made: _Fused, more: Mapping[str, _Source]) -> tuple[float, float]:
        """Bytes that the chain moves, and that the kernel does."""
        index = self.index[name]
        before = 0.0
        for node in {id(n): n for v in made.chain if (n := index.makers.get(v))}.values():
            if node.op in _FREE:
                continue
            values = [*dict.fromkeys(refs_of(node)), *(o for o in node.outs if o in index.types)]
            before += sum(x.nbytes for x in self._bytes(name, values, {}))
        ins = self._bytes(name, [*dict.fromkeys(refs_of(made.node))], more)
        outs = self._bytes(name, [o for o in made.node.outs if o in index.types], {})
        return before, specs()[made.node.op].cost(ins, outs).moved

    def _gains(self, name: str, made: _Fused, more: Mapping[str, _Source]) -> bool:
        before, after = self._moved(name, made, more)
        return after < before

    def _why(self, name: str, made: _Fused, more: Mapping[str, _Source]) -> str:
        before, after = self._moved(name, made, more)
        saved = (before - after) / self.bandwidth
        return f"kernel: moves {_mib(after)}, not {_mib(before)}: {saved * 1e6:.3g} us less"

    # putting it together

    def _segment(self, name: str, fused: Sequence[_Fused], inputs: Mapping[str, _Source]) -> LoweredSegment:
        segment = self.lowered.segments[name]
        graph = segment.graph
        outputs = [*graph.outputs, *(value for owner, value in self.wanted if owner == name)]
        if not fused and len(outputs) == len(graph.outputs):
            return segment
        at = {f.at: f.node for f in fused}
        replaced = {o for f in fused for o in f.node.outs}
        nodes = [at.get(n.name, n) for n in graph.nodes if n.name in at or replaced.isdisjoint(n.outs)]
        ordered = _ordered([n for n, _ in graph.inputs] + list(inputs), nodes)
        types = (*graph.inputs, *((x, s.type) for x, s in inputs.items()))
        whole = Graph(name, types, tuple(ordered), tuple(outputs))
        layouts = {**segment.layouts, **{x: s.layout for x, s in inputs.items()}}
        why = {**segment.why, **{f.node.name: self._why(name, f, inputs) for f in fused}}
        return replace(segment, graph=whole, layouts=layouts, why=why)

    def _called(
        self, segments: Mapping[str, LoweredSegment], inputs: Mapping[str, Mapping[str, _Source]]
    ) -> Lowered:
        """The program that calls the new segments."""
        main = list(self.lowered.main)
        values = dict(self.lowered.values)
        number = dict.fromkeys(segments, 0)
        for place, call in self.calls:
            name = call.segment
            given = tuple(s.names[number[name]] for s in inputs[name].values())
            number[name] += 1
            outs = []
            for (owner, value), names in self.wanted.items():
                if owner != name:
                    continue
                # a call whose value nobody asked for hands it out, too: all calls of a segment are alike
                out = names.get(call.outs[0]) or _unused(value, self.taken)
                self.taken.add(out)
                outs.append(out)
                values[out] = Placed(
                    self.index[name].types[value], self.lowered.segments[name].layouts[value]
                )
            main[place] = replace(call, args=(*call.args, *given), outs=(*call.outs, *outs))
        return replace(self.lowered, segments=dict(segments), main=tuple(main), values=values)


def _ordered(inputs: Sequence[str], nodes: Sequence[Node]) -> list[Node]:
    """The nodes in their order, those put off that need what comes later."""
    known = set(inputs)
    found: list[Node] = []
    waiting: list[Node] = []

    def settle() -> None:
        again = True
        while again:
            again = False
            for node in list(waiting):
                if known.issuperset(refs_of(node)):
                    waiting.remove(node)
                    found.append(node)
                    known.update(node.outs)
                    again = True
                    break

    for node in nodes:
        if known.issuperset(refs_of(node)):
            found.append(node)
            known.update(node.outs)
            if waiting:
                settle()
        else:
            waiting.append(node)
    assert not waiting, [n.name for n in waiting]
    return found


def _pruned(lowered: Lowered, droppable: Mapping[str, Collection[str]]) -> Lowered:
    """Without what nothing uses any more.

    droppable: of each segment, values that need not be made, nor handed out, if nothing uses them.
    """
    while True:
        used = {r for i in lowered.main for r in (i.args if isinstance(i, Call) else refs_of(i))}
        used.update(lowered.results)
        calls = [i for i in lowered.main if isinstance(i, Call)]
        leaving: dict[str, list[int]] = {}
        entering: dict[str, list[int]] = {}
        segments: dict[str, LoweredSegment] = {}
        for name, segment in lowered.segments.items():
            own = [c for c in calls if c.segment == name]
            graph = segment.graph
            leaving[name] = [
                place
                for place, value in enumerate(graph.outputs)
                if value not in droppable[name] or any(c.outs[place] in used for c in own)
            ]
            made = _alive(graph, [graph.outputs[p] for p in leaving[name]], droppable[name])
            needed = {*made.outputs, *(r for n in made.nodes for r in refs_of(n))}
            entering[name] = [p for p, (value, _) in enumerate(graph.inputs) if value in needed]
            # an input that nothing used before stays: calls are left as they are but for the kernels
            if not droppable[name]:
                entering[name] = list(range(len(graph.inputs)))
            inputs = tuple(graph.inputs[p] for p in entering[name])
            names = {n for n, _ in inputs} | {o for n in made.nodes for o in n.outs}
            layouts = {n: lay for n, lay in segment.layouts.items() if n in names}
            segments[name] = replace(segment, graph=replace(made, inputs=inputs), layouts=layouts)
        main = tuple(
            replace(
                i,
                args=tuple(i.args[p] for p in entering[i.segment]),
                outs=tuple(i.outs[p] for p in leaving[i.segment]),
            )
            if isinstance(i, Call)
            else i
            for i in lowered.main
        )
        if main == lowered.main:
            return replace(lowered, segments=segments)
        gone = {o for i in lowered.main for o in i.outs} - {o for i in main for o in i.outs}
        values = {n: v for n, v in lowered.values.items() if n not in gone}
        lowered = replace(lowered, segments=segments, main=main, values=values)


def _alive(graph: Graph, outputs: Sequence[str], droppable: Collection[str]) -> Graph:
    """The graph with these outputs, and without those droppable nodes that they do not need."""
    used = set(outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in droppable and used.isdisjoint(node.outs):
            continue
        kept.append(node)
        used.update(refs_of(node))
    return replace(graph, nodes=tuple(reversed(kept)), outputs=tuple(outputs))


def _unused(base: str, taken: Collection[str]) -> str:
    """``base``, or a name like it that is not yet taken."""
    name, k = base, 1
    while name in taken:
        k += 1
        name = f"{base}_{k}"
    return name


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.3g} MiB"
