"""A second copy of every parameter, split over fewer ranks than the first: what is regathered stays near.

With parameters split over all ranks, every layer is gathered over the network twice a step. Once an axis is
taken apart by level (`passes/partition/hierarchy.py`), what the gathers over its outer levels give is such a
copy, and

    per microbatch   what forward gathers over the outer levels is kept until backward, which gathers over
                     the inner levels alone (hpZ: G. Wang et al., "ZeRO++", 2023, section 3.2)
    once a step      the copy is made before the first microbatch, and all of them gather from it over the
                     inner levels alone (the three-level partition of "Scaling Large Language Model Training
                     on Frontier with Low-Bandwidth Partitioning", 2025: parameters in a pair of dies)

Gradients may be treated alike: reduced over inner levels in every microbatch, and over the outer levels once
a step. Optimizer state stays split over all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field, replace

from autoshard.ir import Call, Graph, Node, Origin, Ref, TensorType, refs_of, substitute
from autoshard.ir.collectives import (
    BUCKET_BYTES,
    TensorTransfer,
    collective,
    exact_transfer,
    kept_outs,
    moved_by,
    transfers_of,
)
from autoshard.ir.lowered import Instruction, Lowered, LoweredSegment, PlacedValue, StagePart, with_parts
from autoshard.ir.names import free_name
from autoshard.ir.placement import Layout
from autoshard.passes.partition.hierarchy import CannotRefineError
from autoshard.passes.partition.quantize_collectives import Gradients


@dataclass(frozen=True)
class Secondary:
    """copies: axes over which parameters are gathered to make the copy, outermost first; () for no copies.
    once: whether they are made once a step, or in every forward. gradients: axes over which gradients are
    reduced once a step.
    """

    copies: tuple[str, ...] = ()
    once: bool = False
    gradients: tuple[str, ...] = ()


NO_SECONDARY = Secondary()


def secondary_shards(
    lowered: Lowered, params: Collection[str], grads: Collection[str], how: Secondary
) -> Lowered:
    """The program with second copies of parameters, and gradients that wait for the end of the step.

    params: inputs that are parameters. grads: values that are gradients of parameters. Raises
    CannotRefineError if nothing would be any different.
    """
    if any(part.slice for part in lowered.parts):
        raise CannotRefineError("slices of the sequence share their parameters")
    if how.copies:
        lowered = _Copies(lowered, params, how).run()
    if how.gradients:
        lowered = _Waiting(lowered, grads, how.gradients).run()
    return lowered


# -- parameters ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Made:
    """How a segment makes copies. copy: input -> its copy. steps: per axis, gathers of the segment."""

    copy: Mapping[str, str]
    steps: tuple[Node, ...]


def _made_in(nodes: Collection[Node], sources: Collection[str], axes: tuple[str, ...]) -> _Made:
    """The copies that a graph makes of some of its inputs, by gathers over these axes in this order."""
    level: dict[str, tuple[str, int]] = {s: (s, 0) for s in sources}
    copy: dict[str, str] = {}
    steps: list[Node] = []
    for node in nodes:
        if exact_transfer(node) != "all_gather" or node.args[1] not in axes:
            continue
        for source, out in moved_by(node):
            root, done = level.get(source, ("", -1))
            if done >= 0 and axes[done] == node.args[1]:
                level[out] = (root, done + 1)
                if done + 1 == len(axes):
                    copy[root] = out
        steps.append(node)
    roots = {out: root for out, (root, _) in level.items()}
    chosen = {out for out, root in roots.items() if root in copy and out != root}
    kept = [n for s in steps if (n := kept_outs(s, chosen)) is not None]
    return _Made(copy, tuple(kept))


class _Copies:
    """The first pass: parameters."""

    def __init__(self, lowered: Lowered, params: Collection[str], how: Secondary) -> None:
        self.lowered, self.params, self.how = lowered, frozenset(params), how
        self.values = dict(lowered.values)
        self.made: dict[str, _Made] = {}
        for name, segment in lowered.segments.items():
            calls = [i for i in lowered.main if isinstance(i, Call) and i.segment == name]
            bare = {
                inner
                for k, (inner, _) in enumerate(segment.graph.inputs)
                if calls and all(call.args[k] in self.params for call in calls)
            }
            self.made[name] = _made_in(segment.graph.nodes, bare, how.copies)
        self.segments = dict(lowered.segments)
        self.parts = {p.stage for p in lowered.parts}
        self.used = False

    def run(self) -> Lowered:
        main = {part: list(self.lowered.of(part)) for part in self.lowered.parts}
        gathers: dict[int, list[Instruction]] = {}
        for stage in sorted(self.parts):
            own = [p for p in self.lowered.parts if p.stage == stage]
            if self.how.once:
                copies = self._once(stage, main, own, gathers)
                takers = [p for p in own if p.phase not in ("gather", "reduce")]
            else:
                copies = self._kept(stage, main, own)
                takers = [p for p in own if p.phase in ("backward", "weight")]
            for part in takers:
                main[part] = [self._taking(item, copies) for item in main[part]]
        if not self.used:
            raise CannotRefineError(
                "no layer gathers again what there would be a copy of: the plan keeps parameters gathered"
            )
        self._drop_unused(main)
        return self._joined(main, gathers)

    def _name(self, port: str, stage: int) -> str:
        base = f"{port}_copy" if len(self.parts) == 1 else f"{port}_copy_{stage}"
        return free_name(base, self.values)

    # -- making them ---------------------------------------------------------------------------------

    def _kept(
        self, stage: int, main: dict[StagePart, list[Instruction]], own: list[StagePart]
    ) -> dict[str, str]:
        """Calls of forward hand their copies on. Gives port -> copy, of those that are used again."""
        repeated = {
            a
            for part in own
            if part.phase in ("backward", "weight")
            for item in main[part]
            if isinstance(item, Call)
            for a, (inner, _) in zip(item.args, self._inputs(item), strict=True)
            if inner in self.made[item.segment].copy
        }
        # what also runs in backward returns there what it did
        shared = {
            i.segment
            for part, items in main.items()
            if part.phase != "forward"
            for i in items
            if isinstance(i, Call)
        }
        copies: dict[str, str] = {}
        for part in own:
            if part.phase != "forward":
                continue
            for k, item in enumerate(main[part]):
                if not isinstance(item, Call) or item.segment in shared:
                    continue
                if repeated.isdisjoint(self._port(item, inner) for inner in self.made[item.segment].copy):
                    continue
                outs = list(item.outs)
                for inner, copy in self.made[item.segment].copy.items():
                    port = self._port(item, inner)
                    name = self._name(port, stage)
                    graph = self.lowered.segments[item.segment].graph
                    self.values[name] = PlacedValue(graph.types()[copy], self._layout(item.segment, copy))
                    outs.append(name)
                    if port in repeated:
                        copies.setdefault(port, name)
                main[part][k] = replace(item, outs=tuple(outs))
                self._hand_on(item.segment)
        return copies

    def _hand_on(self, name: str) -> None:
        """The segment also returns its copies."""
        segment, copies = self.segments[name], tuple(self.made[name].copy.values())
        before = self.lowered.segments[name].graph.outputs
        graph = replace(segment.graph, outputs=(*before, *copies))
        self.segments[name] = replace(segment, graph=graph)

    def _once(
        self,
        stage: int,
        main: dict[StagePart, list[Instruction]],
        own: list[StagePart],
        gathers: dict[int, list[Instruction]],
    ) -> dict[str, str]:
        """Copies made in main, in a message per call and axis. Gives port -> copy."""
        copies: dict[str, str] = {}
        items = [i for p in own if p.phase == "forward" for i in main[p]]
        items += [i for p in own if p.phase in ("backward", "weight") for i in main[p]]
        for item in items:
            if not isinstance(item, Call):
                continue
            new = self.made[item.segment]
            ports = {self._port(item, inner): inner for inner in new.copy}
            fresh = {inner: port for port, inner in ports.items() if port not in copies}
            if not fresh:
                continue
            wanted = {new.copy[inner]: port for inner, port in fresh.items()}
            gathers.setdefault(stage, []).extend(self._steps(item, new, wanted, stage, copies))
        return copies

    def _steps(
        self, item: Call, made: _Made, wanted: Mapping[str, str], stage: int, copies: dict[str, str]
    ) -> list[Node]:
        """The gathers of a segment that make some copies, in main. wanted: copy -> port."""
        chosen: set[str] = set()
        needed = set(wanted)
        for node in reversed(made.steps):
            for source, out in moved_by(node):
                if out in needed:
                    chosen.add(out)
                    needed.add(source)
        names = {inner: a for a, (inner, _) in zip(item.args, self._inputs(item), strict=True)}
        types = self.lowered.segments[item.segment].graph.types()
        result: list[Node] = []
        for node in made.steps:
            kept = kept_outs(node, chosen)
            if kept is None:
                continue
            for source, out in moved_by(kept):
                step = self._step_name(names.get(source, source), node)
                own = self._name(wanted[out], stage) if out in wanted else step
                names[out] = own
                self.values[own] = PlacedValue(types[out], self._layout(item.segment, out))
                if out in wanted:
                    copies[wanted[out]] = own
            result.append(replace(_moved(kept, names, item.label), backward=False))
        return result

    def _step_name(self, source: str, node: Node) -> str:
        base = f"{source}_{node.args[1]}"
        return free_name(base, self.values)

    # -- taking them ---------------------------------------------------------------------------------

    def _taking(self, item: Instruction, copies: Mapping[str, str]) -> Instruction:
        """A call that takes copies instead of parameters, if there is one of each."""
        if not isinstance(item, Call) or not self.made[item.segment].copy:
            return item
        new = self.made[item.segment].copy
        if not all(self._port(item, inner) in copies for inner in new):
            return item
        self.used = True
        name = self._near(item.segment)
        inputs = {inner for inner, _ in self.segments[name].graph.inputs}
        args = [a for a, (inner, _) in zip(item.args, self._inputs(item), strict=True) if inner in inputs]
        args += [copies[self._port(item, inner)] for inner in new]
        outs = item.outs[: len(self.segments[name].graph.outputs)]
        return replace(item, segment=name, args=tuple(args), outs=outs)

    def _near(self, name: str) -> str:
        """The form of a segment that takes copies, beside the old one, which others may still call."""
        near = f"near_{name}"
        if near not in self.segments:
            segment, new = self.lowered.segments[name], self.made[name]
            types, copies = segment.graph.types(), set(new.copy.values())
            dropped = {o for n in new.steps for o in n.outs}
            nodes: list[Node] = []
            for node in segment.graph.nodes:
                if exact_transfer(node) == "all_gather" and node.args[1] in self.how.copies:
                    kept = kept_outs(node, set(node.outs) - dropped)
                    nodes += [] if kept is None else [kept]
                else:
                    nodes.append(node)
            used = {r for n in nodes for r in refs_of(n)} | set(segment.graph.outputs)
            inputs = [(n, t) for n, t in segment.graph.inputs if n not in new.copy or n in used]
            inputs += [(c, types[c]) for c in new.copy.values()]
            graph = Graph(near, tuple(inputs), tuple(nodes), segment.graph.outputs)
            present = {n for n, _ in inputs} | {o for n in nodes for o in n.outs}
            layouts = {n: lay for n, lay in segment.layouts.items() if n in present}
            reason = {n: "from the copy that is split over fewer ranks" for n in self._first(nodes, copies)}
            self.segments[near] = LoweredSegment(graph, layouts, {**segment.why, **reason})
        return near

    @staticmethod
    def _first(nodes: Collection[Node], copies: Set[str]) -> list[str]:
        return [
            n.name
            for n in nodes
            if exact_transfer(n) == "all_gather" and not copies.isdisjoint(set(refs_of(n)))
        ]

    # -- the program with them -------------------------------------------------------------------------

    def _inputs(self, item: Call) -> tuple[tuple[str, TensorType], ...]:
        return self.lowered.segments[item.segment].graph.inputs

    def _port(self, item: Call, inner: str) -> str:
        """What a call gives for an input of its segment."""
        return next(a for a, (n, _) in zip(item.args, self._inputs(item), strict=True) if n == inner)

    def _layout(self, segment: str, value: str) -> Layout:
        return self.lowered.segments[segment].layouts[value]

    def _drop_unused(self, main: Mapping[StagePart, list[Instruction]]) -> None:
        """Segments that nothing calls any more go; the form beside such a one takes its name."""
        called = {i.segment for items in main.values() for i in items if isinstance(i, Call)}
        names = {n: n.removeprefix("near_") for n in called if n not in self.lowered.segments}
        names = {near: name for near, name in names.items() if name not in called}
        for items in main.values():
            for k, item in enumerate(items):
                if isinstance(item, Call) and item.segment in names:
                    items[k] = replace(item, segment=names[item.segment])
        self.segments = {
            names.get(n, n): replace(s, graph=replace(s.graph, name=names.get(n, n)))
            for n, s in self.segments.items()
            if n in called
        }

    def _joined(
        self, main: Mapping[StagePart, list[Instruction]], gathers: Mapping[int, list[Instruction]]
    ) -> Lowered:
        pieces: list[tuple[StagePart, list[Instruction]]] = []
        have = {p.stage for p in self.lowered.parts if p.phase == "gather"}

        if gathers:
            for stage in sorted(self.parts - have):
                pieces.append((StagePart(stage, "gather", 0, 0), gathers.get(stage, [])))
        for part in self.lowered.parts:
            own = gathers.get(part.stage, []) if part.phase == "gather" else []
            pieces.append((part, [*main[part], *own]))
        return with_parts(replace(self.lowered, segments=self.segments, values=self.values), pieces)


def _moved(node: Node, names: Mapping[str, str], label: str) -> Node:
    """A node of a segment as one of main, where its values have other names."""
    new = substitute(node, lambda name: Ref(names[name]))
    return replace(new, outs=tuple(names[o] for o in node.outs), origin=Origin(label))


# -- gradients -----------------------------------------------------------------------------------------


@dataclass
class _Bucket:
    """Gradients that wait for one message."""

    moves: list[TensorTransfer] = field(default_factory=list)
    nbytes: float = 0.0


class _Waiting:
    """The second pass: gradients are reduced over some axes at the end of the step."""

    def __init__(self, lowered: Lowered, grads: Collection[str], axes: tuple[str, ...]) -> None:
        self.lowered, self.axes = lowered, axes
        self.values = dict(lowered.values)
        self.reduced = Gradients(lowered, grads)
        self.ends: dict[int, list[Node]] = {}

    def run(self) -> Lowered:
        cut = {name: self._cut(name) for name in self.lowered.segments}
        if not any(left for _, left in cut.values()):
            raise CannotRefineError("no layer reduces a gradient over these levels")
        segments = {name: result[0] for name, result in cut.items()}
        items: list[Instruction] = []
        parts: list[StagePart] = []
        late: dict[int, list[Instruction]] = {}
        for part in self.lowered.parts:
            start = len(items)
            if part.phase == "reduce":
                # before what is there, which may reduce the results over further axes
                items += self._together(late.pop(part.stage, []))
            for item in self.lowered.of(part):
                if isinstance(item, Call) and cut[item.segment][1]:
                    item = self._call(item, cut[item.segment][1], late.setdefault(part.stage, []))
                items.append(item)
            parts.append(replace(part, start=start, stop=len(items)))
        return replace(
            self.lowered, segments=segments, main=tuple(items), values=self.values, parts=tuple(parts)
        )

    def _cut(self, name: str) -> tuple[LoweredSegment, dict[str, tuple[str, list[Node]]]]:
        """The segment without the last reductions of gradients, and per output (what it returns instead,
        what is left to do, in order)."""
        segment = self.lowered.segments[name]
        graph, inside = segment.graph, self.reduced.inside[name]
        makers = {o: n for n in graph.nodes for o in n.outs}
        left: dict[str, tuple[str, list[Node]]] = {}
        gone: set[str] = set()
        for out in graph.outputs:
            steps: list[Node] = []
            at = out
            while at in inside and at in makers:
                node = makers[at]
                if exact_transfer(node) != "reduce_scatter" or node.args[1] not in self.axes:
                    break
                only = kept_outs(node, {at})
                assert only is not None
                steps.insert(0, only)
                gone.add(at)
                at = next(refs_of(only))
            if steps:
                left[out] = (at, steps)
        if not left:
            return segment, {}
        nodes: list[Node] = []
        for node in graph.nodes:
            if exact_transfer(node) == "reduce_scatter" and not gone.isdisjoint(node.outs):
                kept = kept_outs(node, set(node.outs) - gone)
                nodes += [] if kept is None else [kept]
            else:
                nodes.append(node)
        outputs = tuple(left[o][0] if o in left else o for o in graph.outputs)
        return replace(segment, graph=replace(graph, nodes=tuple(nodes), outputs=outputs)), left

    def _call(self, call: Call, left: Mapping[str, tuple[str, list[Node]]], late: list[Instruction]) -> Call:
        """The call with what it returns instead; what is left to do is added to ``late``."""
        segment = self.lowered.segments[call.segment]
        types = segment.graph.types()
        outs = list(call.outs)
        for k, output in enumerate(segment.graph.outputs):
            if output not in left:
                continue
            inner, steps = left[output]
            names = {inner: self._fresh(f"{call.outs[k]}_inner"), output: call.outs[k]}
            outs[k] = names[inner]
            for node in steps:
                new = node.outs[0]
                if new not in names:
                    names[new] = self._fresh(f"{call.outs[k]}_{node.args[1]}")
            for value, name in names.items():
                self.values[name] = PlacedValue(types[value], segment.layouts[value])
            late += [_moved(node, names, call.label) for node in steps]
        return replace(call, outs=tuple(outs))

    def _fresh(self, base: str) -> str:
        return free_name(base, self.values)

    def _together(self, late: Collection[Instruction]) -> list[Instruction]:
        """Reductions over one axis in large messages, the inner axes first."""
        new: list[Instruction] = []
        for axis in reversed(self.axes):
            waiting: dict[str, _Bucket] = {}
            for node in late:
                if not isinstance(node, Node) or node.args[1] != axis:
                    continue
                type_ = node.types[0]
                assert type_ is not None
                bucket = waiting.setdefault(type_.dtype, _Bucket())
                bucket.moves += transfers_of(node) or ()
                bucket.nbytes += type_.nbytes
                if bucket.nbytes >= BUCKET_BYTES:
                    new.append(self._message(axis, waiting.pop(type_.dtype)))
            new += [self._message(axis, bucket) for bucket in waiting.values()]
        return new

    def _message(self, axis: str, bucket: _Bucket) -> Node:
        types = [self.values[t.out].type for t in bucket.moves]
        return collective("reduce_scatter", axis, bucket.moves, types, Origin(), True, bucket=True)
