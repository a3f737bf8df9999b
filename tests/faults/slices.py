"""Slices of the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.ir import TensorType
from autoshard.program.program import Program
from faults.edits import (
    replaced,
    sites,
    with_main,
)
from faults.fault import Fault, Kind, rules


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
            made = with_main(program, main, values=values)
            yield Fault(
                made, rules("gradient", "function", "result"), (value, value.removesuffix("_partial"))
            )


KINDS: dict[str, Kind] = {
    "slice at another place": Kind(wrong_slice, ("sliced", "masked")),
    "slices in another order": Kind(swapped_slices, ("sliced", "masked")),
    "keys of earlier slices left out": Kind(later_keys, ("sliced", "masked")),
    "share of a slice left out": Kind(lost_share, ("sliced", "masked")),
}
