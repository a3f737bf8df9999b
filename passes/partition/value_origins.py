"""Which values of a program are the same tensor, placed in whatever way, across calls and collectives."""

from __future__ import annotations

from typing import TypeAlias

from autoshard.ir import Call, Graph, Node
from autoshard.ir.collectives import exact_transfer, is_ring, moved_by
from autoshard.ir.lowered import Lowered
from autoshard.ir.rings import ring_of

#: (place of a call in main, value of its segment), or the name of an input of the program
Origin: TypeAlias = "tuple[int, str] | str"


class Origins:
    """Follows values back to where they are made. Time linear in the size of the program."""

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self._roots = {name: _roots(s.graph) for name, s in lowered.segments.items()}
        self._places = {
            name: {n: k for k, (n, _) in enumerate(s.graph.inputs)} for name, s in lowered.segments.items()
        }
        #: value of main -> where it is made; items of main only use what stands before them
        self._main: dict[str, Origin] = {}
        for k, item in enumerate(lowered.main):
            if isinstance(item, Call):
                outputs = lowered.segments[item.segment].graph.outputs
                for out, inner in zip(item.outs, outputs, strict=True):
                    self._main[out] = self.inside(k, inner)
            else:
                self._main.update((o, self.of(s)) for s, o in _moved(item))

    def of(self, value: str) -> Origin:
        """Where a value of main is made."""
        return self._main.get(value, value)

    def inside(self, item: int, value: str) -> Origin:
        """Where a value is made that the call at this place of main knows under this name."""
        call = self.lowered.main[item]
        assert isinstance(call, Call)
        root = self._roots[call.segment].get(value, value)
        place = self._places[call.segment].get(root)
        return (item, root) if place is None else self.of(call.args[place])


def _moved(node: Node) -> list[tuple[str, str]]:
    """(source, out) for a collective that only changes layouts; a partial sum stands for the full sum."""
    ring = ring_of(node) if is_ring(node) else None
    if ring is not None and ring.gathers:
        return [(ring.moved, node.outs[0])]
    return moved_by(node) if exact_transfer(node) is not None else []


def _roots(graph: Graph) -> dict[str, str]:
    """Value -> the one that it is in another layout."""
    result: dict[str, str] = {}
    for node in graph.nodes:
        result.update((out, result.get(source, source)) for source, out in _moved(node))
    return result
