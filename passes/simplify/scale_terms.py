"""Make the terms of every microbatch those of the full batch: see `batch_terms`.

``microbatches`` is a total of ones: in a step it is how many there are, and 1 where the program is called by
itself. So one program serves both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoshard.ir import Call, Dtype, Graph, Node, Ref, TensorType, refs_of, substitute
from autoshard.ir.lowered import Instruction, Lowered, LoweredSegment, with_parts
from autoshard.ir.names import fresh_name
from autoshard.ir.placement import Layout, R
from autoshard.passes.simplify.batch_terms import BatchTerms

#: of a value that is added up over all microbatches before they run; by itself it changes nothing
TOTAL = "autoshard.total.default"
_COUNT = TensorType((), "f32")


def scale_terms(lowered: Lowered, terms: BatchTerms, axes: int) -> Lowered:
    """The program with totals, and with what is divided by the number of microbatches.

    axes: of the mesh that values are laid on.
    """
    return _Scaler(lowered, terms, (R,) * axes).run() if terms else lowered


class _Scaler:
    def __init__(self, lowered: Lowered, terms: BatchTerms, whole: Layout) -> None:
        self.lowered, self.terms, self.whole = lowered, terms, whole
        self.taken = {*lowered.values, *(o for i in lowered.main for o in i.outs)}
        self.segments: dict[str, LoweredSegment] = {}
        self.values = dict(lowered.values)

    def run(self) -> Lowered:
        self.segments = {name: self._segment(name, s) for name, s in self.lowered.segments.items()}
        main = list(self.lowered.main)
        results = list(self.lowered.results)
        renamed: dict[str, str] = {}
        for number in sorted(self.terms.results):
            value = results[number]
            if value not in renamed:
                backward = next((i.backward for i in main if value in i.outs), True)
                renamed[value] = self._divided_in_main(value, main, backward)
            results[number] = renamed[value]
        if self.terms.tangent:
            main = self._divided_tangent(main)
        # what divides a result of forward stands behind backward here
        halves = [i for i in main if not i.backward], [i for i in main if i.backward]
        new = replace(
            self.lowered,
            segments=self.segments,
            main=(*halves[0], *halves[1]),
            values=self.values,
            results=tuple(results),
        )
        return with_parts(new, zip(new.parts, halves, strict=True)) if new.parts else new

    # -- main --------------------------------------------------------------------------------------

    def _divided_in_main(self, value: str, main: list[Instruction], backward: bool) -> str:
        """The name of the value divided, by a call at the end of main."""
        placed = self.values[value]
        taken = {"x", "y"}
        nodes = [*_counting("count", taken), *_divided("x", "y", placed.type, "count", 1, taken)]
        nodes = [replace(n, backward=backward) for n in nodes]
        name = fresh_name("share", {*self.segments})
        graph = Graph(name, (("x", placed.type),), tuple(nodes), ("y",))
        layouts = {v: placed.layout if v in ("x", "y") else self.whole for v in graph.types()}
        layouts |= {n.name: placed.layout for n in nodes[2:]}
        self.segments[name] = LoweredSegment(graph, layouts, {})
        out = fresh_name(f"{value}_share", self.taken)
        self.values[out] = placed
        main.append(Call(name, (value,), (out,), "", backward))
        return out

    def _divided_tangent(self, main: list[Instruction]) -> list[Instruction]:
        tangent = self.terms.tangent
        new: list[Instruction] = []
        out = self._divided_in_main(tangent, new, True)

        def renamed(item: Instruction) -> Instruction:
            if isinstance(item, Call):
                return replace(item, args=tuple(out if a == tangent else a for a in item.args))
            return substitute(item, lambda name: Ref(out if name == tangent else name))

        return [*(i for i in main if not i.backward), *new, *(renamed(i) for i in main if i.backward)]

    # -- segments ----------------------------------------------------------------------------------

    def _segment(self, name: str, segment: LoweredSegment) -> LoweredSegment:
        totals = {v for s, v in self.terms.totals if s == name}
        scaled = {v: power for (s, v), power in self.terms.scaled.items() if s == name}
        shares = {(n, k): power for (s, n, k), power in self.terms.shares.items() if s == name}
        if not (totals or scaled or shares):
            return segment
        graph = segment.graph
        types, layouts = graph.types(), dict(segment.layouts)
        taken = set(types)
        nodes: list[Node] = []
        count = ""
        if scaled or shares:
            count = fresh_name("microbatches", taken)
            backward = any(n.backward for n in graph.nodes)
            nodes += [replace(n, backward=backward) for n in _counting(count, taken)]
            layouts.update((n.name, self.whole) for n in nodes)

        def add(new: list[Node], like: Node, layout: Layout) -> None:
            nodes.extend(replace(n, origin=like.origin, backward=like.backward) for n in new)
            layouts.update((n.name, layout) for n in new)

        for node in graph.nodes:
            for place, ref in enumerate(list(refs_of(node))):
                if (node.name, place) in shares:
                    out = fresh_name(f"{ref}_share", taken)
                    power = shares[node.name, place]
                    add(_divided(ref, out, types[ref], count, power, taken), node, layouts[ref])
                    node = _with_use(node, place, out)
            outs = {o: fresh_name(f"{o}_own", taken) for o in node.outs if o in totals or scaled.get(o)}
            nodes.append(replace(node, outs=tuple(outs.get(o, o) for o in node.outs)))
            for out, own in outs.items():
                layouts[own] = layouts[out]
                if out in totals:
                    total = fresh_name(f"{out}_total", taken) if scaled.get(out) else out
                    add([Node(TOTAL, (Ref(own),), (), (total,), (types[out],))], node, layouts[out])
                    own = total
                if scaled.get(out):
                    add(_divided(own, out, types[out], count, scaled[out], taken), node, layouts[out])
        return LoweredSegment(replace(graph, nodes=tuple(nodes)), layouts, segment.why)


def _with_use(node: Node, place: int, name: str) -> Node:
    """The node with another value at one of its uses."""
    at = iter(range(len(list(refs_of(node)))))
    return substitute(node, lambda old: Ref(name if next(at) == place else old))


def _counting(name: str, taken: set[str]) -> list[Node]:
    """How many microbatches there are."""
    one = fresh_name(f"{name}_own", taken)
    return [
        Node("aten.full.default", ((), 1.0), (("dtype", Dtype("f32")),), (one,), (_COUNT,)),
        Node(TOTAL, (Ref(one),), (), (name,), (_COUNT,)),
    ]


def _divided(value: str, out: str, type_: TensorType, count: str, power: int, taken: set[str]) -> list[Node]:
    """``out = value / count ** power``, in the type of the value."""
    new: list[Node] = []
    op = "aten.div.Tensor" if power > 0 else "aten.mul.Tensor"
    # two numbers without dims would be one of the wider type, and one of integers a float
    cast = (not type_.shape and type_.dtype in ("bf16", "f16")) or not type_.is_float
    wide = TensorType(type_.shape, "f32") if cast else type_
    for k in range(abs(power)):
        last = k == abs(power) - 1 and not cast
        name = out if last else fresh_name(f"{out}_wide", taken)
        new.append(Node(op, (Ref(value), Ref(count)), (), (name,), (wide,)))
        value = name
    if cast:
        kwargs = (("dtype", Dtype(type_.dtype)),)
        new.append(Node("aten._to_copy.default", (Ref(value),), kwargs, (out,), (type_,)))
    return new


def totals_in(segments: Mapping[str, LoweredSegment]) -> bool:
    """Whether anything is added up over microbatches before they run."""
    return any(n.op == TOTAL for s in segments.values() for n in s.graph.nodes)
