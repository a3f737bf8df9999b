"""Ops that compute something else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.ir import Ref
from autoshard.program.program import Program
from faults.edits import (
    dropped,
    floats,
    replaced,
    sites,
)
from faults.fault import TEXT, Fault, Kind, rules


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


KINDS: dict[str, Kind] = {
    "missing scale": Kind(missing_scale, TEXT),
    "wrong constant": Kind(wrong_constant, TEXT),
    "wrong op": Kind(wrong_op, TEXT),
    "swapped operands": Kind(swapped_operands, TEXT),
}
