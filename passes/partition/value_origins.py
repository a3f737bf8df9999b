"""Which values of a program are the same tensor, placed in whatever way, across calls and collectives."""

from __future__ import annotations

from typing import TypeAlias

from autoshard.ir import Call, Graph, Node, Ref
from autoshard.ir.comm import is_ring
from autoshard.ir.lowered import Lowered
from autoshard.ir.rings import ring_of

#: (place of a call in main, value of its segment), or the name of an input of the program
Origin: TypeAlias = "tuple[int, str] | str"

#: collectives that give the same tensor in another layout; a partial sum stands for the whole sum
_MOVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice")


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
                self._main.update((o, self.of(s)) for o, s in _moved(item))

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
    """(out, source) for a collective that only changes layouts."""
    ring = ring_of(node) if is_ring(node) else None
    if ring is not None and ring.gathers:
        return [(node.outs[0], ring.moved)]
    kind = node.op.split(".")[1].removesuffix("_bucket") if node.op.startswith("comm.") else ""
    if kind not in _MOVES:
        return []
    first = node.args[0]
    sources = first if isinstance(first, tuple) else (first,)
    assert all(isinstance(s, Ref) for s in sources)
    return [(out, s.name) for out, s in zip(node.outs, sources, strict=True)]


def _roots(graph: Graph) -> dict[str, str]:
    """Value -> the one that it is in another layout."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        found.update((out, found.get(source, source)) for out, source in _moved(node))
    return found
