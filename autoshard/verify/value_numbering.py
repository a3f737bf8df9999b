"""What the model computes, as numbered terms: equal computations have equal numbers.

Value numbering over the whole captured model, call by call: an op on terms is a term; the same op with the
same arguments on the same terms is the same one. A program computes the model if each of its ops, its
placements taken away, gives one of these terms, and its results are those of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoshard.ir import Arg, Call, CallSite, Node, Port, Ref, TensorType, refs_of, substitute
from autoshard.ir.lowered import Instruction, Lowered, LoweredSegment

#: an op with its arguments, and the types of what it takes and makes
_Key = tuple[str, str, tuple[TensorType, ...], tuple[TensorType | None, ...]]
#: terms that an op takes, and the number of its random draw, -1 if it draws none
Uses = tuple[tuple[int, ...], int]

ADD = "aten.add.Tensor"


@dataclass(frozen=True)
class Pattern:
    """An op with the places of its inputs: ``mul(0, 1)``.

    number: equal patterns have equal numbers. node: its uses are called ``0``, ``1``, ... in order of
    appearance. ins: their types.
    """

    number: int
    node: Node
    ins: tuple[TensorType, ...]


@dataclass(frozen=True, slots=True)
class Term:
    """A term: a pattern on terms. outs: numbers of what it gives.

    item, number: of the call, and of the node in its segment, where the model first makes it; -1 if only a
    program makes it, of terms of the model.
    """

    pattern: Pattern
    uses: Uses
    outs: tuple[int, ...]
    item: int = -1
    number: int = -1


def positional(node: Node) -> Node:
    """The node with its uses called by their place, its random draw by 0, and its outputs by theirs."""
    places = iter(range(len(list(refs_of(node)))))
    new = substitute(node, lambda _: Ref(str(next(places))))
    return Node(
        new.op,
        tuple(_without_site(a) for a in new.args),
        new.kwargs,
        tuple(f"o{k}" for k in range(len(new.outs))),
        new.types,
    )


def _without_site(arg: Arg) -> Arg:
    return CallSite(0) if isinstance(arg, CallSite) else arg


def site_of(node: Node) -> int:
    """The number of a random op within its segment, -1 if it is none."""
    return next((a.offset for a in node.args if isinstance(a, CallSite)), -1)


def spelled(node: Node) -> tuple[str, str]:
    """Op and arguments of a positional node, by which two are compared: 1, 1.0 and True differ."""
    return node.op, repr((node.args, node.kwargs))


class Patterns:
    """Patterns by what they are."""

    def __init__(self) -> None:
        self._known: dict[_Key, Pattern] = {}

    def of(self, node: Node, ins: Sequence[TensorType]) -> Pattern:
        """The pattern of a node whose uses have these types."""
        bare = positional(node)
        op, args = spelled(bare)
        key = (op, args, tuple(ins), bare.types)
        if key not in self._known:
            self._known[key] = Pattern(len(self._known), bare, tuple(ins))
        return self._known[key]


@dataclass(frozen=True)
class _Prepared:
    """A node of a segment, ready to be numbered at every call."""

    pattern: Pattern
    refs: tuple[str, ...]
    outs: tuple[str, ...]
    site: int


class TermTable:
    """The terms of a model.

    ports: port -> term. results: term of every result, in order. by_uses: what is made of some terms. made:
    term -> what makes it (ports left out). fixed: terms that only depend on parameters.
    """

    def __init__(self, original: Lowered, ports: Sequence[Port]) -> None:
        self.original = original
        self.patterns = Patterns()
        self.types: dict[int, TensorType | None] = {k: p.type for k, p in enumerate(ports)}
        self.ports = {p.name: k for k, p in enumerate(ports)}
        self.fixed = {k for k, p in enumerate(ports) if p.kind in ("param", "const")}
        self.count = len(ports)
        self.made: dict[int, Term] = {}
        self.by_uses: dict[Uses, list[Term]] = {}
        self.statements = 0
        self._known: dict[tuple[int, Uses], Term] = {}
        env = dict(self.ports)
        prepared = {name: self._prepared(segment) for name, segment in original.segments.items()}
        for number, item in enumerate(original.main):
            self._run(number, item, env, prepared)
        self.results = tuple(env[r] for r in original.results)

    def _prepared(self, segment: LoweredSegment) -> tuple[_Prepared, ...]:
        types = segment.graph.types()
        result = []
        for node in segment.graph.nodes:
            refs = tuple(refs_of(node))
            pattern = self.patterns.of(node, [types[r] for r in refs])
            result.append(_Prepared(pattern, refs, node.outs, site_of(node)))
        return tuple(result)

    def _run(
        self,
        place: int,
        item: Instruction,
        env: dict[str, int],
        prepared: Mapping[str, tuple[_Prepared, ...]],
    ) -> None:
        assert isinstance(item, Call)
        graph = self.original.segments[item.segment].graph
        own = {inner: env[a] for (inner, _), a in zip(graph.inputs, item.args, strict=True)}
        for number, node in enumerate(prepared[item.segment]):
            uses = (tuple([own[r] for r in node.refs]), node.site + item.site if node.site >= 0 else -1)
            own.update(zip(node.outs, self.make(node.pattern, uses, place, number).outs, strict=True))
            self.statements += 1
        env.update({out: own[inner] for out, inner in zip(item.outs, graph.outputs, strict=True)})

    def make(self, pattern: Pattern, uses: Uses, item: int = -1, number: int = -1) -> Term:
        """The term of a pattern on terms, a new one if it is."""
        key = (pattern.number, uses)
        if key not in self._known:
            outs = tuple(range(self.count, self.count + len(pattern.node.outs)))
            self.count += len(outs)
            new = Term(pattern, uses, outs, item, number)
            self.types.update(zip(outs, pattern.node.types, strict=True))
            self._known[key] = new
            self.by_uses.setdefault(uses, []).append(new)
            self.made.update(dict.fromkeys(outs, new))
            if self.fixed.issuperset(uses[0]) and uses[1] < 0:
                self.fixed.update(outs)
        return self._known[key]

    def terms_of(self, value: int) -> tuple[int, ...]:
        """The terms that a sum is made of, in ascending order; of anything else, itself."""
        result: list[int] = []
        waiting = [value]
        while waiting:
            at = waiting.pop()
            new = self.made.get(at)
            if new is not None and is_sum(new.pattern):
                waiting += new.uses[0]
            else:
                result.append(at)
        return tuple(sorted(result))

    def all_terms(self, values: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(t for v in values for t in self.terms_of(v)))


def is_sum(pattern: Pattern) -> bool:
    """Whether a pattern adds two tensors of the type of the sum."""
    node = pattern.node
    plain = node.op == ADD and not node.kwargs and len(pattern.ins) == 2 and len(node.args) == 2
    return plain and all(t == node.types[0] for t in pattern.ins)
