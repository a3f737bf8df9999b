"""One program for many sizes: what differs between programs of a model for other sizes, as formulas of these.

The same plan, lowered for several sizes of the inputs, gives programs that are alike up to numbers. Each
number becomes a formula of the sizes that differ between the inputs (batch, lengths), decided by some of the
programs and checked by the others. For which sizes the model's code takes the same way, a template does not
know: see `autoshard.capture.size_conditions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from fractions import Fraction
from itertools import combinations_with_replacement
from math import prod
from typing import Any

import torch

from autoshard.ir import Call, Graph, Node
from autoshard.program.program import Program, StoredState

#: names of sizes that vary, in the order of the inputs
NAMES = "BSTUVWXYZ"
#: a number is a product of at most so many sizes, times a factor, plus a number
_DEGREE = 2
#: texts for people
_SAID = ("why", "origin")
#: of a program, what says how it came about
_ABOUT = ("plan", "dumps", "notes", "options", "original", "original_notes", "state", "target", "classes")


class NotAlikeError(Exception):
    """Programs differ in more than formulas of sizes."""


@dataclass(frozen=True)
class Size:
    """``factor`` times a product of varying sizes, plus ``offset``. of: their numbers, with repeats."""

    factor: Fraction
    of: tuple[int, ...]
    offset: int = 0

    def at(self, sizes: Sequence[int]) -> int:
        """Its value. Raises NotAlikeError where it is no integer."""
        value = self.factor * prod(sizes[k] for k in self.of) + self.offset
        if value.denominator != 1:
            raise NotAlikeError(f"{self} is {value}")
        return int(value)

    def __str__(self) -> str:
        names = [NAMES[k] for k in self.of]
        text = "*".join(([str(self.factor.numerator)] if self.factor.numerator != 1 else []) + names)
        text += f"/{self.factor.denominator}" if self.factor.denominator != 1 else ""
        return text + (f"{self.offset:+d}" if self.offset else "")

    __repr__ = __str__


@dataclass(frozen=True)
class Reciprocal:
    """``factor`` divided by a product of varying sizes: a fraction that scales a mean."""

    factor: float
    of: tuple[int, ...]

    def at(self, sizes: Sequence[int]) -> float:
        """Its value."""
        return self.factor / prod(sizes[k] for k in self.of)

    def __str__(self) -> str:
        return f"{self.factor:g}/{'*'.join(NAMES[k] for k in self.of)}"

    __repr__ = __str__


@dataclass(frozen=True)
class ProgramTemplate:
    """A program whose numbers are formulas of sizes.

    program: its shapes and arguments hold `Size` and `Reciprocal` in place of numbers; it prints as programs
    do. dims: (position of an argument, dim) -> which size it is.
    """

    program: Program
    dims: Mapping[tuple[int, int], int]

    def sizes_of(self, shapes: Mapping[int, tuple[int, ...]]) -> tuple[int, ...] | None:
        """The varying sizes of arguments, by position; None where two dims of one size differ."""
        result: dict[int, int] = {}
        for (position, dim), size in self.dims.items():
            value = shapes[position][dim]
            if result.setdefault(size, value) != value:
                return None
        return tuple(result[k] for k in range(len(result)))

    def at(self, sizes: Sequence[int]) -> Program:
        """The program of these sizes. Raises NotAlikeError where a formula gives no integer."""
        program: Program = _at(self.program, sizes)
        return program


def template_of(programs: Sequence[Program]) -> ProgramTemplate:
    """What programs of one plan for other sizes have in common. Raises NotAlikeError if it is not enough."""
    positions = [p.target for p in programs[0].signature.ports if p.kind == "input" and p.target.isdigit()]
    shapes = [{p.target: p.type.shape for p in q.signature.ports if p.kind == "input"} for q in programs]
    vectors: dict[tuple[int, ...], int] = {}
    dims: dict[tuple[int, int], int] = {}
    for position in positions:
        if any(len(s.get(position, ())) != len(shapes[0][position]) for s in shapes):
            raise NotAlikeError("the arguments have other dims")
        for dim in range(len(shapes[0][position])):
            vector = tuple(s[position][dim] for s in shapes)
            if len(set(vector)) > 1:
                dims[int(position), dim] = vectors.setdefault(vector, len(vectors))
    if not vectors or len(vectors) > len(NAMES):
        raise NotAlikeError("no size varies")
    points = tuple(zip(*vectors, strict=True))
    return ProgramTemplate(_Merge(points).programs(programs), dims)


class _Merge:
    """points: of each program, the sizes that vary."""

    def __init__(self, points: Sequence[tuple[int, ...]]) -> None:
        self.points = points
        count = range(len(points[0]))
        self.products = [c for n in range(1, _DEGREE + 1) for c in combinations_with_replacement(count, n)]
        self.known: dict[tuple[Any, ...], Any] = {}

    def programs(self, programs: Sequence[Program]) -> Program:
        bare = [replace(p, **{n: _empty(p, n) for n in _ABOUT}) for p in programs]
        merged: Program = self.of(bare)
        first = programs[0]
        kept = {n: getattr(first, n) for n in _ABOUT if n not in ("original", "original_notes", "dumps")}
        return replace(merged, **kept)

    def of(self, values: Sequence[Any]) -> Any:
        """One thing of all programs."""
        first = values[0]
        if any(type(v) is not type(first) for v in values):
            raise NotAlikeError(f"{first!r} is {values[1]!r} elsewhere")
        if isinstance(first, torch.Tensor):
            if any(v.shape != first.shape or not torch.equal(v, first) for v in values):
                raise NotAlikeError("a constant differs")
            return first
        if isinstance(first, Graph):
            return self._dataclass([self._ordered(v, first) for v in values])
        if isinstance(first, tuple | list):
            return self._sequence(values)
        if isinstance(first, Mapping):
            if any(v.keys() != first.keys() for v in values):
                raise NotAlikeError("other names")
            return {k: self.of([v[k] for v in values]) for k in first}
        if is_dataclass(first):
            return self._dataclass(values)
        if all(v == first for v in values):
            return first
        return self._number(tuple(values))

    def _ordered(self, graph: Graph, like: Graph) -> Graph:
        """The nodes of a graph in the order of another: costs, which differ, order what runs beside what."""
        nodes = {node.outs: node for node in graph.nodes}
        if len(nodes) != len(like.nodes) or any(n.outs not in nodes for n in like.nodes):
            raise NotAlikeError(f"segment {like.name} has other ops")
        return replace(graph, nodes=tuple(nodes[n.outs] for n in like.nodes))

    def _sequence(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if any(len(v) != len(first) for v in values):
            raise NotAlikeError(f"{first!r} is {values[1]!r} elsewhere")
        if first and isinstance(first[0], Call | Node):
            # instructions of main, with what runs beside what
            tables = [{item.outs: item for item in v} for v in values]
            if any(t.keys() != tables[0].keys() for t in tables):
                raise NotAlikeError("other instructions")
            values = [[t[item.outs] for item in first] for t in tables]
        return type(first)(self.of(row) for row in zip(*values, strict=True))

    def _dataclass(self, values: Sequence[Any]) -> Any:
        first = values[0]
        changed: dict[str, Any] = {}
        for each in fields(first):
            if not each.init or each.name in _SAID:
                continue
            row = [getattr(v, each.name) for v in values]
            one = self.of(row)
            if one is not row[0]:
                changed[each.name] = one
        return replace(first, **changed) if changed else first

    def _number(self, values: tuple[Any, ...]) -> Any:
        key = (type(values[0]), *values)
        if key not in self.known:
            self.known[key] = self._formula(values)
        return self.known[key]

    def _formula(self, values: tuple[Any, ...]) -> Any:
        products = [(of, [prod(p[k] for k in of) for p in self.points]) for of in self.products]
        if type(values[0]) is int:
            for of, sizes in products:
                low, high = sizes.index(min(sizes)), sizes.index(max(sizes))
                factor = Fraction(values[high] - values[low], sizes[high] - sizes[low])
                offset = values[low] - factor * sizes[low]
                fits = all(factor * n + offset == v for n, v in zip(sizes, values, strict=True))
                if fits and factor and offset.denominator == 1:
                    return Size(factor, of, int(offset))
        if type(values[0]) is float:
            for of, sizes in products:
                scale: float = values[0] * sizes[0]
                if all(scale / n == v for n, v in zip(sizes, values, strict=True)):
                    return Reciprocal(scale, of)
        raise NotAlikeError(f"{values} follow from no size of {self.points}")


def _empty(program: Program, name: str) -> Any:
    value = getattr(program, name)
    if isinstance(value, StoredState):
        return StoredState()
    if isinstance(value, Mapping):
        return {}
    return type(value)() if isinstance(value, str | tuple) else None


def _at(value: Any, sizes: Sequence[int]) -> Any:
    """A thing with every formula as its value."""
    if isinstance(value, Size | Reciprocal):
        return value.at(sizes)
    if isinstance(value, tuple | list):
        items = [_at(x, sizes) for x in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    if isinstance(value, Mapping):
        return {k: _at(x, sizes) for k, x in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        changed = {}
        for each in fields(value):
            before = getattr(value, each.name)
            after = _at(before, sizes)
            if after is not before and each.init:
                changed[each.name] = after
        return replace(value, **changed) if changed else value
    return value
