"""Bodies that run in tiles, cut otherwise than their rows lie, or with another op inside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.ir import Node
from autoshard.ir.row_tiles import OTHER, TILES, RowTiles, tiles_of
from autoshard.program.program import Program
from faults.edits import replaced, sites
from faults.fault import Fault, Kind, rules

TILED = ("tiles",)
_SAID = rules("function", "arguments")


def _bodies(program: Program) -> Iterator[tuple[str, int, Node, RowTiles]]:
    for name, number, node in sites(program):
        if node.op == TILES:
            yield name, number, node, tiles_of(node)


def _fault(program: Program, name: str, number: int, node: Node, tiles: RowTiles) -> Fault:
    wrong = replace(node, args=tiles.args(node.args[0]))
    return Fault(replaced(program, name, number, wrong), _SAID, (node.outs[0],))


def full_input(program: Program) -> Iterator[Fault]:
    """Every tile takes all rows of an input, instead of its own."""
    for name, number, node, tiles in _bodies(program):
        for value, _ in tiles.body.inputs:
            if tiles.kinds[value].strip(OTHER):
                kinds = {**tiles.kinds, value: OTHER * len(tiles.kinds[value])}
                yield _fault(program, name, number, node, replace(tiles, kinds=kinds))


def summed_rows(program: Program) -> Iterator[Fault]:
    """What tiles make of their rows is added up, instead of put side by side."""
    for name, number, node, tiles in _bodies(program):
        for value in tiles.body.outputs:
            if tiles.kinds[value].strip(OTHER):
                kinds = {**tiles.kinds, value: OTHER * len(tiles.kinds[value])}
                yield _fault(program, name, number, node, replace(tiles, kinds=kinds))


def other_op(program: Program) -> Iterator[Fault]:
    """A body applies another function."""
    for name, number, node, tiles in _bodies(program):
        for k, inner in enumerate(tiles.body.nodes):
            if inner.op in ("aten.silu.default", "aten.mul.Tensor"):
                op = "aten.relu.default" if inner.op == "aten.silu.default" else "aten.add.Tensor"
                nodes = (*tiles.body.nodes[:k], replace(inner, op=op), *tiles.body.nodes[k + 1 :])
                yield _fault(
                    program, name, number, node, replace(tiles, body=replace(tiles.body, nodes=nodes))
                )


def swapped_inputs(program: Program) -> Iterator[Fault]:
    """A body is given two inputs of one type in each other's place."""
    for name, number, node, tiles in _bodies(program):
        given, types = list(node.args[0]), [t for _, t in tiles.body.inputs]
        for a in range(len(given)):
            for b in range(a + 1, len(given)):
                if types[a] == types[b] and given[a] != given[b]:
                    order = [*given]
                    order[a], order[b] = order[b], order[a]
                    wrong = replace(node, args=(tuple(order), *node.args[1:]))
                    yield Fault(replaced(program, name, number, wrong), _SAID, (node.outs[0],))


KINDS: dict[str, Kind] = {
    "tiles that take all rows": Kind(full_input, TILED),
    "tiles whose rows are added up": Kind(summed_rows, TILED),
    "tiles with another op": Kind(other_op, TILED),
    "tiles with inputs exchanged": Kind(swapped_inputs, TILED),
}
