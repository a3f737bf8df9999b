"""Which parts of which dims are worth splitting, and which parts are the same thing.

A *digit* of a dim is a part of it: (elements above, own elements). A dim of a flattened
``[batch*seq]`` has the digits batch (1, B) and seq (B, S) besides the whole. Digits are found by
following factors through the full graph to a fixpoint; digits connected by a factor are one
*class*: the batch everywhere, the heads everywhere. An axis that may only split the batch (dp) is
then a filter on classes, not on ops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.ir import Folded, Node, refs_of
from autoshard.ir.flow import Flow
from autoshard.rules.core import Dims, Factored
from autoshard.rules.states import Digit

#: (segment or "" for main, value, dim)
DimKey = tuple[str, str, int]
Part = tuple[int, int]

#: more parts than this of one dim are not considered; the first found stay
MAX_PARTS = 6


class _Union:
    """Union-find over anything hashable."""

    def __init__(self) -> None:
        self._parent: dict[object, object] = {}

    def find(self, item: object) -> object:
        self._parent.setdefault(item, item)
        root = item
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[item] != root:
            self._parent[item], item = root, self._parent[item]
        return root

    def join(self, a: object, b: object) -> None:
        self._parent[self.find(a)] = self.find(b)


@dataclass(frozen=True)
class DigitTable:
    """Result of the analysis.

    values: (segment, value, dim) -> digits of that dim (ports under their class, see `Flow`).
    factors: (segment, node number) -> per factor its digits. batch: the classes that are the batch.
    zigzag: those that are a sequence split in a zigzag; causal: those that are the same sequences as a whole;
    windowed: of other sequences those that may be split in a zigzag or as a whole, or are only attended to.
    heads: those that are heads of attention. experts: those that are the experts to which tokens go.
    """

    values: dict[DimKey, tuple[Digit, ...]]
    factors: dict[tuple[str, int], tuple[tuple[Digit, ...], ...]]
    batch: frozenset[int]
    zigzag: frozenset[int] = frozenset()
    causal: frozenset[int] = frozenset()
    windowed: frozenset[int] = frozenset()
    heads: frozenset[int] = frozenset()
    experts: frozenset[int] = frozenset()


class _Analysis:
    def __init__(self, folded: Folded, flow: Flow, rules: dict[tuple[str, int], Factored]) -> None:
        self.folded = folded
        self.flow = flow
        self.rules = rules
        self.parts: dict[DimKey, dict[Part, None]] = {}
        self.union = _Union()
        self.users: dict[tuple[str, str], list[tuple[str, int]]] = {}
        self.links: dict[tuple[str, str], list[tuple[str, str]]] = {}
        self.queue: deque[tuple[str, int]] = deque()
        self.queued: set[tuple[str, int]] = set()

    def wake(self, segment: str, value: str) -> None:
        for key in self.users.get((segment, value), ()):
            if key not in self.queued:
                self.queued.add(key)
                self.queue.append(key)

    def add(self, segment: str, value: str, dim: int, part: Part) -> bool:
        """Record a digit here and at every place that names the same value."""
        todo, new = [(segment, value)], False
        while todo:
            seg, val = todo.pop()
            known = self.parts.setdefault((seg, val, dim), {})
            if part in known or len(known) >= MAX_PARTS:
                continue
            known[part] = None
            new = True
            self.wake(seg, val)
            todo.extend(self.links.get((seg, val), ()))
        return new

    def visit(self, segment: str, number: int, node: Node) -> None:
        rule = self.rules[segment, number]
        tensors = _tensors(node, rule)
        result: list[dict[Part, None]] = [{(1, n): None} for n in rule.sizes]
        for factor in rule.zigzag:
            if rule.sizes[factor] % 2 == 0:
                result[factor][-2, rule.sizes[factor] // 2] = None
        for value, dims in tensors:
            for dim, factors in enumerate(dims):
                for part in self.parts.get((segment, value, dim), ()):
                    hit = _into_factor(part, factors, rule.sizes)
                    if hit is not None:
                        result[hit[0]].setdefault(hit[1])
        for value, dims in tensors:
            for dim, factors in enumerate(dims):
                above = 1
                for factor in factors:
                    for outer, size in result[factor]:
                        if size > 1 and above:  # of a dim that has elements
                            self.add(segment, value, dim, (above * outer, size))
                    above *= rule.sizes[factor]


def _tensors(node: Node, rule: Factored) -> list[tuple[str, Dims]]:
    pairs = list(zip(refs_of(node), rule.inputs, strict=True))
    pairs += [(out, dims) for out, dims in zip(node.outs, rule.outputs, strict=True) if dims is not None]
    return pairs


def _into_factor(part: Part, factors: Iterable[int], sizes: tuple[int, ...]) -> tuple[int, Part] | None:
    """The factor a part of a dim lies in, and the part relative to it. A zigzag of positions is one of chunks
    of them: where ranks have equal numbers of chunks (`shard_of_digit`), it is the same placement."""
    outer, size = part
    above = 1
    chunks: tuple[int, Part] | None = None
    for factor in factors:
        inside = outer % above == 0 and (above * sizes[factor]) % (outer * size) == 0
        inside = inside and (outer > 0 or outer // above % 2 == 0)
        if abs(outer) >= above and inside:
            return factor, (outer // above, size)
        blocks, rest = divmod(-outer, above)
        if outer < 0 and chunks is None and not rest and blocks > 1 and sizes[factor] % (2 * blocks) == 0:
            chunks = factor, (-blocks, sizes[factor] // blocks)
        above *= sizes[factor]
    return chunks if above == -outer * size else None


def find_digits(folded: Folded, flow: Flow, rules: dict[tuple[str, int], Factored]) -> DigitTable:
    """Follow digits through the folded graph to a fixpoint.

    rules: the factors of every node of every segment, by (segment, node number).
    """
    work = _Analysis(folded, flow, rules)
    _index(work)
    for key, ports in flow.classes.items():
        for dim, n in enumerate(ports.first.type.shape):
            if n > 1:
                work.add(*key, dim, (1, n))
    for place in work.rules:
        if place not in work.queued:
            work.queued.add(place)
            work.queue.append(place)
    while work.queue:
        place = work.queue.popleft()
        work.queued.discard(place)
        work.visit(*place, folded.segments[place[0]].nodes[place[1]])
    return _table(work)


def _index(work: _Analysis) -> None:
    for name, graph in work.folded.segments.items():
        for number, node in enumerate(graph.nodes):
            for value in {*refs_of(node), *node.outs}:
                work.users.setdefault((name, value), []).append((name, number))
    for a, b in work.flow.edges:
        work.links.setdefault(a, []).append(b)
        work.links.setdefault(b, []).append(a)
    for key, group in work.flow.classes.items():
        for grad in group.grads:
            work.links.setdefault(key, []).append(grad)
            work.links.setdefault(grad, []).append(key)


def _table(work: _Analysis) -> DigitTable:
    union = work.union
    for (segment, value, dim), parts in work.parts.items():
        for other in work.links.get((segment, value), ()):
            for part in parts:
                union.join((segment, value, dim, part), (*other, dim, part))
    for (segment, number), rule in work.rules.items():
        node = work.folded.segments[segment].nodes[number]
        for value, dims in _tensors(node, rule):
            for dim, factors in enumerate(dims):
                for part in work.parts.get((segment, value, dim), ()):
                    hit = _into_factor(part, factors, rule.sizes)
                    if hit is not None:
                        union.join((segment, value, dim, part), (segment, number, "factor", *hit))
    names: dict[object, int] = {}

    def number_of(item: object) -> int:
        return names.setdefault(union.find(item), len(names))

    values = {
        key: tuple((outer, size, number_of((*key, (outer, size)))) for outer, size in sorted(parts))
        for key, parts in work.parts.items()
    }
    factors_of: dict[tuple[str, int], tuple[tuple[Digit, ...], ...]] = {}
    for (segment, number), rule in work.rules.items():
        result: list[dict[Part, int]] = [{} for _ in rule.sizes]
        node = work.folded.segments[segment].nodes[number]
        for value, dims in _tensors(node, rule):
            for dim, inside in enumerate(dims):
                for part in work.parts.get((segment, value, dim), ()):
                    hit = _into_factor(part, inside, rule.sizes)
                    if hit is not None and hit[1][1] > 1:
                        result[hit[0]][hit[1]] = number_of((segment, number, "factor", *hit))
        factors_of[segment, number] = tuple(
            tuple((outer, size, cls) for (outer, size), cls in sorted(f.items())) for f in result
        )
    batch = set()
    for key, group in work.flow.classes.items():
        port = group.first
        if port.kind == "input" and port.target in work.folded.joint.batch_inputs and port.type.shape[0] > 1:
            batch.add(number_of((*key, 0, (1, port.type.shape[0]))))
    causal: set[int] = set()
    zigzag: set[int] = set()
    windowed: set[int] = set()
    heads: set[int] = set()
    experts: set[int] = set()
    for place, rule in work.rules.items():
        for factor in rule.zigzag:
            for outer, _, cls in factors_of[place][factor]:
                whole = windowed if factor in rule.contiguous else causal
                (zigzag if outer < 0 else whole).add(cls)
        for factor in (f for f, how in rule.reduce if how == "attention"):
            windowed.update(cls for _, _, cls in factors_of[place][factor])
        for _, owners in rule.exchange:
            experts.update(cls for _, _, cls in factors_of[place][owners])
        if rule.kernel == "attention":
            heads.update(cls for factor in rule.inputs[0][1] for _, _, cls in factors_of[place][factor])
    full = frozenset(causal if zigzag else ())
    return DigitTable(
        values,
        factors_of,
        frozenset(batch),
        frozenset(zigzag),
        full,
        frozenset(windowed - causal),
        frozenset(heads - batch),
        frozenset(experts),
    )
