"""Faults for good programs: each kind a function that puts one fault of its kind wherever it can be.

What is handed on is the program as it would be read from its folder, or the moves of its pipeline, with the
place of the fault and the rules of which one must be named. Faults are made so that they change what is
computed, or what waits for what: a program that is merely written in another way is no fault.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from autoshard.ir import Call, CallSite, LocalOffset, LocalSize, Node, Ref, TensorType, refs_of, substitute
from autoshard.ir.lowered import Lowered, LoweredSegment, Part
from autoshard.placement import Partial, R, Shard
from autoshard.program.messages import Message, Move, moves_of
from autoshard.program.program import Note, Program
from autoshard.schedules.schedule import Action, Schedule

Moves = tuple[tuple[Move, ...], ...]


@dataclass(frozen=True)
class Fault:
    """A program with one fault.

    rules: of which the verifier must name one. near: of which the place it names must contain one (a value, a
    segment, a part or an action). moves: of the pipeline, if the fault is in them. memory: whether only the
    memory of the device is at fault.
    """

    program: Program
    rules: frozenset[str]
    near: tuple[str, ...]
    moves: Moves | None = None
    memory: bool = False


Mutation = Callable[[Program], Iterator[Fault]]

GRADUAL = ("comm.all_reduce.default", "comm.reduce_scatter.default")
GATHERS = ("comm.all_gather.default",)
SINGLE = (*GRADUAL, *GATHERS, "comm.slice.default", "comm.all_to_all.default")


# -- edits ------------------------------------------------------------------------------------------


def rules(*names: str) -> frozenset[str]:
    return frozenset(names)


def sites(program: Program) -> Iterator[tuple[str, int, Node]]:
    """(segment, number, node) of every node inside a segment that is called."""
    called = {i.segment for i in program.lowered.main if isinstance(i, Call)}
    for name, segment in program.lowered.segments.items():
        if name in called:
            for number, node in enumerate(segment.graph.nodes):
                yield name, number, node


def with_nodes(program: Program, name: str, pairs: Sequence[tuple[Node, Note]], **changes: Any) -> Program:
    """The program with other nodes in a segment. changes: of its graph or its layouts."""
    segment = program.lowered.segments[name]
    layouts = changes.pop("layouts", segment.layouts)
    graph = replace(segment.graph, nodes=tuple(n for n, _ in pairs), **changes)
    segments = {**program.lowered.segments, name: LoweredSegment(graph, layouts, segment.why)}
    notes = {**program.notes, name: tuple(note for _, note in pairs)}
    return replace(program, lowered=replace(program.lowered, segments=segments), notes=notes)


def pairs_of(program: Program, name: str) -> list[tuple[Node, Note]]:
    nodes = program.lowered.segments[name].graph.nodes
    return list(zip(nodes, program.notes[name], strict=True))


def replaced(program: Program, name: str, number: int, node: Node) -> Program:
    pairs = pairs_of(program, name)
    pairs[number] = (node, pairs[number][1])
    return with_nodes(program, name, pairs)


def dropped(program: Program, name: str, number: int, stand_in: str) -> Program:
    """Without a node of one output: ``stand_in`` is used in its place, also as an output."""
    pairs = pairs_of(program, name)
    out = pairs[number][0].outs[0]
    del pairs[number]

    def told(value: str) -> Ref:
        return Ref(stand_in if value == out else value)

    made = [(substitute(node, told), note) for node, note in pairs]
    outputs = tuple(stand_in if o == out else o for o in program.lowered.segments[name].graph.outputs)
    return with_nodes(program, name, made, outputs=outputs)


def with_main(program: Program, items: Sequence[Any], parts: Sequence[Part] | None = None) -> Program:
    return replace(
        program,
        lowered=replace(program.lowered, main=tuple(items), parts=tuple(parts or program.lowered.parts)),
    )


def without_item(program: Program, number: int) -> Program:
    """Main without one instruction."""
    main = list(program.lowered.main)
    del main[number]
    parts = [
        replace(p, start=p.start - (p.start > number), stop=p.stop - (p.stop > number))
        for p in program.lowered.parts
    ]
    return with_main(program, main, parts)


def with_schedule(program: Program, **changes: Any) -> Program:
    assert program.stages is not None
    schedule: Schedule = replace(program.stages.schedule, **changes)
    return replace(program, stages=replace(program.stages, schedule=schedule))


def floats(program: Program, name: str) -> dict[str, TensorType]:
    return {v: t for v, t in program.lowered.segments[name].graph.types().items() if t.is_float}


def used(program: Program, name: str, value: str) -> bool:
    graph = program.lowered.segments[name].graph
    return value in graph.outputs or any(value in refs_of(n) for n in graph.nodes)


# -- collectives ------------------------------------------------------------------------------------


def drop_collective(program: Program) -> Iterator[Fault]:
    """A collective is left out: what comes before it is used in its place."""
    for name, number, node in sites(program):
        if node.op in SINGLE and used(program, name, node.outs[0]):
            made = dropped(program, name, number, next(refs_of(node)))
            yield Fault(made, rules("placement", "partial", "interface", "collective", "arguments"), (name,))
    for number, item in enumerate(program.lowered.main):
        if isinstance(item, Node) and item.op.startswith("comm.") and len(item.outs) > 1:
            # one gradient of a bucket
            keep = item.args[2][1:] if len(item.args) > 2 else None
            args = (item.args[0][1:], item.args[1], *((keep,) if keep is not None else ()))
            short = replace(item, args=args, outs=item.outs[1:], types=item.types[1:])
            main = [short if k == number else i for k, i in enumerate(program.lowered.main)]
            yield Fault(with_main(program, main), rules("result", "function"), (item.outs[0],))


def duplicate_collective(program: Program) -> Iterator[Fault]:
    """A reduction is done twice."""
    for name, number, node in sites(program):
        if node.op == "comm.all_reduce.default":
            pairs = pairs_of(program, name)
            again, note = f"{node.outs[0]}_twice", pairs[number][1]
            first = replace(node, outs=(again,))
            second = replace(node, args=(Ref(again), *node.args[1:]))
            pairs[number : number + 1] = [(first, note), (second, note)]
            segment = program.lowered.segments[name]
            layouts = {**segment.layouts, again: segment.layouts[node.outs[0]]}
            yield Fault(
                with_nodes(program, name, pairs, layouts=layouts), rules("collective"), (node.outs[0],)
            )
    for number, item in enumerate(program.lowered.main):
        if isinstance(item, Node) and item.op == "comm.all_reduce_bucket.default":
            values = dict(program.lowered.values)
            early = tuple(f"{o}_twice" for o in item.outs)
            values.update({e: values[o] for e, o in zip(early, item.outs, strict=True)})
            main = list(program.lowered.main)
            second = replace(item, args=(tuple(map(Ref, early)), *item.args[1:]))
            main[number : number + 1] = [replace(item, outs=early), second]
            parts = [
                replace(p, start=p.start + (p.start > number), stop=p.stop + (p.stop > number))
                for p in program.lowered.parts
            ]
            made = with_main(program, main, parts)
            made = replace(made, lowered=replace(made.lowered, values=values))
            yield Fault(made, rules("collective"), item.outs)


def late_collective(program: Program) -> Iterator[Fault]:
    """A collective comes after what needs it: one use takes what comes before the collective."""
    for name, number, node in sites(program):
        if node.op not in SINGLE:
            continue
        source = next(refs_of(node))
        for place, other in enumerate(program.lowered.segments[name].graph.nodes):
            if place > number and node.outs[0] in refs_of(other) and not other.op.startswith("comm."):
                early = substitute(other, lambda v, s=source, n=node: Ref(s if v == n.outs[0] else v))  # type: ignore[misc]
                yield Fault(
                    replaced(program, name, place, early),
                    rules("placement", "partial", "arguments"),
                    (other.outs[0],),
                )
                break


def wrong_axis(program: Program) -> Iterator[Fault]:
    """A collective over the other axis of the mesh: another group of ranks."""
    axes = [a.split("=")[0] for a in program.mesh.split(",")]
    if len(axes) < 2:
        return
    for name, number, node in sites(program):
        if node.op in SINGLE:
            other = axes[(axes.index(node.args[1]) + 1) % len(axes)]
            wrong = replace(node, args=(node.args[0], other, *node.args[2:]))
            yield Fault(replaced(program, name, number, wrong), rules("collective"), (node.outs[0],))
    for number, item in enumerate(program.lowered.main):
        if isinstance(item, Node) and item.op.startswith("comm."):
            other = axes[(axes.index(item.args[1]) + 1) % len(axes)]
            main = list(program.lowered.main)
            main[number] = replace(item, args=(item.args[0], other, *item.args[2:]))
            yield Fault(with_main(program, main), rules("collective"), item.outs)


def wrong_reduction(program: Program) -> Iterator[Fault]:
    """The largest in place of the sum, or the other way."""
    for name, number, node in sites(program):
        if node.op == "comm.all_reduce.default":
            other = () if node.kwargs else (("op", "max"),)
            wrong = replace(node, kwargs=other)
            yield Fault(replaced(program, name, number, wrong), rules("collective"), (node.outs[0],))


def wrong_dim(program: Program) -> Iterator[Fault]:
    """A gather, scatter or slice along another dim."""
    for name, number, node in sites(program):
        if node.op in ("comm.all_gather.default", "comm.reduce_scatter.default", "comm.slice.default"):
            type_ = node.types[0]
            assert type_ is not None
            if len(type_.shape) > 1:
                dim = (node.args[2] + 1) % len(type_.shape)
                wrong = replace(node, args=(*node.args[:2], dim))
                yield Fault(replaced(program, name, number, wrong), rules("collective"), (node.outs[0],))


def wrong_collective(program: Program) -> Iterator[Fault]:
    """A slice in place of a gather, an all-reduce in place of a reduce-scatter."""
    swap = {
        "comm.all_gather.default": "comm.slice.default",
        "comm.slice.default": "comm.all_gather.default",
        "comm.reduce_scatter.default": "comm.slice.default",
    }
    for name, number, node in sites(program):
        if node.op in swap:
            wrong = replace(node, op=swap[node.op])
            yield Fault(replaced(program, name, number, wrong), rules("collective"), (node.outs[0],))


def swapped_bucket(program: Program) -> Iterator[Fault]:
    """Two values of one message change places."""
    for number, item in enumerate(program.lowered.main):
        if isinstance(item, Node) and item.op.endswith("_bucket.default"):
            for a, b in _alike(item):
                outs = list(item.outs)
                outs[a], outs[b] = outs[b], outs[a]
                main = list(program.lowered.main)
                main[number] = replace(item, outs=tuple(outs))
                near = (item.outs[a], item.outs[b])
                yield Fault(with_main(program, main), rules("gradient", "collective", "interface"), near)
                break
    for name, number, node in sites(program):
        if node.op.endswith("_bucket.default"):
            for a, b in _alike(node):
                outs = list(node.outs)
                outs[a], outs[b] = outs[b], outs[a]
                made = replaced(program, name, number, replace(node, outs=tuple(outs)))
                # told where it is first used, or where it ends
                yield Fault(made, rules("gradient", "collective", "function"), ())
                break


def _alike(node: Node) -> Iterator[tuple[int, int]]:
    for a in range(len(node.outs)):
        for b in range(a + 1, len(node.outs)):
            if node.types[a] == node.types[b]:
                yield a, b


# -- placements and local arguments -----------------------------------------------------------------


def off_by_one_size(program: Program) -> Iterator[Fault]:
    """A local size is one more than what the rank holds."""
    for name, number, node in sites(program):
        if node.op in ("aten.reshape.default", "aten.expand.default", "aten.full.default"):
            place = 0 if node.op == "aten.full.default" else 1
            shape = list(node.args[place])
            for dim, size in enumerate(shape):
                if isinstance(size, LocalSize):
                    shape[dim] = replace(size, size=size.size + 1)
                elif isinstance(size, int) and size > 1:
                    shape[dim] = size + 1
                else:
                    continue
                args = list(node.args)
                args[place] = tuple(shape)
                wrong = replace(node, args=tuple(args))
                yield Fault(
                    replaced(program, name, number, wrong), rules("arguments", "function"), (node.outs[0],)
                )
                break


def off_by_one_offset(program: Program) -> Iterator[Fault]:
    """A rank believes its shard to begin where that of a dim one longer would."""
    yield from _offsets(program, lambda offset: replace(offset, size=offset.size + 1))


def no_offset(program: Program) -> Iterator[Fault]:
    """Every rank believes its shard to begin at 0."""
    yield from _offsets(program, lambda offset: 0)


def _offsets(program: Program, change: Callable[[LocalOffset], Any]) -> Iterator[Fault]:
    def changed(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(changed(a) for a in arg)
        return change(arg) if isinstance(arg, LocalOffset) else arg

    for name, number, node in sites(program):
        wrong = replace(node, args=changed(node.args))
        if wrong.args != node.args:
            yield Fault(
                replaced(program, name, number, wrong), rules("arguments", "function"), (node.outs[0],)
            )


def wrong_exchange(program: Program) -> Iterator[Fault]:
    """Rows go to the experts of another axis, or are counted for one expert more."""
    axes = [a.split("=")[0] for a in program.mesh.split(",")]
    for name, number, node in sites(program):
        if node.op in ("comm.expert_mm.default", "comm.expert_outer.default"):
            args = list(node.args)
            args[3] += 1
            yield Fault(
                replaced(program, name, number, replace(node, args=tuple(args))),
                rules("arguments", "function"),
                (node.outs[0],),
            )
            if len(axes) > 1:
                other = axes[(axes.index(node.args[1]) + 1) % len(axes)]
                wrong = replace(node, args=(node.args[0], other, *node.args[2:]))
                yield Fault(
                    replaced(program, name, number, wrong), rules("arguments", "function"), (node.outs[0],)
                )


def wrong_placement(program: Program) -> Iterator[Fault]:
    """A value is said to be whole, or split along another dim, than it is."""
    for name, _, node in sites(program):
        if node.op.startswith("comm.") or node.types[0] is None:
            continue
        segment, out = program.lowered.segments[name], node.outs[0]
        layout, shape = segment.layouts[out], node.types[0].shape
        for axis, placed in enumerate(layout):
            if isinstance(placed, Shard) and len(shape) > 1:
                other: Any = Shard((placed.dim + 1) % len(shape))
            elif isinstance(placed, Partial):
                other = R
            else:
                continue
            layouts = {**segment.layouts, out: (*layout[:axis], other, *layout[axis + 1 :])}
            made = with_nodes(program, name, pairs_of(program, name), layouts=layouts)
            yield Fault(made, rules("placement", "partial", "arguments"), (out,))
            break


def wrong_port(program: Program) -> Iterator[Fault]:
    """A parameter is handed out along another dim than the program takes it."""
    for port in program.signature.ports:
        if port.kind != "param":
            continue
        placed = program.lowered.values[port.name]
        for axis, p in enumerate(placed.layout):
            if isinstance(p, Shard) and len(placed.type.shape) > 1:
                other = Shard((p.dim + 1) % len(placed.type.shape))
                layout = (*placed.layout[:axis], other, *placed.layout[axis + 1 :])
                values = {**program.lowered.values, port.name: replace(placed, layout=layout)}
                made = replace(program, lowered=replace(program.lowered, values=values))
                yield Fault(
                    made, rules("interface", "gradient", "shards", "collective"), (port.name, port.target)
                )
                break


def uncovered_port(program: Program) -> Iterator[Fault]:
    """The last elements of a parameter are held by nobody: the split counts too few."""
    for port in program.signature.ports:
        placed = program.lowered.values[port.name]
        for axis, p in enumerate(placed.layout):
            size = placed.type.shape[p.dim] if isinstance(p, Shard) else 0
            if port.kind == "param" and isinstance(p, Shard) and size > 2:
                other = Shard(p.dim, 1, size)
                layout = (*placed.layout[:axis], other, *placed.layout[axis + 1 :])
                values = {**program.lowered.values, port.name: replace(placed, layout=layout)}
                made = replace(program, lowered=replace(program.lowered, values=values))
                yield Fault(made, rules("shards"), (port.name,))
                break


# -- function ---------------------------------------------------------------------------------------


def missing_scale(program: Program) -> Iterator[Fault]:
    """A factor is left out: ``x * 0.5`` becomes ``x``."""
    for name, number, node in sites(program):
        scales = node.op in ("aten.mul.Tensor", "aten.div.Tensor", "aten.mul.Scalar", "aten.div.Scalar")
        plain = len(node.args) == 2 and isinstance(node.args[0], Ref) and not isinstance(node.args[1], Ref)
        if scales and plain and floats(program, name).get(node.args[0].name) == node.types[0]:
            made = dropped(program, name, number, node.args[0].name)
            yield Fault(made, rules("function", "result", "gradient", "arguments"), ())


def wrong_constant(program: Program) -> Iterator[Fault]:
    """A number in an op is another."""
    for name, number, node in sites(program):
        for place, arg in enumerate(node.args):
            if isinstance(arg, float) and not node.op.startswith("comm."):
                args = list(node.args)
                args[place] = arg * 1.5 + 1.0
                wrong = replace(node, args=tuple(args))
                yield Fault(
                    replaced(program, name, number, wrong), rules("function", "arguments"), (node.outs[0],)
                )
                break


def wrong_op(program: Program) -> Iterator[Fault]:
    """Another op of the same form."""
    swap = {"aten.mul.Tensor": "aten.add.Tensor", "aten.sub.Tensor": "aten.add.Tensor"}
    for name, number, node in sites(program):
        if node.op in swap:
            wrong = replace(node, op=swap[node.op])
            yield Fault(
                replaced(program, name, number, wrong),
                rules("function", "placement", "partial", "arguments", "result", "gradient"),
                (),
            )


def swapped_operands(program: Program) -> Iterator[Fault]:
    """The two factors of a product, or what is subtracted, change places."""
    ordered = ("aten.mm.default", "aten.bmm.default", "aten.sub.Tensor")
    for name, number, node in sites(program):
        if node.op in ordered and len(node.args) == 2 and node.args[0] != node.args[1]:
            if not all(isinstance(a, Ref) for a in node.args):
                continue
            wrong = replace(node, args=(node.args[1], node.args[0]))
            yield Fault(replaced(program, name, number, wrong), rules("function"), (node.outs[0],))


def wrong_argument(program: Program) -> Iterator[Fault]:
    """A layer is called with the parameter of another, or with its own parameters in another order."""
    for number, item in enumerate(program.lowered.main):
        if not isinstance(item, Call):
            continue
        values, args = program.lowered.values, list(item.args)
        graph = program.lowered.segments[item.segment].graph
        needed = {r for n in graph.nodes for r in refs_of(n)}
        for a in range(len(args)):
            inner = graph.inputs[a][0]
            other = next(
                (n for n in values if n != args[a] and n.startswith("p_") and values[n] == values[args[a]]),
                None,
            )
            if args[a].startswith("p_") and other is not None and inner in needed:
                args[a] = other
                main = list(program.lowered.main)
                main[number] = replace(item, args=tuple(args))
                yield Fault(with_main(program, main), rules("function", "result", "gradient", "step"), ())
                break


def stale_gather(program: Program) -> Iterator[Fault]:
    """A layer uses the gathered copy of another layer's parameter, left from before."""
    gathered = _gathered_copies(program)
    for number, item in enumerate(program.lowered.main):
        if not isinstance(item, Call):
            continue
        for a, value in enumerate(item.args):
            if value not in gathered:
                continue
            other = next(
                (
                    g
                    for g in gathered
                    if gathered[g] != gathered[value]
                    and program.lowered.values[g] == program.lowered.values[value]
                ),
                None,
            )
            if other is not None and _made_before(program, other, number):
                args = list(item.args)
                args[a] = other
                main = list(program.lowered.main)
                main[number] = replace(item, args=tuple(args))
                yield Fault(with_main(program, main), rules("function", "gradient"), ())
                break


def _gathered_copies(program: Program) -> dict[str, str]:
    """Main value that is a gathered parameter -> the parameter."""
    found: dict[str, str] = {}
    for item in program.lowered.main:
        if isinstance(item, Node):
            if item.op.startswith("comm.all_gather"):
                found.update(
                    {o: r for o, r in zip(item.outs, refs_of(item), strict=True) if r.startswith("p_")}
                )
            continue
        graph = program.lowered.segments[item.segment].graph
        given = {inner: arg for (inner, _), arg in zip(graph.inputs, item.args, strict=True)}
        for node in graph.nodes:
            if node.op.startswith("comm.all_gather"):
                for out, ref in zip(node.outs, refs_of(node), strict=True):
                    if given.get(ref, "").startswith("p_") and out in graph.outputs:
                        found[item.outs[graph.outputs.index(out)]] = given[ref]
    return found


def _made_before(program: Program, value: str, number: int) -> bool:
    """Whether the part of an instruction's stage has made a value by then."""
    part = next(p for p in program.lowered.parts if p.start <= number < p.stop)
    for other in program.lowered.parts:
        if other.stage == part.stage and other.start <= part.start:
            items = program.lowered.main[other.start : min(other.stop, number)]
            if any(value in i.outs for i in items):
                return True
    return False


def hoisted_activation(program: Program) -> Iterator[Fault]:
    """What depends on the microbatch is made once a step, with the gathered parameters."""
    gathers = {p.stage: p for p in program.lowered.parts if p.phase == "gather"}
    forward = {p.stage: p for p in program.lowered.parts if p.phase == "forward"}
    for stage, part in gathers.items():
        other = forward[stage]
        first = program.lowered.main[other.start] if other.stop > other.start else None
        ports = {p.name: p.kind for p in program.signature.ports}
        if first is None or stage != 0 or not isinstance(first, Call):
            continue
        if not any(ports.get(a) == "input" for a in first.args):
            continue
        main = list(program.lowered.main)
        del main[other.start]
        main.insert(part.stop, first)
        parts = [
            replace(p, stop=p.stop + 1)
            if p is part
            else replace(p, start=p.start + 1)
            if p is other
            else replace(p, start=p.start + 1, stop=p.stop + 1)
            if part.stop <= p.start < other.start
            else p
            for p in program.lowered.parts
        ]
        yield Fault(with_main(program, main, parts), rules("step"), first.outs)


def wrong_draw(program: Program) -> Iterator[Fault]:
    """Two layers draw the same random numbers."""
    for number, item in enumerate(program.lowered.main):
        if isinstance(item, Call) and item.site and _draws(program, item.segment):
            main = list(program.lowered.main)
            main[number] = replace(item, site=item.site - 1)
            yield Fault(with_main(program, main), rules("function"), (item.segment,))


def _draws(program: Program, segment: str) -> bool:
    """Whether anything in a segment depends on which call of it this is."""
    nodes = program.lowered.segments[segment].graph.nodes
    return any(isinstance(arg, CallSite) for node in nodes for arg in node.args)


def wrong_recompute(program: Program) -> Iterator[Fault]:
    """Backward computes something else again than forward did: it takes another value."""
    for number, item in enumerate(program.lowered.main):
        if isinstance(item, Call) and item.backward and "_again" in item.segment:
            values = program.lowered.values
            others = [
                v
                for v in values
                if v not in item.args
                and values[v] == values[item.args[0]]
                and _made_before(program, v, number)
            ]
            if others:
                main = list(program.lowered.main)
                main[number] = replace(item, args=(others[0], *item.args[1:]))
                yield Fault(with_main(program, main), rules("function"), ())


# -- results ----------------------------------------------------------------------------------------


def swapped_gradients(program: Program) -> Iterator[Fault]:
    """Two parameters get each other's gradient."""
    results = list(program.signature.results)
    grads = [k for k, r in enumerate(results) if r.kind == "grad"]
    for a, b in pairwise(grads):
        first, second = results[a], results[b]
        if program.lowered.values[first.value] == program.lowered.values[second.value]:
            swapped = list(results)
            swapped[a], swapped[b] = (
                replace(first, value=second.value),
                replace(second, value=first.value),
            )
            made = replace(program, signature=replace(program.signature, results=tuple(swapped)))
            yield Fault(made, rules("gradient"), (first.value, second.value))


def lost_term(program: Program) -> Iterator[Fault]:
    """A stage does not add its term to the gradient of a tied weight."""
    makers: dict[str, list[int]] = {}
    for number, item in enumerate(program.lowered.main):
        for out in item.outs:
            makers.setdefault(out, []).append(number)
    grads = {r.value for r in program.signature.results if r.kind == "grad"}
    for value in sorted(grads & {v for v, places in makers.items() if len(places) > 1}):
        number = makers[value][-1]
        item = program.lowered.main[number]
        if len(item.outs) == 1:
            yield Fault(without_item(program, number), rules("gradient", "result"), (value,))
        else:
            outs = tuple(f"{o}_lost" if o == value else o for o in item.outs)
            values = {**program.lowered.values, f"{value}_lost": program.lowered.values[value]}
            main = list(program.lowered.main)
            main[number] = replace(item, outs=outs)
            made = with_main(program, main)
            made = replace(made, lowered=replace(made.lowered, values=values))
            yield Fault(made, rules("gradient", "result", "function", "step"), (value,))


def lost_addend(program: Program) -> Iterator[Fault]:
    """A sum of two gradients is only the first."""
    for name, number, node in sites(program):
        plain = node.op == "aten.add.Tensor" and len(node.args) == 2 and not node.kwargs
        if plain and node.backward and all(isinstance(a, Ref) for a in node.args):
            first = node.args[0].name
            if floats(program, name).get(first) == node.types[0]:
                made = dropped(program, name, number, first)
                yield Fault(made, rules("function", "gradient", "interface", "placement"), ())


def nonlinear_reduce(program: Program) -> Iterator[Fault]:
    """Something that is not linear runs on gradients after they are summed over the microbatches."""
    for part in program.lowered.parts:
        if part.phase != "reduce" or part.stop == part.start or program.microbatches == 1:
            continue
        item = program.lowered.main[part.stop - 1]
        out = item.outs[-1]
        early = f"{out}_early"
        values = {**program.lowered.values, early: program.lowered.values[out]}
        placed = values[out]
        main = list(program.lowered.main)
        main[part.stop - 1] = replace(item, outs=(*item.outs[:-1], early))
        absolute = Node("aten.abs.default", (Ref(early),), (), (out,), (placed.type,), backward=True)
        main.insert(part.stop, absolute)
        parts = [
            replace(p, stop=p.stop + 1)
            if p is part
            else replace(p, start=p.start + 1, stop=p.stop + 1)
            if p.start >= part.stop
            else p
            for p in program.lowered.parts
        ]
        made = with_main(program, main, parts)
        made = replace(made, lowered=replace(made.lowered, values=values))
        yield Fault(made, rules("step", "function"), (out, early))


# -- pipelines --------------------------------------------------------------------------------------


def _moves(program: Program) -> Moves:
    return tuple(tuple(row) for row in moves_of(program))


def _changed(moves: Moves, rank: int, place: int, **changes: Any) -> Moves:
    rows = [list(row) for row in moves]
    rows[rank][place] = replace(rows[rank][place], **changes)
    return tuple(tuple(row) for row in rows)


def _with_messages(program: Program, side: str) -> Iterator[tuple[int, int, Move, tuple[Message, ...]]]:
    if program.stages is None:
        return
    for rank, row in enumerate(_moves(program)):
        for place, move in enumerate(row):
            messages = getattr(move, side)
            if messages:
                yield rank, place, move, messages


def drop_send(program: Program) -> Iterator[Fault]:
    """A value is not sent."""
    for rank, place, move, messages in _with_messages(program, "sends"):
        made = _changed(_moves(program), rank, place, sends=messages[1:])
        yield Fault(program, rules("message"), (messages[0].value, str(move.action)), made)


def missing_wait(program: Program) -> Iterator[Fault]:
    """An action does not wait for a value to arrive."""
    for rank, place, move, messages in _with_messages(program, "receives"):
        made = _changed(_moves(program), rank, place, receives=messages[1:])
        yield Fault(program, rules("message"), (messages[0].value, str(move.action)), made)


def double_send(program: Program) -> Iterator[Fault]:
    """A value is sent twice."""
    for rank, place, _move, messages in _with_messages(program, "sends"):
        made = _changed(_moves(program), rank, place, sends=(messages[0], *messages))
        yield Fault(program, rules("message"), tuple(m.value for m in messages), made)


def swapped_sends(program: Program) -> Iterator[Fault]:
    """Two values change places on their way: sent in another order than they are received."""
    rows = _moves(program)
    for rank, row in enumerate(rows if program.stages is not None else ()):
        places = [k for k, move in enumerate(row) if move.sends]
        for a, b in pairwise(places):
            first, second = row[a].sends, row[b].sends
            if first[0].receiver == second[0].receiver:
                made = _changed(rows, rank, a, sends=(second[0], *first[1:]))
                made = _changed(made, rank, b, sends=(first[0], *second[1:]))
                yield Fault(program, rules("message"), (first[0].value, second[0].value), made)


def wrong_receiver(program: Program) -> Iterator[Fault]:
    """A value goes to another rank, or to itself."""
    for rank, place, _move, messages in _with_messages(program, "sends"):
        other = replace(messages[0], receiver=rank)
        made = _changed(_moves(program), rank, place, sends=(other, *messages[1:]))
        yield Fault(program, rules("message"), (messages[0].value,), made)


def wrong_microbatch(program: Program) -> Iterator[Fault]:
    """A value is taken for that of another microbatch."""
    for rank, place, move, messages in _with_messages(program, "receives"):
        other = replace(messages[0], microbatch=(messages[0].microbatch + 1) % program.microbatches)
        made = _changed(_moves(program), rank, place, receives=(other, *messages[1:]))
        yield Fault(program, rules("message"), (messages[0].value, str(move.action)), made)


def late_send(program: Program) -> Iterator[Fault]:
    """A rank sends only after an action that waits for the answer: ranks wait for each other."""
    rows = _moves(program)
    for rank, place, move, messages in _with_messages(program, "sends"):
        for later in range(place + 1, len(rows[rank])):
            follower = rows[rank][later]
            back = follower.action.microbatch == move.action.microbatch and follower.action.kind in "BI"
            if back and move.action.kind == "F" and follower.receives:
                made = _changed(rows, rank, place, sends=())
                made = _changed(made, rank, later, sends=(*follower.sends, *messages))
                yield Fault(
                    program, rules("message"), (*(m.value for m in messages), str(follower.action)), made
                )
                break


def drop_action(program: Program) -> Iterator[Fault]:
    """A rank leaves an action out."""
    if program.stages is None:
        return
    actions = program.stages.schedule.actions
    for rank, row in enumerate(actions):
        for place in range(len(row)):
            rest = (*actions[:rank], (*row[:place], *row[place + 1 :]), *actions[rank + 1 :])
            made = with_schedule(program, actions=rest)
            yield Fault(made, rules("schedule"), (str(row[place]), *map(str, row[place + 1 :])))


def swapped_microbatches(program: Program) -> Iterator[Fault]:
    """A rank takes two microbatches in another order than the others."""
    if program.stages is None:
        return
    actions = program.stages.schedule.actions
    for rank, row in enumerate(actions):
        forward = [k for k, a in enumerate(row) if a.kind == "F" and a.stage == row[0].stage]
        for a, b in pairwise(forward):
            other = list(row)
            other[a], other[b] = other[b], other[a]
            rest = (*actions[:rank], tuple(other), *actions[rank + 1 :])
            yield Fault(with_schedule(program, actions=rest), rules("schedule"), (str(row[a]), str(row[b])))


def backward_first(program: Program) -> Iterator[Fault]:
    """A rank begins with a backward that waits for its own forward: it never starts."""
    if program.stages is None:
        return
    actions = program.stages.schedule.actions
    for rank, row in enumerate(actions):
        place = next(k for k, a in enumerate(row) if a.kind in "BI")
        other = (row[place], *row[:place], *row[place + 1 :])
        rest = (*actions[:rank], other, *actions[rank + 1 :])
        yield Fault(with_schedule(program, actions=rest), rules("schedule"), (str(row[place]),))


def wrong_owner(program: Program) -> Iterator[Fault]:
    """A stage is said to be on another rank than its actions."""
    if program.stages is None:
        return
    owner = program.stages.schedule.owner
    for stage in range(len(owner)):
        other = (*owner[:stage], (owner[stage] + 1) % program.stages.schedule.ranks, *owner[stage + 1 :])
        yield Fault(with_schedule(program, owner=other), rules("schedule"), (f"{stage}.",))


def doubled_action(program: Program) -> Iterator[Fault]:
    """A microbatch is computed twice, so that its gradients count twice."""
    if program.stages is None:
        return
    actions: tuple[tuple[Action, ...], ...] = program.stages.schedule.actions
    for rank, row in enumerate(actions):
        for place, action in enumerate(row):
            rest = (*actions[:rank], (*row[: place + 1], action, *row[place + 1 :]), *actions[rank + 1 :])
            yield Fault(with_schedule(program, actions=rest), rules("schedule"), (str(action),))


def wrong_slice(program: Program) -> Iterator[Fault]:
    """A slice of the sequence begins one position later."""
    for name, number, node in sites(program):
        cuts = node.op == "aten.slice.Tensor" and len(node.args) == 4 and node.outs[0].rstrip("0123456789")
        if cuts and str(cuts).endswith("_s") and "_d" in node.outs[0]:
            start, stop = node.args[2:]
            wrong = replace(node, args=(*node.args[:2], start + 1, stop + 1))
            yield Fault(
                replaced(program, name, number, wrong), rules("function", "arguments"), (node.outs[0],)
            )


def swapped_slices(program: Program) -> Iterator[Fault]:
    """Slices are joined in another order."""
    for name, number, node in sites(program):
        if node.op == "aten.cat.default" and "_to" in node.outs[0]:
            wrong = replace(node, args=(node.args[0][::-1], *node.args[1:]))
            made = replaced(program, name, number, wrong)
            yield Fault(made, rules("function"), (node.outs[0], "sdpa"))


def later_keys(program: Program) -> Iterator[Fault]:
    """The queries of a slice see the keys of their own slice only."""
    for name, number, node in sites(program):
        if node.op == "aten.cat.default" and "_to" in node.outs[0]:
            args = (node.args[0][-1:], *node.args[1:])
            type_ = node.types[0]
            assert type_ is not None
            shape = list(type_.shape)
            shape[2] //= len(node.args[0])
            short = TensorType(tuple(shape), type_.dtype)
            wrong = replace(node, args=args, types=(short,))
            yield Fault(replaced(program, name, number, wrong), rules("function"), ())


def lost_share(program: Program) -> Iterator[Fault]:
    """A slice does not add its share to the gradient of a parameter."""
    makers: dict[tuple[int, str], list[int]] = {}
    for part in program.lowered.parts:
        for number in range(part.start, part.stop):
            for out in program.lowered.main[number].outs:
                if part.phase == "backward":
                    makers.setdefault((part.stage, out), []).append(number)
    for (_, value), places in makers.items():
        item = program.lowered.main[places[-1]]
        if len(places) > 1:
            outs = tuple(f"{o}_lost" if o == value else o for o in item.outs)
            values = {**program.lowered.values, f"{value}_lost": program.lowered.values[value]}
            main = list(program.lowered.main)
            main[places[-1]] = replace(item, outs=outs)
            made = with_main(program, main)
            made = replace(made, lowered=replace(made.lowered, values=values))
            yield Fault(
                made, rules("gradient", "function", "result"), (value, value.removesuffix("_partial"))
            )


def too_small(program: Program) -> Iterator[Fault]:
    """The device has less memory than the fullest rank holds."""
    yield Fault(program, rules("memory"), (), memory=True)


@dataclass(frozen=True)
class Kind:
    """One kind of fault. on: the programs (by name) that it can be put into."""

    mutate: Mutation
    on: tuple[str, ...]
    name: str = field(default="")

    @property
    def told(self) -> str:
        """What it does, in words."""
        return (self.mutate.__doc__ or "").split("\n")[0].rstrip(".")


_TEXT = ("flat", "odd", "experts", "pipeline", "again", "sliced")
_PIPES = ("pipeline", "bubble", "tied")
KINDS: dict[str, Kind] = {
    "drop a collective": Kind(drop_collective, _TEXT),
    "duplicate a collective": Kind(duplicate_collective, _TEXT),
    "collective after its use": Kind(late_collective, _TEXT),
    "wrong axis (group)": Kind(wrong_axis, ("flat", "experts", "pipeline")),
    "wrong reduction": Kind(wrong_reduction, _TEXT),
    "wrong dim": Kind(wrong_dim, _TEXT),
    "wrong collective": Kind(wrong_collective, _TEXT),
    "swapped values of a message": Kind(swapped_bucket, ("flat", "experts", "pipeline")),
    "off-by-one local size": Kind(off_by_one_size, _TEXT),
    "off-by-one offset": Kind(off_by_one_offset, ("vocabulary", "dropout")),
    "missing offset": Kind(no_offset, ("vocabulary", "dropout")),
    "wrong exchange of rows": Kind(wrong_exchange, ("exchange",)),
    "wrong placement": Kind(wrong_placement, _TEXT),
    "parameter along another dim": Kind(wrong_port, _TEXT),
    "parameter not covered": Kind(uncovered_port, _TEXT),
    "missing scale": Kind(missing_scale, _TEXT),
    "wrong constant": Kind(wrong_constant, _TEXT),
    "wrong op": Kind(wrong_op, _TEXT),
    "swapped operands": Kind(swapped_operands, _TEXT),
    "another layer's parameter": Kind(wrong_argument, _TEXT),
    "stale gathered parameter": Kind(stale_gather, ("kept", "pipeline")),
    "activation made once a step": Kind(hoisted_activation, ("pipeline",)),
    "same random numbers twice": Kind(wrong_draw, ("dropout",)),
    "wrong recomputation": Kind(wrong_recompute, ("again",)),
    "swapped gradients": Kind(swapped_gradients, _TEXT),
    "tied weight not added up": Kind(lost_term, ("tied",)),
    "lost addend": Kind(lost_addend, _TEXT),
    "nonlinear after the sum": Kind(nonlinear_reduce, ("pipeline", "tied")),
    "missing send": Kind(drop_send, _PIPES),
    "missing wait": Kind(missing_wait, _PIPES),
    "value sent twice": Kind(double_send, _PIPES),
    "swapped sends": Kind(swapped_sends, _PIPES),
    "wrong receiver": Kind(wrong_receiver, _PIPES),
    "wrong microbatch": Kind(wrong_microbatch, _PIPES),
    "circular wait": Kind(late_send, _PIPES),
    "missing action": Kind(drop_action, _PIPES),
    "microbatches out of order": Kind(swapped_microbatches, _PIPES),
    "backward before forward": Kind(backward_first, _PIPES),
    "stage on another rank": Kind(wrong_owner, _PIPES),
    "microbatch counted twice": Kind(doubled_action, _PIPES),
    "slice at another place": Kind(wrong_slice, ("sliced", "masked")),
    "slices in another order": Kind(swapped_slices, ("sliced", "masked")),
    "keys of earlier slices left out": Kind(later_keys, ("sliced", "masked")),
    "share of a slice left out": Kind(lost_share, ("sliced", "masked")),
    "too little memory": Kind(too_small, ("flat", "pipeline")),
}


def some(kind: Kind, program: Program, most: int, seed: int = 0) -> list[Fault]:
    """At most so many faults of a kind in a program, spread over the places where it can be."""
    found = list(kind.mutate(program))
    return found if len(found) <= most else random.Random(seed).sample(found, most)


def lowered_of(program: Program) -> Lowered:
    return program.lowered
