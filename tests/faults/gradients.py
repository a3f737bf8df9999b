"""Gradients that are mixed up, or not added up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from autoshard.ir import Node, Ref
from autoshard.program.program import Program
from faults.edits import (
    dropped,
    floats,
    sites,
    with_main,
    without_item,
)
from faults.fault import TEXT, Fault, Kind, rules


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
            made = with_main(program, main, values=values)
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
        made = with_main(program, main, parts, values)
        yield Fault(made, rules("step", "function"), (out, early))


KINDS: dict[str, Kind] = {
    "swapped gradients": Kind(swapped_gradients, TEXT),
    "tied weight not added up": Kind(lost_term, ("tied",)),
    "lost addend": Kind(lost_addend, TEXT),
    "nonlinear after the sum": Kind(nonlinear_reduce, ("pipeline", "tied")),
}
