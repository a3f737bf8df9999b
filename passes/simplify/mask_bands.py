"""What a mask of attention says, if a few numbers say it: which keys a query attends to.

A mask is read backwards through what made it: comparisons of positions, *and*, *not*, masks of keys alone,
and numbers that are added to scores (0: attend, lowest: not). Documents that are packed into one sequence are
equal numbers of key and query; positions that begin anew in each of them are places in the sequence there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

from autoshard.ir import DTYPES, Folded, Node, TensorType, refs_of
from autoshard.passes.simplify.causal_masks import BOTH, MOST, NUMBERS, evaluated

#: (number of a call, -1 for what the model is given; value of its segment, or of main)
Place: TypeAlias = tuple[int, str]
Side: TypeAlias = Literal["keys", "queries"]

_SAME = ("aten.expand.default", "aten.alias.default", "aten.clone.default", "aten.detach.default")
_VIEWS = ("aten.unsqueeze.default", "aten.view.default", "aten.reshape.default")
_FLOATS = ("f64", "f32", "f16", "bf16")
_CAST = "aten._to_copy.default"
_EITHER = ("aten.bitwise_or.Tensor", "aten.logical_or.default")
_NOT = ("aten.bitwise_not.default", "aten.logical_not.default")
#: comparison -> (first minus second at least, at most), of integers
_COMPARED = {"le": (None, 0), "lt": (None, -1), "ge": (0, None), "gt": (1, None)}
_OPPOSITE = {"le": "gt", "lt": "ge", "ge": "lt", "gt": "le", "eq": "ne", "ne": "eq"}


@dataclass(frozen=True)
class Bounds:
    """Of the number of the key minus that of the query. None: any."""

    lower: int | None = None
    upper: int | None = None

    def __and__(self, other: Bounds) -> Bounds:
        lower = [n for n in (self.lower, other.lower) if n is not None]
        upper = [n for n in (self.upper, other.upper) if n is not None]
        return Bounds(max(lower, default=None), min(upper, default=None))


@dataclass(frozen=True)
class Band:
    """Which keys a query attends to: those that every field allows.

    by_place: by their places in the sequence. keys: where masks of keys alone are made. documents: numbers
    [b, s] that must be equal. by_number: by other numbers [b, s]. lowest: whether the lowest number of a type
    hides, as minus infinity does where any key is left.
    """

    by_place: Bounds = Bounds()
    keys: frozenset[Place] = frozenset()
    documents: frozenset[Place] = frozenset()
    by_number: frozenset[tuple[Place, Bounds]] = frozenset()
    lowest: bool = False

    def __and__(self, other: Band) -> Band:
        return Band(
            self.by_place & other.by_place,
            self.keys | other.keys,
            self.documents | other.documents,
            self.by_number | other.by_number,
            self.lowest or other.lowest,
        )


@dataclass(frozen=True)
class _Row:
    """Numbers [.., 1, t] of the keys or [.., s, 1] of the queries: those made at ``source`` [b, s], or places
    in the sequence, and ``plus``."""

    side: Side
    source: Place | None
    plus: int


class MaskReader:
    """What is known of the masks of a model."""

    def __init__(self, folded: Folded) -> None:
        self.folded = folded
        self._makers = {s: {o: n for n in g.nodes for o in n.outs} for s, g in folded.segments.items()}
        self.types = {s: g.types() for s, g in folded.segments.items()}
        self.ports = {p.name: p.type for p in folded.joint.ports}
        self.made = {o: (k, c.segment, p) for k, c in enumerate(folded.calls) for p, o in enumerate(c.outs)}
        self._given = {s: {n: k for k, (n, _) in enumerate(g.inputs)} for s, g in folded.segments.items()}
        self._known: dict[tuple[Place, bool], Band | None] = {}

    def place(self, number: int, value: str) -> Place:
        """Where a value of a call is made."""
        while True:
            call = self.folded.calls[number]
            position = self._given[call.segment].get(value)
            if position is None:
                return number, value
            main = call.args[position]
            if main not in self.made:
                return -1, main
            number, segment, place = self.made[main]
            value = self.folded.segments[segment].outputs[place]

    def type_of(self, place: Place) -> TensorType:
        number, value = place
        return self.ports[value] if number < 0 else self.types[self.folded.calls[number].segment][value]

    def band(self, place: Place) -> Band | None:
        """Which keys a mask lets queries attend to; None if that is not known."""
        band = self._band(place)
        if band is None:
            return None
        counting = {self._counted_by(d) for d in band.documents}
        if any(source not in counting for source, _ in band.by_number):
            return None
        by_place = band.by_place
        for _, bounds in band.by_number:
            by_place &= bounds
        return replace(band, by_place=by_place, by_number=frozenset())

    def _node(self, place: Place) -> Node | None:
        number, value = place
        return None if number < 0 else self._makers[self.folded.calls[number].segment][value]

    def _uses(self, place: Place, node: Node) -> list[Place]:
        return [self.place(place[0], ref) for ref in refs_of(node)]

    # -- masks -----------------------------------------------------------------------------------------

    def _band(self, place: Place, shown: bool = True) -> Band | None:
        """Where a mask is true (zero, of numbers to add), or where it is false."""
        if (place, shown) not in self._known:
            self._known[place, shown] = self._find(place, shown)
        return self._known[place, shown]

    def _both(self, uses: Sequence[Place], shown: bool = True) -> Band | None:
        first, second = (self._band(u, shown) for u in uses)
        return None if first is None or second is None else first & second

    def _find(self, place: Place, shown: bool) -> Band | None:
        type_, node = self.type_of(place), self._node(place)
        if shown and self._all_true(place, type_):
            return Band()
        if shown and type_.dtype == "bool" and type_.shape[-2:-1] == (1,):
            return Band(keys=frozenset((place,)))
        if node is None:
            return None
        uses, op = self._uses(place, node), node.op
        if op in _SAME or op in _VIEWS:
            return self._viewed(op, self._band(uses[0], shown), self.type_of(uses[0]).shape, type_.shape)
        if type_.dtype != "bool":
            return self._added(node, uses) if shown and type_.dtype in _FLOATS else None
        if op in BOTH and len(uses) == 2:
            return self._both(uses) if shown else None
        if op in _EITHER:
            return None if shown else self._both(uses, shown=False)
        if op in _NOT:
            return self._band(uses[0], not shown)
        name, _, kind = op.removeprefix("aten.").partition(".")
        if name in _OPPOSITE:
            name = name if shown else _OPPOSITE[name]
            if kind == "Scalar":
                return self._apart(name, uses[0], node.args[1], type_.shape)
            return self._compared(name, uses, type_.shape)
        triangle = self._triangle(place)
        return _triangle(triangle[0], shown) if triangle and triangle[1] else None

    def _all_true(self, place: Place, type_: TensorType) -> bool:
        if type_.dtype != "bool" or min(type_.shape[-2:], default=1) > 1:
            return False
        numbers = self._numbers(place)
        return numbers is not None and bool(numbers.all())

    def _viewed(
        self, op: str, band: Band | None, source: tuple[int, ...], shape: tuple[int, ...]
    ) -> Band | None:
        """What a view of a mask says."""
        # keys alone may be repeated for every query; views may exchange leading dims, which keys have
        repeated = op in _SAME and len(source) > 1 and source[-2:] == (1, shape[-1])
        same = source[-2:] == shape[-2:] and (op in _SAME or not (band and band.keys))
        return band if repeated or same else None

    def _added(self, node: Node, uses: Sequence[Place]) -> Band | None:
        """Of numbers to add: where they are zero. All others are the lowest."""
        if node.op == "aten.add.Tensor" and len(uses) == 2 and not node.kwargs:
            return self._both(uses)
        if node.op == "aten.masked_fill.Scalar" and _lowest(node.args[2], self.type_of(uses[0])):
            rest, hidden = self._band(uses[0]), self._band(uses[1], shown=False)
            return None if rest is None or hidden is None else rest & replace(hidden, lowest=True)
        if node.op == "aten.where.self" and len(uses) == 3:
            filled = [self._filled(u) for u in uses[1:]]
            for zero, low, shown in ((filled[0], filled[1], True), (filled[1], filled[0], False)):
                if zero == 0 and _lowest(low, self.type_of(uses[1])):
                    band = self._band(uses[0], shown)
                    return None if band is None else replace(band, lowest=True)
        if node.op == "aten.full.default":
            return Band() if node.args[1] == 0 else None
        if node.op == _CAST and self.type_of(uses[0]).dtype in _FLOATS:
            return self._band(uses[0])
        if node.op in _TRIANGLES and _lowest(self._filled(uses[0]), self.type_of(uses[0])):
            return replace(_triangle(node, shown=False), lowest=True)
        return None

    def _filled(self, place: Place) -> float | None:
        """The number that all elements are."""
        node = self._node(place)
        if node is None:
            return None
        if node.op in (*_SAME, *_VIEWS, _CAST):
            value = self._filled(self._uses(place, node)[0])
            return None if value is None else _as(value, self.type_of(place))
        result = node.args[_MADE_OF[node.op]] if node.op in _MADE_OF else None
        return _as(result, self.type_of(place)) if isinstance(result, int | float) else None

    def _triangle(self, place: Place) -> tuple[Node, float] | None:
        """What makes a triangle of one number, and the number; all other elements are zero."""
        node = self._node(place)
        if node is None:
            return None
        source = next(iter(self._uses(place, node)), None)
        if source is None:
            return None
        if node.op in (*_SAME, *_VIEWS, _CAST):
            result = self._triangle(source)
            same = self.type_of(source).shape[-2:] == self.type_of(place).shape[-2:]
            return (result[0], _as(result[1], self.type_of(place))) if result and same else None
        value = self._filled(source) if node.op in _TRIANGLES else None
        return None if value is None else (node, value)

    # -- comparisons -----------------------------------------------------------------------------------

    def _rows(self, uses: Sequence[Place], shape: tuple[int, ...]) -> tuple[_Row, _Row] | None:
        """Numbers of keys [.., 1, t] and of queries [.., s, 1] that can be compared, in their order."""
        if len(uses) != 2:
            return None
        first, second = (self._row(u, shape) for u in uses)
        if first is None or second is None or first.side == second.side or first.source != second.source:
            return None
        alike = first.source is None or len({self.type_of(u).shape[:-2] for u in uses}) == 1
        return (first, second) if alike else None

    def _compared(self, name: str, uses: Sequence[Place], shape: tuple[int, ...]) -> Band | None:
        """A comparison of numbers of keys with those of queries."""
        rows = self._rows(uses, shape)
        if rows is None:
            return None
        first, second = rows
        if name == "eq" and first.source is not None and first.plus == second.plus:
            return Band(documents=frozenset((first.source,)))
        return _banded(first, second, *_COMPARED[name]) if name in _COMPARED else None

    def _apart(self, name: str, place: Place, limit: object, shape: tuple[int, ...]) -> Band | None:
        """A comparison of a difference of keys' and queries' numbers, or of its size, with a number."""
        node = self._node(place)
        if node is None or name not in _COMPARED or not isinstance(limit, int):
            return None
        size = node.op == "aten.abs.default"
        if size:
            place = self._uses(place, node)[0]
            node = self._node(place)
        if node is None or node.op != "aten.sub.Tensor" or node.kwargs:
            return None
        rows = self._rows(self._uses(place, node), shape)
        lower, upper = (None if n is None else n + limit for n in _COMPARED[name])
        if rows is None or (size and upper is None):
            return None
        return _banded(*rows, -upper if size and upper is not None else lower, upper)

    def _row(self, place: Place, shape: tuple[int, ...]) -> _Row | None:
        """Numbers of keys or of queries of a mask of this shape."""
        type_ = self.type_of(place)
        own = type_.shape if len(type_.shape) > 1 else (1, *type_.shape)
        if len(shape) < 2 or shape[-1] == 1 or type_.dtype[0] not in "iu":
            return None
        sides: dict[tuple[int, ...], Side] = {(1, shape[-1]): "keys", (shape[-2], 1): "queries"}
        side = sides.get(own[-2:])
        if side is None:
            return None
        numbers = self._numbers(place) if max(own) == type_.numel else None
        if numbers is not None:
            flat = numbers.reshape(-1)
            first = int(flat[0])
            counted = torch.equal(flat, torch.arange(first, first + len(flat)))
            return _Row(side, None, first) if counted else None
        source, plus = self._source(place)
        given = self.type_of(source)
        fits = len(given.shape) == 2 and given.shape[1] == max(own[-2:]) and given.numel == type_.numel
        return _Row(side, source, plus) if fits and shape[-1] == shape[-2] else None

    def _source(self, place: Place) -> tuple[Place, int]:
        """Where numbers come from that are only laid out in another way, and what is added to them."""
        node = self._node(place)
        if node is None:
            return place, 0
        uses = self._uses(place, node)
        if node.op in _VIEWS or (node.op in _SAME and self._same_size(place, uses[0])):
            return self._source(uses[0])
        added = node.args[1] if len(node.args) == 2 and not node.kwargs else None
        if node.op in ("aten.add.Tensor", "aten.sub.Tensor") and isinstance(added, int):
            source, plus = self._source(uses[0])
            return source, plus + (added if node.op == "aten.add.Tensor" else -added)
        if node.op == "aten.index.Tensor" and self._in_order(place, uses):
            return self._source(uses[0])
        return place, 0

    def _same_size(self, place: Place, other: Place) -> bool:
        return self.type_of(place).numel == self.type_of(other).numel

    def _in_order(self, place: Place, uses: Sequence[Place]) -> bool:
        """Whether a row [b, s] is indexed by all of its sequences and, in each, all of its elements."""
        if len(uses) != 3 or not self._same_size(place, uses[0]):
            return False
        given, numbers = self.type_of(uses[0]).shape, [self._numbers(u) for u in uses[1:]]
        dims = [-k for n in numbers if n is not None for k in range(n.dim(), 0, -1) if n.shape[-k] > 1]
        return (
            len(given) == 2
            and dims == sorted(dims)
            and all(
                n is not None and torch.equal(n.reshape(-1), torch.arange(size))
                for n, size in zip(numbers, given, strict=True)
            )
        )

    def _numbers(self, place: Place) -> torch.Tensor | None:
        """A value that depends on no input; None if it does, or is not that simple."""
        node = self._node(place)
        if node is None or node.op not in NUMBERS | _CONSTANT or self.type_of(place).numel > MOST:
            return None
        given = [self._numbers(use) for use in self._uses(place, node)]
        known = [n for n in given if n is not None]
        return evaluated(node, iter(known)) if len(known) == len(given) else None

    # -- documents -------------------------------------------------------------------------------------

    def _counted_by(self, documents: Place) -> Place | None:
        """Numbers [b, s] that grow by one from place to place in each document.

        That is known where they tell documents apart: ``(n - number before != 1).cumsum(-1)``.
        """
        node = self._node(documents)
        if node is None or node.op != "aten.cumsum.default" or node.args[1] not in (-1, 1):
            return None
        (place,) = self._uses(documents, node)
        node = self._node(place)
        if node is None or node.op != "aten.ne.Scalar" or node.args[1] != 1:
            return None
        (place,) = self._uses(place, node)
        node = self._node(place)
        if node is None or node.op != "aten.sub.Tensor" or node.kwargs:
            return None
        uses = self._uses(place, node)
        if len(uses) != 2:
            return None
        here, before = (self._shifted(u) for u in uses)
        fits = here[0] == before[0] and (here[1], before[1]) == (0, -1) and max(here[2], before[2]) <= 1
        return here[0] if fits else None

    def _shifted(self, place: Place) -> tuple[Place, int, int]:
        """(source, n, first): from ``first`` on, element m of a row is element m + n of the source's."""
        node, last = self._node(place), len(self.type_of(place).shape) - 1
        uses = [] if node is None else self._uses(place, node)
        if node is not None and node.op == "aten.slice.Tensor" and len(node.args) == 4:
            _, dim, start, _ = node.args
            if dim in (-1, last) and isinstance(start, int) and start >= 0:
                source, by, first = self._shifted(uses[0])
                return source, by + start, first - start
        joined = node is not None and node.op == "aten.cat.default" and node.arg(1, "dim", 0) in (-1, last)
        if joined and len(uses) == 2:
            size = self.type_of(uses[0]).shape[-1]
            source, by, first = self._shifted(uses[1])
            return source, by - size, max(size, first + size)
        source, plus = self._source(place)
        return (source, 0, 0) if plus == 0 else (place, 0, 0)


#: ops that make one number, and which argument that is
_MADE_OF = {"aten.full.default": 1, "aten.scalar_tensor.default": 0}
_TRIANGLES = ("aten.tril.default", "aten.triu.default")
_CONSTANT = frozenset(f"aten.{n}.Scalar" for n in ("ge", "gt", "le", "lt", "eq", "ne"))


def _triangle(node: Node, shown: bool) -> Band:
    """Where the elements of a triangle lie, or where not."""
    diagonal = node.arg(1, "diagonal", 0)
    assert isinstance(diagonal, int)
    if (node.op == "aten.tril.default") == shown:
        return Band(Bounds(upper=diagonal if shown else diagonal - 1))
    return Band(Bounds(lower=diagonal if shown else diagonal + 1))


def _banded(first: _Row, second: _Row, lower: int | None, upper: int | None) -> Band:
    """The numbers of ``first`` minus those of ``second`` lie between the two."""
    # keys + a - (queries + b) <= n: their difference is n + b - a at most; queries may be the first of them
    apart = second.plus - first.plus
    lower, upper = (None if n is None else n + apart for n in (lower, upper))
    if first.side == "queries":
        lower, upper = (None if n is None else -n for n in (upper, lower))
    bounds = Bounds(lower, upper)
    if first.source is None:
        return Band(bounds)
    return Band(by_number=frozenset(((first.source, bounds),)))


def _as(value: float, type_: TensorType) -> float:
    """A number in a type: with what casts leave of it."""
    number: float = torch.tensor(value, dtype=torch.float64).to(getattr(torch, DTYPES[type_.dtype][0])).item()
    return number


def _lowest(value: object, type_: TensorType) -> bool:
    """Whether a number hides a key when it is added to a score of this type."""
    return isinstance(value, int | float) and value <= torch.finfo(getattr(torch, DTYPES[type_.dtype][0])).min
