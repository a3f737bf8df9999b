"""What is kept from forward to backward, each storage once, and whether it could be computed again."""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.ir import Folded, refs_of
from autoshard.ir.flow import Flow, Place
from autoshard.rules.core import Factored
from autoshard.search.terms import Bytes


def kept_activations(
    folded: Folded, flow: Flow, rules: dict[tuple[str, int], Factored]
) -> Iterator[tuple[Bytes, Place, int]]:
    """(kind, the place whose storage is kept, in how many calls).

    What another call of forward takes, too, is held in any case: running a call again needs its inputs.
    """
    return _Kept(folded, flow, rules).all()


class _Kept:
    def __init__(self, folded: Folded, flow: Flow, rules: dict[tuple[str, int], Factored]) -> None:
        self.folded, self.flow, self.rules = folded, flow, rules
        self.backward = folded.is_backward()
        self.makers = {
            name: {out: k for k, node in enumerate(graph.nodes) for out in node.outs}
            for name, graph in folded.segments.items()
        }
        self.layers = {c.segment for c in folded.calls if c.label and not c.backward}

    def all(self) -> Iterator[tuple[Bytes, Place, int]]:
        read, crossing = self._roots(backward=True), self._roots(backward=False)
        for root, count in read.items():
            maker = self.makers[root[0]].get(root[1])
            if maker is None or root in crossing:
                yield Bytes("held"), root, count
            else:
                cheap = self.rules[root[0], maker].kind != "matmul"
                yield Bytes("kept", root[0], cheap), root, count
        for (source, target), count in self.flow.edges.items():
            again = target[0] in self.layers and source[0] and not self.backward[source[0]]
            if again and self.root(source) not in read:
                yield Bytes("input", target[0]), self.root(source), count

    def _roots(self, *, backward: bool) -> dict[Place, int]:
        """What forward makes and calls of that phase read: storage -> in how many calls."""
        roots: dict[Place, int] = {}
        for (source, target), count in self.flow.edges.items():
            if source[0] and not self.backward[source[0]] and self.backward[target[0]] == backward:
                root = self.root(source)
                roots[root] = max(count, roots.get(root, 0))
        return roots

    def root(self, place: Place) -> Place:
        """The value whose storage a view shares."""
        name, value = place
        graph, makers = self.folded.segments[name], self.makers[name]
        while value in makers and self.rules[name, makers[value]].kind == "view":
            value = next(refs_of(graph.nodes[makers[value]]), value)
        return (name, value)
