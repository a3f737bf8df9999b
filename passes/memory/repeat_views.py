"""Backward makes its own views of what forward made, instead of being handed them.

Then a weight reaches the backward half as itself, so that it can be gathered again or kept, and an
activation is kept once, not once per view of it.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.ir import Joint, Node, Ref, refs_of, substitute
from autoshard.ir.views import RESHAPES, TRANSPOSES, UNIT_DIMS

#: never move data
STRIDED = TRANSPOSES | UNIT_DIMS


def repeat_views(joint: Joint) -> Joint:
    """The joint graph in which no forward view that costs nothing is used by a backward node."""
    makers = {n.name: n for n in joint.graph.nodes if len(n.outs) == 1 and not n.backward}
    free = {name for name, node in makers.items() if _costs_nothing(node, makers)}
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


def _costs_nothing(node: Node, makers: dict[str, Node]) -> bool:
    """A strided view, or a reshape of something that lies contiguous."""
    if node.op in STRIDED:
        return True
    if node.op not in RESHAPES:
        return False
    source = makers.get(next(refs_of(node)))
    return source is None or source.op not in STRIDED


def _fresh(name: str, taken: set[str]) -> str:
    k = 0
    while f"{name}_bw{k or ''}" in taken:
        k += 1
    taken.add(f"{name}_bw{k or ''}")
    return f"{name}_bw{k or ''}"
