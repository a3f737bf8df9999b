"""A program statement by statement, across its calls, so that any part of it can be taken out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from autoshard.ir.folded import Call
from autoshard.ir.graph import Graph, Node, Ref, refs_of, substitute
from autoshard.ir.lowered import Instruction, Lowered, LoweredSegment, PlacedValue, StagePart
from autoshard.ir.names import free_name, fresh_name
from autoshard.ir.symbols import CallSite


class Statement(NamedTuple):
    """One op of the full program; a tuple, since a deep program has tens of thousands.

    item: place of its call (or of the node itself) in main. number: place in the segment, -1 for a node of
    main. uses, makes: values under names that are unique over the full program. backward: that of the node.
    """

    item: int
    number: int
    node: Node
    uses: tuple[str, ...]
    makes: tuple[str, ...]
    backward: bool


@dataclass(frozen=True)
class Statements:
    """All statements, in order.

    same: other names of a value, where a segment hands on what it was given. results: values of the
    program's results. values: type and layout of every value.
    """

    lowered: Lowered
    all: tuple[Statement, ...]
    same: Mapping[str, str]
    results: tuple[str, ...]
    values: Mapping[str, PlacedValue]


def statements_of(lowered: Lowered) -> Statements:
    """The program flattened; time linear in the number of its ops."""
    result: list[Statement] = []
    same: dict[str, str] = {}
    values = dict(lowered.values)
    taken = set(values)
    bodies: dict[tuple[str, bool], list[_Line]] = {}
    for item, instruction in enumerate(lowered.main):
        if isinstance(instruction, Node):
            uses = tuple(same.get(r, r) for r in refs_of(instruction))
            result.append(Statement(item, -1, instruction, uses, instruction.outs, instruction.backward))
            continue
        segment = lowered.segments[instruction.segment]
        graph = segment.graph
        names = {n: same.get(a, a) for (n, _), a in zip(graph.inputs, instruction.args, strict=True)}
        leaving: dict[str, str] = {}
        for inner, out in zip(graph.outputs, instruction.outs, strict=True):
            if inner in names:
                same[out] = names[inner]
            elif inner in leaving:
                same[out] = leaving[inner]
            else:
                leaving[inner] = out
        key = instruction.segment, instruction.backward
        if key not in bodies:
            bodies[key] = _body(segment, instruction.backward)
        behind, backward = f"_c{item}", instruction.backward
        for number, (node, refs, outs) in enumerate(bodies[key]):
            uses = tuple([names[r] for r in refs])
            makes = []
            for out, placed in outs:
                name = leaving.get(out)
                if name is None:
                    name = out + behind
                    if name in taken:
                        name = free_name(name, taken)
                    taken.add(name)
                names[out] = name
                makes.append(name)
                if placed is not None:
                    values[name] = placed
            result.append(Statement(item, number, node, uses, tuple(makes), backward))
    results = tuple(same.get(r, r) for r in lowered.results)
    return Statements(lowered, tuple(result), same, results, values)


class _Line(NamedTuple):
    """An op of a segment. outs: what it makes, with its type and layout where both are known."""

    node: Node
    refs: tuple[str, ...]
    outs: tuple[tuple[str, PlacedValue | None], ...]


def _body(segment: LoweredSegment, backward: bool) -> list[_Line]:
    """The ops of a segment, the same for each of its calls."""
    new = segment.placed()
    return [
        _Line(_in_phase(n, backward), tuple(refs_of(n)), tuple((o, new.get(o)) for o in n.outs))
        for n in segment.graph.nodes
    ]


def _in_phase(node: Node, backward: bool) -> Node:
    return node if node.backward == backward else replace(node, backward=backward)


def repeats_of(whole: Statements) -> dict[str, str]:
    """Value that backward recomputes -> the value of forward that it equals.

    Two ops give the same if they are the same op on the same values, or on values that are the same.
    """
    forward = {value for statement in whole.all if not statement.backward for value in statement.makes}
    return {v: f for v, f in firsts_of(whole).items() if f in forward and v not in forward}


def firsts_of(whole: Statements) -> dict[str, str]:
    """Value -> the first one that is equal to it, as in `repeats_of`; of either half, itself left out."""
    known: dict[_What, tuple[str, ...]] = {}
    same: dict[str, str] = {}
    forms = _Forms(whole.lowered)
    for statement in whole.all:
        first = known.setdefault(forms.what(statement, same), statement.makes)
        same.update((v, f) for v, f in zip(statement.makes, first, strict=True) if v != f)
    return same


#: what a statement does: (number of its form, values that it takes, its call if that matters)
_What: TypeAlias = tuple[int, tuple[str, ...], int]


class _Forms:
    """Ops without the values that they take, numbered; every node of a segment is looked at once."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        self._numbers: dict[Hashable, int] = {}
        #: id of a node -> (the node, whose id it stays, its number, whether it is numbered in its call)
        self._of_node: dict[int, tuple[Node, int, bool]] = {}

    def what(self, statement: Statement, same: Mapping[str, str]) -> _What:
        """What a statement does with which values; same: value -> the one that stands for it."""
        result = self._of_node.get(id(statement.node))
        if result is None:
            result = self._of_node[id(statement.node)] = self._form(statement.node)
        _, number, random = result
        site = 0
        if random:  # a random op is numbered within its call
            instruction = self._lowered.main[statement.item]
            site = instruction.site if isinstance(instruction, Call) else 0
        return number, tuple([same.get(v, v) for v in statement.uses]), site

    def _form(self, node: Node) -> tuple[Node, int, bool]:
        bare = substitute(node, lambda _: Ref(""))
        number = self._numbers.setdefault((bare.op, bare.args, bare.kwargs), len(self._numbers))
        return node, number, CallSite in map(type, node.args)


#: in place of the only item that uses a value
_SEVERAL = -1


@dataclass
class Taker:
    """Takes parts out of a program; parts of a segment that are alike become one segment.

    segments: those that the parts taken so far call. values: of main, with those that used to be inside a
    segment.
    """

    whole: Statements
    segments: dict[str, LoweredSegment] = field(default_factory=dict)
    values: dict[str, PlacedValue] = field(default_factory=dict)
    made: dict[tuple[str, tuple[int, ...], tuple[str, ...]], str] = field(default_factory=dict)
    #: segment -> what each of its ops takes
    refs: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)

    def take(self, chosen: Sequence[Statement], wanted: Collection[str]) -> list[Instruction]:
        """The statements chosen, in the order given, as calls; wanted: values that are used outside them."""
        groups: dict[int, list[Statement]] = {}
        for statement in chosen:
            groups.setdefault(statement.item, []).append(statement)
        users: dict[str, int] = {}
        for statement in chosen:
            item = statement.item
            for value in statement.uses:
                if users.setdefault(value, item) != item:
                    users[value] = _SEVERAL
        return [self._taken(item, group, users, wanted) for item, group in groups.items()]

    def _taken(
        self, item: int, group: list[Statement], users: Mapping[str, int], wanted: Collection[str]
    ) -> Instruction:
        """users: value -> the only item that uses it, or `_SEVERAL`."""
        instruction = self.whole.lowered.main[item]
        if isinstance(instruction, Node):
            self._know(group[0].makes)
            names = iter(group[0].uses)
            return substitute(instruction, lambda _: Ref(next(names)), outs=group[0].makes)
        nodes = self.whole.lowered.segments[instruction.segment].graph.nodes
        if instruction.segment not in self.refs:
            self.refs[instruction.segment] = [tuple(refs_of(n)) for n in nodes]
        refs = self.refs[instruction.segment]
        # what leaves, each value once and under one name; what enters, by the segment's own names
        leaving: dict[str, str] = {}
        own: set[str] = set()
        given: dict[str, str] = {}
        for _, number, _, uses, makes, _ in group:
            for inner, value in zip(refs[number], uses, strict=True):
                if value not in own:
                    given[inner] = value
            own.update(makes)
            for inner, value in zip(nodes[number].outs, makes, strict=True):
                if value in wanted or users.get(value, item) != item:
                    leaving[inner] = value
        self._know((*leaving.values(), *given.values()))
        segment = self._segment(instruction, group, tuple(leaving), tuple(given))
        args, outs = tuple(given.values()), tuple(leaving.values())
        return replace(instruction, segment=segment, args=args, outs=outs, backward=group[0].backward)

    def _know(self, values: Collection[str]) -> None:
        for value in values:
            placed = self.whole.values.get(value)
            if placed is not None:
                self.values[value] = placed

    def _segment(
        self, call: Call, group: list[Statement], outputs: tuple[str, ...], inputs: tuple[str, ...]
    ) -> str:
        """The segment of a part of a call: the same for every call that is cut in the same way."""
        segment = self.whole.lowered.segments[call.segment]
        key = (call.segment, tuple(s.number for s in group), (*inputs, "->", *outputs))
        if key not in self.made:
            nodes = tuple(segment.graph.nodes[s.number] for s in group)
            full = len(nodes) == len(segment.graph.nodes)
            name = fresh_name(call.segment if full else f"{call.segment}_part", set(self.segments))
            types = segment.graph.types()
            graph = Graph(name, tuple((n, types[n]) for n in inputs), nodes, outputs)
            known = {*inputs, *(o for n in nodes for o in n.outs)}
            layouts = {n: lay for n, lay in segment.layouts.items() if n in known}
            self.segments[name] = LoweredSegment(graph, layouts, segment.why)
            self.made[key] = name
        return self.made[key]


def producers_of(statements: Sequence[Statement], values: Collection[str]) -> list[Statement]:
    """The statements that values follow from, in order; of a value that several make, the last one."""
    wanted = set(values)
    result: list[Statement] = []
    for statement in reversed(statements):
        if not wanted.isdisjoint(statement.makes):
            result.append(statement)
            wanted.difference_update(statement.makes)
            wanted.update(statement.uses)
    return result[::-1]


def by_part(whole: Statements) -> dict[StagePart, list[Statement]]:
    """The statements of every part of the program."""
    items: dict[int, list[Statement]] = {}
    for statement in whole.all:
        items.setdefault(statement.item, []).append(statement)
    parts = whole.lowered.parts
    return {part: [s for k in range(part.start, part.stop) for s in items.get(k, ())] for part in parts}


def regrouped(whole: Statements, pieces: Sequence[tuple[StagePart, Sequence[Statement]]]) -> Lowered:
    """The program with its statements in other parts, in the order given; where each begins is found here.

    Pieces of one part that follow each other stay apart: what of a segment is in two of them becomes two
    calls.
    """
    needs = [{value for statement in statements for value in statement.uses} for _, statements in pieces]
    users = Counter(value for need in needs for value in need)
    results = set(whole.results)
    taker = Taker(whole)
    main: list[Instruction] = []
    parts: list[StagePart] = []
    for (part, statements), own in zip(pieces, needs, strict=True):
        new = {value for statement in statements for value in statement.makes}
        wanted = {v for v in new if v in results or users.get(v, 0) > (v in own)}
        start = len(main)
        main += taker.take(statements, wanted)
        if parts and replace(parts[-1], start=part.start, stop=part.stop) == part:
            parts[-1] = replace(parts[-1], stop=len(main))
        else:
            parts.append(replace(part, start=start, stop=len(main)))
    return replace(
        whole.lowered,
        segments=taker.segments,
        main=tuple(main),
        values={**whole.lowered.values, **taker.values},
        results=whole.results,
        parts=tuple(parts),
    )
