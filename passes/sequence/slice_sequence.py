"""Divide every microbatch into slices of its sequence, which pass through the stages one after the other.

What works on the sequence is there once per slice (see `slice_places`): a stage then has a part per slice,
forward in order, backward in reverse order, and its ranks wait less at the beginning and the end of a step
(Li et al., "TeraPipe", ICML 2021; Sun et al., "Seq1F1B", 2024). What is made once runs with the first slice
of its half, or with the last one if it needs all of them.

The queries of slice c see the keys and values of slices 0 to c, which stay on their stage. Going back, slice
c adds to the gradients of these keys and values: the sum is handed on from slice to slice, and those of
slice c are complete once slice c has run. Gradients of parameters are made by every slice under the same
name: the runtime adds them up, as it does over microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from autoshard.errors import UsageError
from autoshard.ir import Call, Graph, Joint, Node, Ref, refs_of, substitute
from autoshard.ir.collectives import ALL_REDUCE, SLICE
from autoshard.ir.lowered import Instruction, Lowered, LoweredSegment, PlacedValue, StagePart, with_parts
from autoshard.ir.placement import P, R
from autoshard.ir.slices import Slices
from autoshard.ir.statements import Statement, Statements, by_part, firsts_of, statements_of
from autoshard.passes.sequence.slice_emit import Namer, PartStatements, SliceContext, SliceEmitter
from autoshard.passes.sequence.slice_places import SlicedStatement, places_of
from autoshard.passes.sequence.slice_templates import Templates
from autoshard.rules.core import RuleFn
from autoshard.rules.local import MeshShape


def slice_sequence(
    lowered: Lowered, joint: Joint, slices: Slices, rules: Mapping[str, RuleFn], mesh: MeshShape
) -> Lowered:
    """The program, cut into stages and not yet localized, with its forward and backward parts per slice.

    Raises UsageError if an op does not let the sequence be divided, or the program splits its backward.
    """
    if any(p.phase == "weight" for p in lowered.parts):
        raise UsageError(
            "a backward in two parts cannot be divided into slices",
            why="gradients of weights would wait for all slices",
            hint="use the schedule seq1f1b",
        )
    return _Slicer(lowered, joint, slices, rules, mesh).run()


class _Slicer:
    def __init__(
        self, lowered: Lowered, joint: Joint, slices: Slices, rules: Mapping[str, RuleFn], mesh: MeshShape
    ) -> None:
        self.lowered, self.slices = lowered, slices
        self.whole = statements_of(lowered)
        places = places_of(self.whole, joint, rules, slices.units)
        # equal ones are one
        alike: dict[SlicedStatement, SlicedStatement] = {}
        ways = [alike.setdefault(way, way) for way in places.ways]
        self.ways = {id(s): w for s, w in zip(self.whole.all, ways, strict=True)}
        pairs = list(zip(joint.results, self.whole.results, strict=True))
        grads = {v for r, v in pairs if r.kind == "grad" and places.of.get(v) == P}
        summed = _summed(self.whole, grads)
        #: results that are put together of their slices
        self.joined = {v for _, v in pairs if places.of.get(v, R) != R} - summed
        outer = Namer({*self.whole.values, *(o for i in lowered.main for o in i.outs)})
        moved = {s.makes[0]: s.uses[0] for s in self.whole.all if s.node.op == SLICE.op}
        forward = {v for s in self.whole.all if not s.backward for v in s.makes}
        repeated = {
            v: f
            for v, f in firsts_of(self.whole).items()
            if v not in forward and f in forward and places.of.get(f) == places.of.get(v)
        }
        self.setting = SliceContext(
            slices, self.whole.values, places.of, summed, moved, repeated, rules, mesh, outer
        )
        self.inner = {name: Namer(set(s.graph.types())) for name, s in lowered.segments.items()}
        self.templates = Templates(self.setting, self.joined)
        self.groups: list[PartStatements] = []
        self.parts: list[StagePart] = []
        #: per stage, divided values that are put together there already
        self.have: dict[int, set[str]] = {}

    def run(self) -> Lowered:
        for part, statements in by_part(self.whole).items():
            if part.phase not in ("forward", "backward"):
                self._part(part, statements, None)
                continue
            order = range(len(self.slices))
            for number in order if part.phase == "forward" else reversed(order):
                self._part(part, statements, number)
        return self._built()

    def _part(self, part: StagePart, statements: Sequence[Statement], number: int | None) -> None:
        """The groups of one slice of a part; None: the part is not divided."""
        at = len(self.parts)
        self.parts.append(replace(part, slice=number or 0))
        have = self.have.setdefault(part.stage, set())
        for item, run in groupby(statements, lambda s: s.item):
            own, call = list(run), self.lowered.main[item]
            key = None
            if isinstance(call, Call):
                ways = tuple(id(self.ways[id(s)]) for s in own)
                key = self.templates.key(own, (call.segment, part.phase, number, ways), have)
                group = self.templates.filled(key, own, at, have)
                if group is not None:
                    self.groups.append(group)
                    continue
            before = set(have)
            group = self._group(at, part, own, number)
            if group is not None:
                self.groups.append(group)
                if key is not None:
                    self.templates.keep(key, own, group, have - before)

    def _group(
        self, at: int, part: StagePart, statements: Sequence[Statement], number: int | None
    ) -> PartStatements | None:
        """What one slice of a part takes over of one instruction of main, None if that is nothing."""
        end = len(self.slices) - 1
        first, last = (0, end) if part.phase == "forward" else (end, 0)
        group: PartStatements | None = None
        for statement in statements:
            way = self.ways[id(statement)]
            if number is not None and not way.divided and number != (last if way.late else first):
                continue
            if group is None:
                group = PartStatements(at, statement.item)
            emitter = self._emitter(group, part, statement)
            emitter.run(way, number)
            for inner, value in zip(statement.node.outs, statement.makes, strict=True):
                if value in self.joined and number == last:
                    emitter.whole(inner, value, result=True)
        return group

    def _emitter(self, group: PartStatements, part: StagePart, statement: Statement) -> SliceEmitter:
        have = self.have.setdefault(part.stage, set())
        instruction = self.lowered.main[statement.item]
        if isinstance(instruction, Node):
            return SliceEmitter(self.setting, group, self.setting.outer, have, statement, "")
        segment = self.lowered.segments[instruction.segment]
        why = segment.why.get(statement.node.name, "")
        return SliceEmitter(self.setting, group, self.inner[instruction.segment], have, statement, why)

    # -- the new program ---------------------------------------------------------------------------------

    def _built(self) -> Lowered:
        new = _Made(self.lowered, _only_wanted(self.groups, set(self.whole.results)))
        of_part: dict[int, list[PartStatements]] = {}
        for group in self.groups:
            of_part.setdefault(group.part, []).append(group)
        pieces = [
            (part, [i for group in of_part.get(at, []) for i in new.instructions(group)])
            for at, part in enumerate(self.parts)
        ]
        # what the program is given, and results that are among it
        inside = {v for s in self.whole.all for v in s.makes}
        ports = {n: self.whole.values[n] for n in self.lowered.values if n not in inside}
        values = {**ports, **new.values}
        built = replace(self.lowered, segments=new.segments, values=values, results=self.whole.results)
        return with_parts(built, pieces)


def _summed(whole: Statements, grads: set[str]) -> frozenset[str]:
    """Gradients of which slices make terms, and what the last reductions over an axis make them of.

    These reductions run after the sum, once a step (`passes/overlap/defer_reductions.py`).
    """
    # several stages may hold a parameter, and make what is added up under the same names
    users: dict[str, set[tuple[str, ...]]] = {}
    for statement in whole.all:
        for value in statement.uses:
            users.setdefault(value, set()).add(statement.makes)
    result = {v for v in grads if v not in users}
    for statement in whole.all:
        last = statement.node.op == ALL_REDUCE.op and statement.makes[0] in result
        if last and len(users[statement.uses[0]]) == 1:
            result.add(statement.uses[0])
    return frozenset(result)


def _only_wanted(groups: Sequence[PartStatements], results: set[str]) -> set[str]:
    """The values that leave their group; whatever makes nothing that is used is dropped from the groups."""
    wanted = set(results)
    for group in reversed(groups):
        needed = {inner for inner, value in group.made.items() if value in wanted}
        nodes: list[Node] = []
        for node in reversed(group.nodes):
            if not needed.isdisjoint(node.outs):
                nodes.append(node)
                needed.update(refs_of(node))
        group.nodes = nodes[::-1]
        known = {*needed, *(o for node in nodes for o in node.outs)}
        group.given = {inner: value for inner, value in group.given.items() if inner in known}
        group.values = {inner: placed for inner, placed in group.values.items() if inner in known}
        wanted.update(group.given.values())
    return wanted


class _Made:
    """Groups as calls; those that are alike call one segment."""

    def __init__(self, lowered: Lowered, wanted: set[str]) -> None:
        self.lowered, self.wanted = lowered, wanted
        self.segments: dict[str, LoweredSegment] = {}
        self.values: dict[str, PlacedValue] = {}
        self.known: dict[tuple[object, ...], str] = {}

    def instructions(self, group: PartStatements) -> list[Instruction]:
        instruction = self.lowered.main[group.item]
        if isinstance(instruction, Node):
            self.values |= {group.made[n]: v for n, v in group.values.items() if n in group.made}
            outer = {**group.given, **group.made}
            return [
                replace(substitute(n, lambda r: Ref(outer[r])), outs=tuple(outer[o] for o in n.outs))
                for n in group.nodes
            ]
        outs = {inner: value for inner, value in group.made.items() if value in self.wanted}
        if not outs:
            return []
        self.values |= {value: group.values[inner] for inner, value in outs.items() if inner in group.values}
        segment = self._segment(instruction, group, tuple(outs))
        return [
            replace(instruction, segment=segment, args=tuple(group.given.values()), outs=tuple(outs.values()))
        ]

    def _segment(self, call: Call, group: PartStatements, outs: tuple[str, ...]) -> str:
        nodes, inputs = tuple(group.nodes), tuple(group.given)
        layouts = {name: placed.layout for name, placed in group.values.items()}
        why = {node.name: group.why[node.name] for node in nodes if node.name in group.why}
        key = (call.segment, nodes, inputs, outs, tuple(layouts.items()))
        if key not in self.known:
            name, k = call.segment, 1
            while name in self.segments:
                k += 1
                name = f"{call.segment}_{k}"
            graph = Graph(name, tuple((n, group.values[n].type) for n in inputs), nodes, outs)
            self.segments[name] = LoweredSegment(graph, layouts, why)
            self.known[key] = name
        return self.known[key]
