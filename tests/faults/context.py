"""A divided sequence whose parts are worked on, cut or joined as if they were others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.ir import Arg, Node
from autoshard.program.program import Program
from faults.edits import replaced, sites
from faults.fault import Fault, Kind, rules

#: a program with a sequence in a zigzag
CONTEXT = ("context",)
_SAID = rules("function", "arguments", "collective", "placement")


def _rows(program: Program) -> Iterator[tuple[str, int, Node]]:
    return (site for site in sites(program) if site[2].op.startswith("autoshard.sdpa_rows"))


def _last(node: Node, start: Arg, zigzag: bool) -> Node:
    return replace(node, args=(*node.args[:-2], start, zigzag))


def wrong_rows(program: Program) -> Iterator[Fault]:
    """Attention takes its rows for the first of the sequence: a wrong mask."""
    for name, number, node in _rows(program):
        wrong = _last(node, 0, True)
        yield Fault(replaced(program, name, number, wrong), _SAID, (node.outs[0],))


def no_zigzag(program: Program) -> Iterator[Fault]:
    """Attention takes its rows for positions that follow each other: balance without its mask."""
    for name, number, node in _rows(program):
        wrong = _last(node, node.args[-2], False)
        yield Fault(replaced(program, name, number, wrong), _SAID, (node.outs[0],))


def unordered_keys(program: Program) -> Iterator[Fault]:
    """Parts of a sequence are cut or joined in the order of the ranks: keys and positions are in the wrong
    place."""
    for name, number, node in sites(program):
        if node.op.startswith("comm.") and isinstance(node.kwarg("outer", 1), int):
            outer = node.kwarg("outer", 1)
            if outer < 0:
                kwargs = tuple((k, -outer if k == "outer" else v) for k, v in node.kwargs)
                wrong = replace(node, kwargs=kwargs)
                yield Fault(replaced(program, name, number, wrong), _SAID, (node.outs[0],))


KINDS: dict[str, Kind] = {
    "rows of another rank": Kind(wrong_rows, CONTEXT),
    "rows without a zigzag": Kind(no_zigzag, CONTEXT),
    "sequence in the order of ranks": Kind(unordered_keys, CONTEXT),
}
