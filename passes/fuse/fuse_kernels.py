"""Chains around a normalisation become one op each, with a kernel of its own (`kernels/norm.py`).

* sum, RMSNorm -> ``add_rms_norm`` (without a sum ``rms_norm``); its gradient, the gradient of its weight and
  the sum with what else arrives -> ``rms_norm_backward``;
* sum, LayerNorm -> ``add_layer_norm``; its gradient with that sum -> ``layer_norm_backward``; in half
  precision all LayerNorms, with statistics in fp32 (`norm_statistics`).

This comes last, on what a rank runs: collectives between the parts of a chain then simply stand in the way of
a match, and neither rules nor search need to know of these ops. A backward makes the normalised rows again
from the row and its statistic, so that forward no longer keeps them, nor a wider copy of its input: for that,
both halves of a norm are matched together, across the calls of the two segments that they stand in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.ir import DTYPES, Call, Graph, Node, Ref, TensorType, refs_of
from autoshard.ir.collectives import SLICE
from autoshard.ir.local_bytes import held_shape
from autoshard.ir.lowered import Lowered, LoweredSegment, PlacedValue
from autoshard.ir.names import free_name
from autoshard.ir.placement import Layout, Partial, Shard
from autoshard.kernels.registry import Operand, specs
from autoshard.passes.fuse.norm_patterns import Backward, Forward, UseIndex, backwards, forwards
from autoshard.passes.fuse.norm_statistics import NORM, NORM_BACKWARD, private, usual
from autoshard.passes.partition.value_origins import Origins
from autoshard.passes.prune_calls import pruned
from autoshard.rules.local import MeshShape

_ADD = "aten.add.Tensor"
#: part of the bytes that a kernel in place of another single op must stay below
_WORTH = 0.9
#: ops that move nothing
_FREE = ("aten.reshape.default", "aten.view.default", "aten.expand.default")


@dataclass(frozen=True)
class _Fused:
    """A new node and the values that need not be made any more.

    at: the value in whose place it stands. around: nodes that it needs beside those of the segment.
    """

    node: Node
    at: str
    chain: tuple[str, ...]
    around: tuple[Node, ...] = ()


@dataclass(frozen=True)
class _Rows:
    """The rows that a norm was given, for its backward.

    name: in the backward segment. type, layout, names: of a new input of that name, and what its calls bind
    to it; None for rows that are there. moved: what gives them the layout of the gradient.
    """

    name: str
    given: tuple[TensorType, Layout, tuple[str, ...]] | None = None
    moved: Node | None = None


def fuse_kernels(lowered: Lowered, mesh: MeshShape, memory_bandwidth: float) -> Lowered:
    """The program with kernels where they move fewer bytes than the ops that they stand for.

    memory_bandwidth: bytes/s, for the gain that is noted beside each.
    """
    return _Fuser(lowered, mesh, memory_bandwidth).run()


class _Fuser:
    def __init__(self, lowered: Lowered, mesh: MeshShape, memory_bandwidth: float) -> None:
        self.lowered, self.mesh, self.bandwidth = lowered, mesh, memory_bandwidth
        self.index = {name: UseIndex(s.graph) for name, s in lowered.segments.items()}
        self.layouts = {name: dict(s.layouts) for name, s in lowered.segments.items()}
        self.calls = [(k, i) for k, i in enumerate(lowered.main) if isinstance(i, Call)]
        self.origins = Origins(lowered)
        self.private = private(lowered, self.index, self.origins)
        self.norms = {
            (name, norm.rstd): norm
            for name, index in self.index.items()
            for norm in forwards(index)
            if self._full_rows(name, norm.x)
        }
        #: values of segments that a kernel makes already: two norms may share a sum
        self.claimed: dict[str, set[str]] = {name: set() for name in self.index}
        #: new inputs of segments: type, layout, and what each call binds to it
        self.inputs: dict[str, dict[str, tuple[TensorType, Layout, tuple[str, ...]]]] = {
            name: {} for name in self.index
        }
        #: values that segments must hand out, and under which name each call does
        self.wanted: dict[tuple[str, str], dict[int, str]] = {}
        self.taken = {*lowered.values, *(o for i in lowered.main for o in i.outs)}

    def run(self) -> Lowered:
        fused = {name: [*self._backwards(name), *self._layer_norms(name)] for name in self.index}
        for (name, _), norm in self.norms.items():
            fused[name].append(self._rms(name, norm))
        segments = {name: self._segment(name, fused[name]) for name in self.index}
        droppable = {name: {v for f in fused[name] for v in f.chain} for name in fused}
        for owner, value in self.wanted:
            droppable[owner].add(value)
        return pruned(self._called(segments), droppable)

    # what backward needs

    def _backwards(self, name: str) -> Iterator[_Fused]:
        """Gradients of norms whose other half is known, in every call of a segment."""
        for result in backwards(self.index[name]):
            outs = {result.dx, *([result.dw] if result.dw else [])}
            late = result.more and result.dw and self.index[name].depends(result.more, result.dw)
            if late or not self._full_rows(name, result.dx) or not outs.isdisjoint(self.claimed[name]):
                continue
            halves = [self._norm_of(k, result) for k, call in self.calls if call.segment == name]
            known = [half for half in halves if half is not None]
            rows = self._rows(name, result, known) if len(known) == len(halves) else None
            if rows is None:
                continue
            if rows.given is not None:
                self.inputs[name][rows.name] = rows.given
            self.claimed[name].update(outs)
            yield self._rms_backward(name, result, rows)

    def _norm_of(self, item: int, result: Backward) -> tuple[int, Forward] | None:
        """The call and the norm whose gradient this is, in the call at place ``item`` of main."""
        maker = self.origins.inside(item, result.rstd)
        if isinstance(maker, str):
            return None
        call = self.lowered.main[maker[0]]
        norm = self.norms.get((call.segment, maker[1])) if isinstance(call, Call) else None
        if norm is None:
            return None

        def same(value: str, others: Sequence[str]) -> bool:
            origins = {self.origins.inside(maker[0], other) for other in others}
            return self.origins.inside(item, value) in origins

        fits = all(same(raw, (norm.x, norm.wide)) for raw in result.raw)
        return (maker[0], norm) if fits and (result.rows is None or same(result.rows, norm.rows)) else None

    def _rows(self, name: str, result: Backward, halves: Sequence[tuple[int, Forward]]) -> _Rows | None:
        """Where a gradient finds the rows, as long as all calls find them in the same way."""
        index, layouts = self.index[name], self.layouts[name]
        wanted, layout = index.types[result.dx], layouts[result.dx]
        for raw in result.raw:
            if index.types[raw] == wanted and layouts[raw] == layout:
                return _Rows(raw)
        kinds = set()
        for item, norm in halves:
            segment = self._segment_of(item)
            kinds.add((self.index[segment].types[norm.x], self.layouts[segment][norm.x]))
        if len(kinds) != 1:
            return None
        type_, there = kinds.pop()
        move = index.makers.get(result.raw[0])
        moves = move is not None and move.op == SLICE.op and layouts[move.args[0].name] == there
        if type_ != wanted or (there != layout and not moves):
            return None
        names = tuple(self._name_in_main(item, norm.x) for item, norm in halves)
        given = (type_, there, names)
        known = next((n for n, other in self._all_inputs(name) if other == given), None)
        taken = {*index.types, *self.inputs[name]}
        x = known or free_name(f"{result.rstd}_x", taken)
        new = None if known else given
        if there == layout or move is None:
            return _Rows(x, new)
        out = free_name(f"{x}_a", {*taken, x})
        moved = replace(move, args=(Ref(x), *move.args[1:]), outs=(out,), types=(type_,))
        return _Rows(x, new, moved)

    def _all_inputs(self, name: str) -> Iterator[tuple[str, tuple[TensorType, Layout, tuple[str, ...]]]]:
        """Inputs of a segment, old and new, with what its calls bind to them."""
        own = [call for _, call in self.calls if call.segment == name]
        for place, (inner, type_) in enumerate(self.index[name].graph.inputs):
            yield inner, (type_, self.layouts[name][inner], tuple(c.args[place] for c in own))
        yield from self.inputs[name].items()

    def _segment_of(self, item: int) -> str:
        call = self.lowered.main[item]
        assert isinstance(call, Call)
        return call.segment

    def _name_in_main(self, item: int, value: str) -> str:
        """What a call's value is called in main; of one that does not leave the call yet, what it will be."""
        call = self.lowered.main[item]
        assert isinstance(call, Call)
        graph = self.lowered.segments[call.segment].graph
        for (name, _), arg in zip(graph.inputs, call.args, strict=True):
            if name == value:
                return arg
        for name, out in zip(graph.outputs, call.outs, strict=True):
            if name == value:
                return out
        known = self.wanted.setdefault((call.segment, value), {})
        if item not in known:
            known[item] = free_name(value, self.taken)
            self.taken.add(known[item])
        return known[item]

    # the new nodes

    def _full_rows(self, name: str, x: str) -> bool:
        """Whether every rank holds full rows of a value, and no part of a sum."""
        last = len(self.index[name].types[x].shape) - 1
        layout = self.lowered.segments[name].layouts[x]
        return not any(isinstance(p, Partial) or (isinstance(p, Shard) and p.dim == last) for p in layout)

    def _rms(self, name: str, norm: Forward) -> _Fused:
        y = self.index[name].makers[norm.y]
        own = (Ref(norm.weight), norm.eps, norm.narrow)
        if norm.parts is None or norm.x in self.claimed[name]:
            args = (Ref(norm.x), *own)
            return self._fused(name, "rms_norm", args, (norm.y, norm.rstd), y, norm.chain)
        self.claimed[name].add(norm.x)
        both, outs = tuple(map(Ref, norm.parts)), (norm.x, norm.y, norm.rstd)
        return self._fused(name, "add_rms_norm", (*both, *own), outs, y, (*norm.chain, norm.x))

    def _rms_backward(self, name: str, result: Backward, rows: _Rows) -> _Fused:
        index = self.index[name]
        more = Ref(result.more) if result.more else None
        x = rows.moved.name if rows.moved else rows.name
        args = (Ref(result.grad), Ref(x), Ref(result.weight), Ref(result.rstd), more)
        last = index.makers[result.dx]
        dw = result.dw
        around = (rows.moved,) if rows.moved else ()
        if dw is None or index.types[dw] != index.types[result.weight]:
            dw = free_name(f"{result.dx}_w", index.types)
        new = self._fused(name, "rms_norm_backward", args, (result.dx, dw), last, result.chain)
        if rows.moved:
            self.layouts[name][x] = self.layouts[name][result.dx]
        if result.dw is None or result.dw == dw:
            return replace(new, around=around)
        # the model sums up its rows as [1, ..., H]
        flat, shaped = index.types[result.weight], index.types[result.dw]
        self.layouts[name][dw] = _without_dims(self.layouts[name][result.dw])
        node = replace(new.node, types=(new.node.types[0], flat))
        view = Node(
            "aten.reshape.default", (Ref(dw), shaped.shape), (), (result.dw,), (shaped,), last.origin, True
        )
        return replace(new, node=node, around=(*around, view))

    def _layer_norms(self, name: str) -> list[_Fused]:
        """LayerNorms after a sum, and their gradients before one; in half precision both halves, or none."""
        result = []
        for node in self.index[name].graph.nodes:
            if node.op not in (NORM, NORM_BACKWARD) or not usual(node):
                continue
            stats = node.outs[1:] if node.op == NORM else tuple(s.name for s in node.args[3:5])
            narrow = any(self.index[name].types[s].dtype not in ("f32", "f64") for s in stats)
            if narrow and (name, node.name) not in self.private.nodes:
                continue
            make = self._layer_norm if node.op == NORM else self._layer_norm_backward
            new = make(name, node)
            before, after = self._moved(name, new)
            if narrow or after < _WORTH * before:
                self.claimed[name].update(new.node.outs)
                # the gradient of a bias that is not there is given all the same
                own = self.layouts[name]
                own.update({o: own[new.node.outs[1]] for o in new.node.outs if o not in own})
                result.append(new)
        return result

    def _layer_norm(self, name: str, node: Node) -> _Fused:
        index = self.index[name]
        x, _, weight, bias, eps = node.args
        added = index.made_by(x, _ADD)
        type_ = index.types[x.name]
        parts = added.args if added is not None and not added.kwargs else ()
        same = all(isinstance(p, Ref) and index.types[p.name] == type_ for p in parts) and len(parts) == 2
        taken = x.name in self.claimed[name]
        late = any(isinstance(r, Ref) and index.depends(r.name, x.name) for r in (weight, bias))
        if taken or not same or late:
            return self._fused(name, "layer_norm", (x, weight, bias, eps), node.outs, node, node.outs)
        outs = (x.name, *node.outs)
        return self._fused(name, "add_layer_norm", (*parts, weight, bias, eps), outs, node, outs)

    def _layer_norm_backward(self, name: str, node: Node) -> _Fused:
        index = self.index[name]
        grad, x, _, mean, rstd, weight, *_ = node.args
        dx, dw, db = node.outs
        last = index.only_use(dx, _ADD)
        more, outs, at = None, node.outs, node
        if last is not None and not last.kwargs and len(last.args) == 2:
            other = next((a for a in last.args if a != Ref(dx)), None)
            if (
                isinstance(other, Ref)
                and last.name not in self.claimed[name]
                and index.types[other.name] == index.types[dx] == index.types[last.name]
                and not any(index.depends(other.name, o) for o in node.outs)
            ):
                more, outs, at = other, (last.name, dw, db), last
        args = (grad, x, mean, rstd, weight, more)
        new = self._fused(name, "layer_norm_backward", args, outs, at, node.outs)
        types = new.node.types
        # the gradient of a bias that is not there is given all the same
        return replace(new, node=replace(new.node, types=(*types[:2], types[1])))

    def _fused(
        self,
        name: str,
        op: str,
        args: tuple[object, ...],
        outs: tuple[str, ...],
        at: Node,
        chain: Collection[str],
    ) -> _Fused:
        known = tuple(self._type(name, o) if o in self.index[name].types else None for o in outs)
        node = Node(f"autoshard.{op}.default", args, (), outs, known, at.origin, at.backward)
        return _Fused(node, at.name, tuple(dict.fromkeys((*chain, *outs))))

    def _type(self, name: str, value: str) -> TensorType:
        """Of a value of a segment as it will be: statistics that only kernels see are fp32."""
        type_ = self.index[name].types[value]
        narrow = type_.dtype in ("bf16", "f16") and (name, value) in self.private.statistics
        return TensorType(type_.shape, "f32") if narrow else type_

    # what it is good for

    def _operands(self, name: str, values: Collection[str]) -> list[Operand]:
        """Values of a segment as the first rank holds them."""
        new = self.inputs[name]
        result = []
        for value in values:
            if value in new:
                type_, layout, _ = new[value]
            elif value in self.index[name].types:
                type_, layout = self._type(name, value), self.layouts[name][value]
            else:
                continue
            shape = held_shape(type_.shape, layout, self.mesh.sizes)
            result.append(Operand(shape, DTYPES[type_.dtype][1]))
        return result

    def _moved(self, name: str, made: _Fused) -> tuple[float, float]:
        """Bytes that the chain moves, and that the kernel does."""
        index = self.index[name]
        before = 0.0
        for node in {id(n): n for v in made.chain if (n := index.makers.get(v))}.values():
            if node.op not in _FREE:
                values = (*dict.fromkeys(refs_of(node)), *node.outs)
                before += sum(x.nbytes for x in self._operands(name, values))
        ins = self._operands(name, [*dict.fromkeys(refs_of(made.node))])
        outs = self._operands(name, made.node.outs)
        return before, specs()[made.node.op].cost(ins, outs).moved

    def _why(self, name: str, made: _Fused) -> str:
        before, after = self._moved(name, made)
        saved = (before - after) / self.bandwidth
        return f"kernel: moves {_mib(after)}, not {_mib(before)}: {saved * 1e6:.3g} us less"

    # putting it together

    def _segment(self, name: str, fused: Sequence[_Fused]) -> LoweredSegment:
        segment = self.lowered.segments[name]
        graph = segment.graph
        outputs = (*graph.outputs, *(value for owner, value in self.wanted if owner == name))
        if not fused and len(outputs) == len(graph.outputs):
            return segment
        at = {f.at: (f.node, *f.around) for f in fused}
        replaced = {o for f in fused for n in (f.node, *f.around) for o in n.outs}
        nodes: list[Node] = []
        for node in graph.nodes:
            if node.name in at:
                nodes += at[node.name]
            elif replaced.isdisjoint(node.outs):
                nodes.append(node)
        new = self.inputs[name]
        old = tuple((n, self._type(name, n)) for n, _ in graph.inputs)
        inputs = (*old, *((x, type_) for x, (type_, _, _) in new.items()))
        ordered = _ordered([n for n, _ in inputs], nodes)
        layouts = {**self.layouts[name], **{x: layout for x, (_, layout, _) in new.items()}}
        why = {**segment.why, **{f.node.name: self._why(name, f) for f in fused}}
        return LoweredSegment(Graph(name, inputs, tuple(ordered), outputs), layouts, why)

    def _called(self, segments: Mapping[str, LoweredSegment]) -> Lowered:
        """The program that calls the new segments."""
        main = list(self.lowered.main)
        values = dict(self.lowered.values)
        number = dict.fromkeys(segments, 0)
        for item, call in self.calls:
            name = call.segment
            for out, inner in zip(call.outs, self.lowered.segments[name].graph.outputs, strict=True):
                if (name, inner) in self.private.statistics:
                    values[out] = replace(values[out], type=self._type(name, inner))
            given = tuple(names[number[name]] for _, _, names in self.inputs[name].values())
            number[name] += 1
            outs = []
            for (owner, value), names in self.wanted.items():
                if owner != name:
                    continue
                # a call whose value nobody asked for hands it out, too: all calls of a segment are alike
                out = names.get(item) or free_name(value, self.taken)
                self.taken.add(out)
                outs.append(out)
                values[out] = PlacedValue(self.index[name].types[value], self.layouts[name][value])
            main[item] = replace(call, args=(*call.args, *given), outs=(*call.outs, *outs))
        return replace(self.lowered, segments=dict(segments), main=tuple(main), values=values)


def _without_dims(layout: Layout) -> Layout:
    """The layout of a sum over rows as one row: it is not split."""
    assert not any(isinstance(p, Shard) for p in layout)
    return layout


def _ordered(inputs: Sequence[str], nodes: Sequence[Node]) -> list[Node]:
    """The nodes in their order, those put off that need what comes later."""
    known = set(inputs)
    result: list[Node] = []
    waiting: list[Node] = []

    def settle() -> None:
        repeated = True
        while repeated:
            repeated = False
            for node in list(waiting):
                if known.issuperset(refs_of(node)):
                    waiting.remove(node)
                    result.append(node)
                    known.update(node.outs)
                    repeated = True
                    break

    for node in nodes:
        if known.issuperset(refs_of(node)):
            result.append(node)
            known.update(node.outs)
            if waiting:
                settle()
        else:
            waiting.append(node)
    assert not waiting, [n.name for n in waiting]
    return result


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.3g} MiB"
