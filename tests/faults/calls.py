"""Calls of layers with other values than their own, or at another time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.ir import Call, CallSite, Node, refs_of
from autoshard.program.program import Program
from faults.edits import (
    with_main,
)
from faults.fault import TEXT, Fault, Kind, rules


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
        if isinstance(item, Call) and item.backward and item.segment.endswith("_recompute"):
            values = program.lowered.values
            others = [
                v
                for v in values
                if v not in item.args
                and values[v] == values[item.args[-1]]
                and _made_before(program, v, number)
            ]
            if others:
                main = list(program.lowered.main)
                main[number] = replace(item, args=(*item.args[:-1], others[0]))
                yield Fault(with_main(program, main), rules("function"), ())


KINDS: dict[str, Kind] = {
    "another layer's parameter": Kind(wrong_argument, TEXT),
    "stale gathered parameter": Kind(stale_gather, ("kept", "pipeline")),
    "activation made once a step": Kind(hoisted_activation, ("pipeline",)),
    "same random numbers twice": Kind(wrong_draw, ("dropout",)),
    "wrong recomputation": Kind(wrong_recompute, ("again",)),
}
