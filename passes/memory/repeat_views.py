"""Backward makes its own views of what forward made, instead of being handed them.

Then a weight reaches the backward half as itself, so that it can be regathered or kept, and an
activation is kept once, not once per view of it. What is expanded and copied, as the keys and values of
grouped attention, is copied again: it holds several times as much as what it is a copy of.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autoshard.ir import Joint, Node, Ref, refs_of, substitute
from autoshard.ir.views import RESHAPES, TRANSPOSES, UNIT_DIMS

_EXPAND, _CLONE = "aten.expand.default", "aten.clone.default"
#: never move data
STRIDED = TRANSPOSES | UNIT_DIMS


def repeat_views(joint: Joint) -> Joint:
    """The joint graph in which no backward node uses a view of forward that costs nothing, or a copy of what
    was expanded."""
    makers = {n.name: n for n in joint.graph.nodes if len(n.outs) == 1 and not n.backward}
    types = joint.graph.types()
    grown = {
        name
        for name, node in makers.items()
        if node.op == _EXPAND and types[name].numel > types[next(refs_of(node))].numel
    }
    free = {name for name, node in makers.items() if _costs_little(node, makers, grown)}
    taken = set(joint.graph.types())
    copies: dict[str, str] = {}
    nodes: list[Node] = []

    def copied(name: str) -> str:
        """The name of the backward copy of a forward view, made where it is first needed."""
        if name not in free:
            return name
        if name not in copies:
            node = substitute(makers[name], lambda source: Ref(copied(source)))
            copies[name] = _fresh(name, taken)
            nodes.append(
                Node(node.op, node.args, node.kwargs, (copies[name],), node.types, node.origin, True)
            )
        return copies[name]

    for node in joint.graph.nodes:
        if node.backward and not free.isdisjoint(refs_of(node)):
            node = substitute(node, lambda name: Ref(copied(name)))
        nodes.append(node)
    return replace(joint, graph=replace(joint.graph, nodes=tuple(nodes)))


def _costs_little(node: Node, makers: dict[str, Node], grown: Collection[str]) -> bool:
    """A strided view, a reshape of something that lies contiguous, or a copy of what was expanded."""
    if node.op in STRIDED:
        return True
    if node.op not in RESHAPES and node.op != _CLONE:
        return False
    name = next(refs_of(node))
    source = makers.get(name)
    return name in grown or (node.op != _CLONE and (source is None or source.op not in STRIDED))


def _fresh(name: str, taken: set[str]) -> str:
    k = 0
    while f"{name}_bw{k or ''}" in taken:
        k += 1
    taken.add(f"{name}_bw{k or ''}")
    return f"{name}_bw{k or ''}"
