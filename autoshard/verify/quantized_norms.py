"""Wires that norms give: each is that of rows of known placement, and only its gathers read it.

A gather of a wire is proved as the quantised gather of the rows, which have no name in the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autoshard.ir import Graph, Node, Ref, TensorType, refs_of
from autoshard.ir.collectives import ALL_GATHER_Q, ALL_GATHER_WIRE
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.quantized import WIRE_BITS, wire_gather
from autoshard.rules.local import MeshShape
from autoshard.rules.quantized_gather import NORMS, rows_of_rank, wire_of


@dataclass(frozen=True)
class QuantizedRows:
    """The wires of a graph. made: wire -> (the rows that are in it, elements that share a scale)."""

    made: Mapping[str, tuple[PlacedValue, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, values: Mapping[str, PlacedValue]) -> QuantizedRows:
        """Those that norms of the graph say that they make. values: of the graph."""
        new: dict[str, tuple[PlacedValue, int]] = {}
        for node in graph.nodes:
            if node.op in NORMS and len(node.args) == NORMS[node.op][1] + 1 and isinstance(node.args[0], Ref):
                place, last = NORMS[node.op]
                if len(node.outs) > place and type(node.args[last]) is int:
                    new[node.outs[place]] = values[node.args[0].name], node.args[last]
        return cls(new)

    def broken(
        self, node: Node, values: Mapping[str, PlacedValue], mesh: MeshShape
    ) -> Iterator[tuple[str, str]]:
        """(value, why) of what is wrong with an op that makes a wire, or that reads one and is no gather."""
        if node.op != ALL_GATHER_WIRE.op:
            for name in dict.fromkeys(refs_of(node)):
                if name in self.made:
                    yield node.outs[0], f"{name} is a wire, which only a gather of wires can read"
        if node.op not in NORMS:
            return
        wire = next((o for o in node.outs if o in self.made), None)
        if wire is None:
            yield node.outs[0], "its arguments are not those of a norm that gives a wire"
            return
        rows, group = self.made[wire]
        wanted = wire_of(rows, group, mesh)
        if wanted is None:
            yield wire, f"{rows.type} does not lie in whole rows of groups of {group}, as many on every rank"
        elif wanted != values[wire]:
            result = values[wire].type
            yield wire, f"the wire of {rows.type} is {wanted.type}, split as its rows are; it is {result}"

    def gather_of_rows(
        self, node: Node, values: Mapping[str, PlacedValue], mesh: MeshShape
    ) -> tuple[Node, dict[str, PlacedValue]] | str:
        """(the quantised gather of the rows that a gather of their wire is, all values around it), or what is
        wrong with its text. The rows have a name that no program can have."""
        said = wire_gather(node)
        if said is None:
            return "its arguments are not those of such a gather"
        if said.wire not in self.made:
            return f"no norm before it makes the wire {said.wire}"
        rows, group = self.made[said.wire]
        out = values[node.outs[0]].type
        shape = rows_of_rank(rows, mesh)
        if (said.group, said.shape, said.dtype) != (group, shape, out.dtype):
            result = f"{said.dtype}{list(said.shape)} in groups of {said.group}"
            return f"it reads a wire of {out.dtype}{list(shape or ())} in groups of {group} as {result}"
        name = f"{said.wire}.rows"
        args = ((Ref(name),), node.args[1], (said.where,), (WIRE_BITS,), group)
        placed = PlacedValue(TensorType(rows.type.shape, out.dtype), rows.layout)
        new = Node(ALL_GATHER_Q.op, args, (), node.outs, node.types, node.origin, node.backward)
        return new, {**values, name: placed}
