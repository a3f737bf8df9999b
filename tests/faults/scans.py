"""Loops that run once less, read other slices, or carry another value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.ir import Node
from autoshard.ir.scans import SCAN, Scan, StepSlice, scan_of
from autoshard.program.program import Program
from faults.edits import replaced, sites
from faults.fault import Fault, Kind, rules

LOOPS = ("loop",)
_SAID = rules("function", "arguments")


def _scans(program: Program) -> Iterator[tuple[str, int, Node, Scan]]:
    for name, number, node in sites(program):
        if node.op == SCAN:
            yield name, number, node, scan_of(node)


def _fault(program: Program, name: str, number: int, node: Node, scan: Scan) -> Fault:
    wrong = replace(node, args=scan.args(node.args[0]))
    return Fault(replaced(program, name, number, wrong), _SAID, (node.outs[0],))


def fewer_steps(program: Program) -> Iterator[Fault]:
    """A loop ends a step too early."""
    for name, number, node, scan in _scans(program):
        yield _fault(program, name, number, node, replace(scan, steps=scan.steps - 1))


def other_way(program: Program) -> Iterator[Fault]:
    """An input is read from its other end."""
    for name, number, node, scan in _scans(program):
        for k, how in enumerate(scan.given):
            if isinstance(how, StepSlice):
                back = replace(how, first=how.at(scan.steps - 1), stride=-how.stride)
                given = (*scan.given[:k], back, *scan.given[k + 1 :])
                yield _fault(program, name, number, node, replace(scan, given=given))


def forgotten(program: Program) -> Iterator[Fault]:
    """Every step begins as the first one does: nothing is carried."""
    for name, number, node, scan in _scans(program):
        for out, into in scan.carried:
            outputs = tuple(into if o == out else o for o in scan.body.outputs)
            body = replace(scan.body, outputs=outputs)
            yield _fault(program, name, number, node, replace(scan, body=body))


def other_op(program: Program) -> Iterator[Fault]:
    """A step applies another function."""
    for name, number, node, scan in _scans(program):
        for k, inner in enumerate(scan.body.nodes):
            if inner.op == "aten.mul.Tensor":
                wrong = replace(inner, op="aten.add.Tensor")
                nodes = (*scan.body.nodes[:k], wrong, *scan.body.nodes[k + 1 :])
                body = replace(scan.body, nodes=nodes)
                yield _fault(program, name, number, node, replace(scan, body=body))


KINDS: dict[str, Kind] = {
    "a loop with a step less": Kind(fewer_steps, LOOPS),
    "a loop that reads backwards": Kind(other_way, LOOPS),
    "a loop that carries nothing": Kind(forgotten, LOOPS),
    "a loop with another op": Kind(other_op, LOOPS),
}
