"""Which of the user's modules the ops of a program belong to, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from autoshard.ir import Call, Node
from autoshard.ir.collectives import COLLECTIVES, axes_of, is_message
from autoshard.ir.lowered import Instruction
from autoshard.program.layers import relabelled
from autoshard.program.program import NodeNote, Program


class OpPlace(NamedTuple):
    """An op. module: of the user's, "" for the model itself. source: the user's line, "" where unknown.

    range: what a profiler calls it: its module; of a collective also the kind and the axis.
    """

    op: str
    module: str
    source: str
    backward: bool
    range: str

    def __str__(self) -> str:
        """``aten.mm.default of layers.3.mlp.up_proj, backward``"""
        return f"{self.op} of {self.module or 'the model'}{', backward' if self.backward else ''}"


class OpPlaces:
    """Those of a program; found when they are first asked for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._known: dict[tuple[str, str], Sequence[OpPlace]] = {}

    def of(self, item: Instruction) -> Sequence[OpPlace]:
        """Of the ops of a call, or of a single one."""
        if isinstance(item, Node):
            return (self._place(item, NodeNote(item.origin.fqn, item.origin.source), ""),)
        key = item.segment, item.label
        if key not in self._known:
            nodes, notes = self.program.lowered.segments[item.segment].graph.nodes, self.program.notes
            pairs = zip(nodes, notes[item.segment], strict=True)
            self._known[key] = [self._place(node, note, item.label) for node, note in pairs]
        return self._known[key]

    @cached_property
    def values(self) -> dict[str, OpPlace]:
        """What makes the values of main."""
        result: dict[str, OpPlace] = {}
        for item in self.program.lowered.main:
            graph = self.program.lowered.segments[item.segment].graph if isinstance(item, Call) else None
            nodes, ends = (graph.nodes, graph.outputs) if graph is not None else ((item,), item.outs)
            makers = {o: place for node, place in zip(nodes, self.of(item), strict=True) for o in node.outs}
            result |= {o: makers[end] for o, end in zip(item.outs, ends, strict=True) if end in makers}
        return result

    @cached_property
    def _labels(self) -> frozenset[str]:
        return frozenset(i.label for i in self.program.lowered.main if isinstance(i, Call) and i.label)

    def _place(self, node: Node, note: NodeNote, label: str) -> OpPlace:
        module, text = relabelled(note.fqn, label, self._labels), ""
        of = module
        if is_message(node):
            spec = COLLECTIVES[node.op]
            text = f"{spec.kind.replace('_', '-')} {'+'.join(axes_of(node))} "
            of = (label if spec.bucket else "") or module or label
            results = self.program.signature.results
            gradients = [r.target for r in results if r.kind == "grad" and r.value in node.outs]
            if gradients and not of:
                more = f" and {len(gradients) - 1} more" if gradients[1:] else ""
                return OpPlace(node.op, "", "", True, f"{text}gradient of {gradients[0]}{more}")
        text += f"{of or '(root)'}{' backward' if node.backward else ''}"
        return OpPlace(node.op, module, note.source, node.backward, text)
