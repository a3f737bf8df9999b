"""Gradients that are cast to the wider type of their parameter are reduced in that type.

Sums over ranks in 16 bits lose what the master copy is there to keep: FSDP2's ``reduce_dtype=torch.float32``.
"""

from __future__ import annotations

from collections import Counter

from autoshard.ir import DTYPES, Folded, Graph, Node, refs_of
from autoshard.ir.flow import Flow, Place
from autoshard.ir.views import CASTS

#: between a product and the cast of the gradient that it gives; other views are reshapes
_BETWEEN = ("aten.add.Tensor", "aten.reshape.default", "aten.t.default", "aten.permute.default")


def before_gradient_casts(folded: Folded, flow: Flow) -> frozenset[Place]:
    """Values on the way to such casts, whose partial sums have to stay partial sums until then."""
    search = _Search(folded, flow)
    queue = [
        (name, ref)
        for group in flow.classes.values()
        for name, value in group.grads
        for node in (search.makers[name].get(value),)
        if node is not None and _widens(node, folded.segments[name])
        for ref in refs_of(node)
    ]
    result: set[Place] = set()
    while queue:
        place = queue.pop()
        if place not in result and search.uses(place) == 1:
            result.add(place)
            queue += search.behind(place)
    return frozenset(result)


def _widens(node: Node, graph: Graph) -> bool:
    given, out = graph.types().get(next(refs_of(node), "")), node.types[0]
    if node.op not in CASTS or given is None or out is None:
        return False
    return given.is_float and out.is_float and DTYPES[out.dtype][1] > DTYPES[given.dtype][1]


class _Search:
    """Where values come from."""

    def __init__(self, folded: Folded, flow: Flow) -> None:
        self.flow = flow
        #: of ports, which have no segment, there are none
        self.makers: dict[str, dict[str, Node]] = {"": {}}
        for name, graph in folded.segments.items():
            self.makers[name] = {out: node for node in graph.nodes for out in node.outs}
        self.inside = Counter(
            (name, ref)
            for name, graph in folded.segments.items()
            for node in graph.nodes
            for ref in refs_of(node)
        )
        self.sources: dict[Place, list[Place]] = {}
        for source, target in flow.edges:
            self.sources.setdefault(target, []).append(source)

    def uses(self, place: Place) -> int:
        return self.inside[place] + len(self.flow.targets.get(place, ()))

    def behind(self, place: Place) -> list[Place]:
        """What a sum or a view is made of, and where an input of a segment comes from."""
        name, value = place
        node = self.makers[name].get(value)
        if node is None:
            return [source for source in self.sources.get(place, ()) if source[0]]
        return [(name, ref) for ref in refs_of(node)] if node.op in _BETWEEN else []
