"""What is saved from forward for backward, each storage once, and what recomputing it takes.

The same choice as the pass `recompute` makes: full recomputation starts from what a call takes; selective
recomputation keeps the fewest bytes from which no matrix product and no attention is recomputed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from autoshard.ir import Folded, refs_of
from autoshard.ir.flow import Flow, Place
from autoshard.ir.min_cut_recompute import keep_least
from autoshard.rules.core import Factored
from autoshard.search.problem.cost_terms import Bytes
from autoshard.search.problem.deferred_wgrad import made_late, read_late

#: a node of a segment
NodeKey = tuple[str, int]


@dataclass(frozen=True)
class SavedTerms:
    """bytes: (kind, the place whose storage it is, in how many calls). full, selective: nodes that run again
    under these policies. read: values of layers that backward reads, and what they are views of -> whether
    backward reads the storage of a view as well, from which it can be laid out once more. staying: layer ->
    values that selective recomputation starts from."""

    bytes: tuple[tuple[Bytes, Place, int], ...]
    full: frozenset[NodeKey]
    selective: frozenset[NodeKey]
    read: Mapping[Place, bool]
    staying: Mapping[str, frozenset[str]]

    def recomputed_by(self, nodes: Collection[NodeKey]) -> tuple[str, bool]:
        """(segment, whether under both policies) if any of the nodes is recomputed, else ("", False)."""
        hit = next((n for n in nodes if n in self.selective), None)
        if hit is not None:
            return hit[0], True
        hit = next((n for n in nodes if n in self.full), None)
        return ("", False) if hit is None else (hit[0], False)


def kept_activations(folded: Folded, flow: Flow, rules: Mapping[NodeKey, Factored]) -> SavedTerms:
    """What backward reads of forward, and what would be recomputed instead.

    What another call of forward takes, too, is held in any case: recomputing a call needs its inputs.
    """
    return _Analysis(folded, flow, rules).run()


class _Analysis:
    def __init__(self, folded: Folded, flow: Flow, rules: Mapping[NodeKey, Factored]) -> None:
        self.folded, self.flow, self.rules = folded, flow, rules
        self.backward = folded.is_backward()
        self.makers = {
            name: {out: k for k, node in enumerate(graph.nodes) for out in node.outs}
            for name, graph in folded.segments.items()
        }
        self.counts = folded.counts()
        self.layers = {c.segment for c in folded.calls if c.label and not c.backward}
        self.full: set[NodeKey] = set()
        self.selective: set[NodeKey] = set()

    def run(self) -> SavedTerms:
        read, crossing = self._roots(backward=True), self._roots(backward=False)
        late, waiting = self._waiting(read)
        entries: list[tuple[Bytes, Place, int]] = []
        staying: dict[str, frozenset[str]] = {}
        for name in sorted(self.layers):
            staying[name] = self._layer(name, read, crossing)
            for value in sorted(staying[name]):
                root = self.root((name, value))
                if value in self.makers[name] and root not in read and root not in crossing:
                    entries.append((Bytes("extra", name), root, self.counts[name]))
        for root, count in read.items():
            segment, value = root
            if value not in self.makers[segment] or root in crossing:
                entries.append((Bytes("held", late=late.get(root)), root, count))
            else:
                cheap = value not in staying.get(segment, ())
                entries.append((Bytes("kept", segment, cheap, late.get(root)), root, count))
        entries += [(Bytes("waiting"), root, count) for root, count in waiting.items()]
        entries += self._inputs(read, staying)
        used = {s for s, t in self.flow.edges if s[0] in self.layers and self.backward[t[0]]}
        views = {v for place in used for v in (place, *self._viewed(place))}
        kept = {v: self.root(v) != v and self.root(v) in used for v in views}
        return SavedTerms(tuple(entries), frozenset(self.full), frozenset(self.selective), kept, staying)

    def _waiting(self, read: Mapping[Place, int]) -> tuple[dict[Place, bool], dict[Place, int]]:
        """(what backward reads -> whether gradients of parameters are made of it, gradients of activations
        that they are made of -> in how many calls); nothing if a rank where they wait holds less for it."""
        reads = frozenset(map(self.root, read_late(self.folded, self.flow)))
        needed = {self.root(source) for source, target in self.flow.edges if target in reads and source[0]}
        late = {root: root in needed for root in read}
        waiting: dict[Place, int] = {}
        for place, count in made_late(self.folded, self.flow, reads, self.backward).items():
            waiting[self.root(place)] = max(count, waiting.get(self.root(place), 0))
        types = {name: graph.types() for name, graph in self.folded.segments.items()}
        more = sum(count * types[name][value].nbytes for (name, value), count in waiting.items())
        freed = sum(
            count * types[name][value].nbytes
            for (name, value), count in read.items()
            if not late[name, value]
        )
        return (late, waiting) if more > freed else ({}, {})

    def _inputs(
        self, read: Mapping[Place, int], staying: Mapping[str, frozenset[str]]
    ) -> Iterator[tuple[Bytes, Place, int]]:
        """What a call would have to keep of what it takes, and does not keep otherwise."""
        for (source, target), count in self.flow.edges.items():
            recomputed = target[0] in self.layers and source[0] and not self.backward[source[0]]
            if recomputed and self.root(source) not in read:
                both = target[1] in staying[target[0]]
                yield Bytes("input", target[0], both), self.root(source), count

    def _layer(self, name: str, read: Mapping[Place, int], crossing: Collection[Place]) -> frozenset[str]:
        """The values of a layer that selective recomputation starts from."""
        graph, makers = self.folded.segments[name], self.makers[name]
        values = {v for s, v in read if s == name and v in makers and (s, v) not in crossing}
        kinds = {out: self.rules[name, k].kind for out, k in makers.items()}
        sizes = {v: t.nbytes for v, t in graph.types().items()}
        sizes |= dict.fromkeys((v for v, _ in graph.inputs), 0)
        sizes |= {v: 0 for s, v in crossing if s == name}
        views = [v for v, kind in kinds.items() if kind == "view"]
        dear = [v for v, kind in kinds.items() if kind == "matmul"]
        staying = keep_least(graph, values, dear, views, sizes) if values else frozenset()
        self.full |= self._needed(name, values, frozenset())
        self.selective |= self._needed(name, values, staying)
        return staying

    def _needed(self, name: str, values: Collection[str], given: Collection[str]) -> set[NodeKey]:
        """Nodes that make what is wanted from what is given and the inputs."""
        graph, makers = self.folded.segments[name], self.makers[name]
        needed: set[NodeKey] = set()
        waiting = [v for v in values if v not in given]
        while waiting:
            number = makers.get(waiting.pop())
            if number is not None and (name, number) not in needed:
                needed.add((name, number))
                waiting += [r for r in refs_of(graph.nodes[number]) if r not in given]
        return needed

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
        return next(reversed([place, *self._viewed(place)]))

    def _viewed(self, place: Place) -> Iterator[Place]:
        """What a value is a view of, and so on."""
        name, value = place
        graph, makers = self.folded.segments[name], self.makers[name]
        while value in makers and self.rules[name, makers[value]].kind == "view":
            source = next(refs_of(graph.nodes[makers[value]]), value)
            if source == value:
                return
            value = source
            yield name, value
