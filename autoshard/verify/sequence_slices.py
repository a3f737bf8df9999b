"""Programs whose microbatches are divided into slices of their sequence, against the model as a whole.

What a program then computes are parts of terms. A part is one of

* ``piece``: slice c of a term, cut where its placement on the axis of slices says
  (`passes/sequence/slice_places.py`);
* ``share``: what some slices add to a term that is a sum over positions;
* ``upto``: slices 0 to c of a term, joined: keys and values that the queries of slice c see, and a mask of
  these keys;
* ``corner``: of a mask, the rows of slice c and the columns up to it;
* ``only``, ``seen``, ``cut``: what slice c, slices from c on, or slices from c + 1 on add to the gradients
  of the keys up to slice c.

An op of the model on parts gives parts as its rule says, the slices being shards of one more axis. The
sequence is divided for attention by what causal attention is: the queries of slice c and the keys up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from autoshard.ir import Arg, Node, Ref, TensorType
from autoshard.ir.placement import P, Partial, Placement, R, Shard
from autoshard.ir.slices import Slices
from autoshard.ir.statements import statements_of
from autoshard.passes.sequence.slice_places import ATTENTION, ATTENTION_BACKWARD, POSITIONS
from autoshard.passes.simplify.causal_masks import CausalMasks
from autoshard.rules.attention import rows_args
from autoshard.rules.local import LocalCall, MeshShape
from autoshard.verify.operators import OpChecker
from autoshard.verify.states import readings
from autoshard.verify.value_numbering import ADD, Pattern, Term, TermTable

Kind = Literal["whole", "piece", "share", "upto", "corner", "only", "seen", "cut", "apart"]
#: whether a node of the program is a pattern, on the placements that it has
Fits = Callable[[Pattern], bool]

_CUT, _JOIN, _VIEW = "aten.slice.Tensor", "aten.cat.default", "aten.reshape.default"
_ROWS, _ROWS_BACKWARD = "autoshard.sdpa_rows.default", "autoshard.sdpa_rows_backward.default"
_AXIS = "slice"


@dataclass(frozen=True, slots=True)
class Derived:
    """A part of a term. base: the term; of ``apart``, what is seen with one dim as two.

    place: where it is cut. number: of the slice. of: the slices whose shares are added up.
    """

    kind: Kind
    base: int
    place: Placement = R
    number: int = 0
    of: frozenset[int] = frozenset()


class Pieces:
    """Parts of the terms of a model, each with a number of its own."""

    def __init__(self, terms: TermTable, judge: OpChecker, slices: Slices) -> None:
        self.terms, self.judge, self.slices = terms, judge, slices
        self._known: dict[Derived, int] = {}
        self._of: dict[int, Derived] = {}

    def part(self, term: int) -> Derived:
        """What a term or a part of one is."""
        return self._of.get(term, Derived("whole", term))

    def term(self, part: Derived) -> int:
        """The number of a part; that of the whole if it is that."""
        part = self._plain(part)
        if part.kind == "whole":
            return part.base
        if part not in self._known:
            self._known[part] = self.terms.count
            self._of[self.terms.count] = part
            self.terms.types[self.terms.count] = self.type_of(part)
            self.terms.count += 1
        return self._known[part]

    def _plain(self, part: Derived) -> Derived:
        """The part under the simplest of its names."""
        last = part.number == len(self.slices) - 1
        if (part.kind == "share" and len(part.of) == len(self.slices)) or (part.kind == "upto" and last):
            return Derived("whole", part.base)
        if part.kind == "corner" and last:
            return Derived("piece", part.base, part.place, part.number)
        return part

    def added(self, old: int, new: int) -> int:
        """Of a value that several slices make: the sum of their shares, which the runtime adds up."""
        if old == new:
            return new
        a, b = self.part(old), self.part(new)
        if a.kind == b.kind == "share" and a.base == b.base and not a.of & b.of:
            return self.term(Derived("share", a.base, P, 0, a.of | b.of))
        return -1

    def type_of(self, part: Derived) -> TensorType:
        """Global type of a part."""
        full = self.terms.types[part.base]
        assert full is not None
        shape = list(full.shape)
        if part.kind == "piece":
            shape = list(self.slices.local_shape(full.shape, part.place, part.number))
        elif part.kind in ("upto", "only", "seen", "cut"):
            assert isinstance(part.place, Shard)
            shape[part.place.dim] = self.slices.seen(shape[part.place.dim], part.number)
        elif part.kind == "corner":
            shape[-2] = self.slices.size(shape[-2], part.number)
            shape[-1] = self.slices.seen(shape[-1], part.number)
        elif part.kind == "apart":
            assert isinstance(part.place, Shard)
            dim, outer = part.place.dim, part.place.outer
            shape[dim : dim + 1] = [outer, shape[dim] // outer]
        return replace(full, shape=tuple(shape))

    # -- what a node makes ---------------------------------------------------------------------------

    def made(self, node: Node, taken: tuple[int, ...], site: int, fits: Fits) -> tuple[int, ...] | None:
        """The parts that a node of the program makes of others, None if it makes none.

        node: positional. fits: whether it is a pattern.
        """
        for pattern, parts in self._candidates(node, taken, site):
            if fits(pattern):
                return tuple(self.term(p) for p in parts)
        return None

    def near(self, node: Node, taken: tuple[int, ...], site: int) -> list[Pattern]:
        """What a node of the program might be, given what it takes."""
        return [pattern for pattern, _ in self._candidates(node, taken, site)]

    def _candidates(
        self, node: Node, taken: tuple[int, ...], site: int
    ) -> Iterator[tuple[Pattern, tuple[Derived, ...]]]:
        parts = tuple(self.part(t) for t in taken)
        # first what the model does itself: it may cut and join, too
        yield from self._attention(parts)
        yield from self._sliced(parts, site)
        if node.op == _CUT and len(parts) == 1:
            yield from self._cut(node, parts[0], taken[0])
        if node.op == _JOIN:
            yield from self._joined(node, parts, taken)
        if node.op == _VIEW and len(parts) == 1:
            yield from self._viewed(node, parts[0], taken[0])
        if node.op == ADD and len(parts) == 2:
            yield from self._sum(node, parts, taken)

    def options(self, taken: tuple[int, ...], site: int) -> Iterator[tuple[Pattern, tuple[int, ...]]]:
        """(pattern, what it makes) of every op of the model that takes these parts."""
        for pattern, parts in self._sliced(tuple(self.part(t) for t in taken), site):
            yield pattern, tuple(self.term(p) for p in parts)

    def _pattern(
        self, op: str, args: tuple[Arg, ...], taken: tuple[int, ...], *outs: Derived
    ) -> tuple[Pattern, tuple[Derived, ...]]:
        """An op that makes parts, as a pattern on what it takes."""
        ins = [self.terms.types[t] for t in taken]
        types = tuple(self.type_of(o) if o.kind != "whole" else self.terms.types[o.base] for o in outs)
        names = tuple(f"o{k}" for k in range(len(outs)))
        return self.terms.patterns.of(Node(op, args, (), names, types), [t for t in ins if t]), outs

    # -- cutting and joining ---------------------------------------------------------------------------

    def _cut(self, node: Node, part: Derived, term: int) -> Iterator[tuple[Pattern, tuple[Derived, ...]]]:
        type_ = self.terms.types[term]
        if type_ is None or node.types[0] is None or len(node.types[0].shape) != len(type_.shape):
            return
        before, after = type_.shape, node.types[0].shape
        for dim in (d for d in range(len(before)) if before[d] != after[d]):
            size = after[dim]
            for number in range(len(self.slices)):
                span = self._span(part, dim, size, number, before)
                if span is not None:
                    args = (Ref("0"), dim, *span[1])
                    yield self._pattern(_CUT, args, (term,), span[0])

    def _span(
        self, part: Derived, dim: int, size: int, number: int, before: tuple[int, ...]
    ) -> tuple[Derived, tuple[int, int]] | None:
        """(what is cut out, from where to where) of a part along a dim, None if that is no part."""
        slices = self.slices
        if part.kind == "seen" and dim == POSITIONS.dim:
            full = before[dim] // slices.cumulative[part.number] * slices.units
            if number == part.number - 1 and size == slices.seen(full, number):
                return Derived("cut", part.base, POSITIONS, number), (0, size)
            if number == part.number and size == slices.size(full, number) and number:
                return Derived("piece", part.base, POSITIONS, number), slices.span(full, number)
        extent = before[dim]
        if extent % slices.units:
            return None
        if part.kind == "whole" and size == slices.size(extent, number):
            return Derived("piece", part.base, Shard(dim), number), slices.span(extent, number)
        if part.kind == "whole" and size == slices.seen(extent, number) and dim == len(before) - 1:
            return Derived("upto", part.base, Shard(dim), number), (0, size)
        if part.kind == "apart" and isinstance(part.place, Shard) and dim == part.place.dim + 1:
            inner = self.part(part.base)
            if inner.kind == "whole" and size == slices.size(extent, number):
                cut = self.term(Derived("piece", part.base, part.place, number))
                return Derived("apart", cut, part.place), slices.span(extent, number)
        rows = part.kind == "piece" and part.place == Shard(len(before) - 2) and dim == len(before) - 1
        if rows and part.number == number and size == slices.seen(extent, number):
            return Derived("corner", part.base, part.place, number), (0, size)
        return None

    def _joined(
        self, node: Node, parts: tuple[Derived, ...], taken: tuple[int, ...]
    ) -> Iterator[tuple[Pattern, tuple[Derived, ...]]]:
        first = parts[0]
        args = (tuple(Ref(str(k)) for k in range(len(parts))), *node.args[1:])
        if first.kind == "apart" and isinstance(first.place, Shard):
            inner = [self.part(p.base) for p in parts]
            alike = all(p.kind == "apart" and p.place == first.place for p in parts)
            base = inner[0].base
            wanted = [Derived("piece", base, first.place, k) for k in range(len(self.slices))]
            if alike and inner == wanted and node.args[1] == first.place.dim + 1:
                yield self._pattern(_JOIN, args, taken, Derived("apart", base, first.place))
            return
        if first.kind != "piece" or not isinstance(first.place, Shard) or first.place.outer > 1:
            return
        if list(parts) != [Derived("piece", first.base, first.place, k) for k in range(len(parts))]:
            return
        if node.args[1] != first.place.dim:
            return
        if len(parts) == len(self.slices):
            yield self._pattern(_JOIN, args, taken, Derived("whole", first.base))
        if first.place == POSITIONS:
            yield self._pattern(_JOIN, args, taken, Derived("upto", first.base, POSITIONS, len(parts) - 1))

    def _viewed(self, node: Node, part: Derived, term: int) -> Iterator[tuple[Pattern, tuple[Derived, ...]]]:
        """A dim seen as two, the outer one first, and back."""
        type_, new = self.terms.types[term], node.types[0]
        if type_ is None or new is None:
            return
        if part.kind == "apart":
            back = self.part(part.base)
            yield self._pattern(_VIEW, (Ref("0"), new.shape), (term,), back)
        if part.kind in ("whole", "piece") and len(new.shape) == len(type_.shape) + 1:
            for dim in range(len(type_.shape)):
                wide = Derived("apart", term, Shard(dim, new.shape[dim]))
                if self.type_of(wide) == new:
                    yield self._pattern(_VIEW, (Ref("0"), new.shape), (term,), wide)

    # -- sums ------------------------------------------------------------------------------------------

    def _sum(
        self, node: Node, parts: tuple[Derived, ...], taken: tuple[int, ...]
    ) -> Iterator[tuple[Pattern, tuple[Derived, ...]]]:
        a, b = parts
        args = (Ref("0"), Ref("1"))
        if a.kind == b.kind == "share":
            if a.base == b.base and not a.of & b.of:
                yield self._pattern(ADD, args, taken, Derived("share", a.base, P, 0, a.of | b.of))
            elif a.of == b.of:
                # the sum of two gradients, of which every slice has a share
                types = [self.terms.types[t] for t in (a.base, b.base)]
                full = self.terms.patterns.of(node, [t for t in types if t])
                base = self.terms.make(full, ((a.base, b.base), -1)).outs[0]
                yield self._pattern(ADD, args, taken, Derived("share", base, P, 0, a.of))
        for first, second in ((a, b), (b, a)):
            same = first.base == second.base and first.number == second.number
            if first.kind == "cut" and second.kind == "only" and same:
                yield self._pattern(ADD, args, taken, self._seen(first.base, first.number))

    def _seen(self, base: int, number: int) -> Derived:
        """What slices from one on add to the gradients of the keys up to it; of slice 0, all of it."""
        if number == 0:
            return Derived("piece", base, POSITIONS, 0)
        return Derived("seen", base, POSITIONS, number)

    # -- attention -------------------------------------------------------------------------------------

    def _attention(self, parts: tuple[Derived, ...]) -> Iterator[tuple[Pattern, tuple[Derived, ...]]]:
        bases = tuple(p.base for p in parts)
        for new in self.terms.by_uses.get((bases, -1), ()):
            op = new.pattern.node.op
            if op == ATTENTION and len(parts) in (3, 4):
                yield from self._attend(new, parts, 0)
            elif op == ATTENTION_BACKWARD and len(parts) in (6, 7):
                yield from self._attend(new, parts, 1)

    def _attend(
        self, made: Term, parts: tuple[Derived, ...], back: int
    ) -> Iterator[tuple[Pattern, tuple[Derived, ...]]]:
        """Attention of the queries of one slice, if it is causal. back: 1 for its gradients."""
        node, query = made.pattern.node, parts[back]
        number = query.number
        count = 6 if back else 3
        mask, causal = node.args[count : count + 2]
        keys = {back + 1, back + 2}
        for k, part in enumerate(parts[:count]):
            wanted = (
                Derived("upto", part.base, POSITIONS, number)
                if k in keys and number
                else Derived("piece", part.base, POSITIONS, number)
            )
            if part != self._plain(wanted):
                return
        if isinstance(mask, Ref):
            type_ = self.terms.types[parts[count].base]
            assert type_ is not None
            base, last_dim = parts[count].base, Shard(len(type_.shape) - 1)
            if causal:
                of_keys = Derived("upto" if number else "piece", base, last_dim, number)
                if parts[count] != self._plain(of_keys):
                    return
            elif parts[count] != self._plain(
                Derived("corner", base, Shard(last_dim.dim - 1), number)
            ) or not self._hides(base):
                return
        elif not causal:
            return
        taken = tuple(self.term(p) for p in parts)
        args: tuple[Arg, ...] = node.args
        op = node.op
        if number and causal:
            assert node.types[0] is not None
            op = _ROWS_BACKWARD if back else _ROWS
            start = self.slices.span(node.types[0].shape[POSITIONS.dim], number)[0]
            args = (*node.args[:count], *rows_args(node, count + 2, start, mask))
        if not back:
            outs = tuple(Derived("piece", o, POSITIONS, number) for o in made.outs)
        else:
            first, *rest = made.outs
            last = number == len(self.slices) - 1
            added = (self._seen(o, number) if last else Derived("only", o, POSITIONS, number) for o in rest)
            outs = (Derived("piece", first, POSITIONS, number), *added)
        yield self._pattern(op, args, taken, *outs)

    @cached_property
    def _masks(self) -> tuple[CausalMasks, dict[tuple[int, int], tuple[str, ...]]]:
        full = statements_of(self.terms.original)
        return CausalMasks(full, self.slices.units), {(s.item, s.number): s.makes for s in full.all}

    def _hides(self, mask: int) -> bool:
        """Whether a mask of the model keeps every query from keys behind its slice."""
        new = self.terms.made.get(mask)
        if new is None:
            return False
        causal, names = self._masks
        makes = names.get((new.item, new.number))
        return makes is not None and causal.hides_later_slices(makes[new.outs.index(mask)])

    # -- everything else -------------------------------------------------------------------------------

    def _sliced(self, parts: tuple[Derived, ...], site: int) -> Iterator[tuple[Pattern, tuple[Derived, ...]]]:
        """An op of the model on one slice: the axis of slices is one more axis, of which this is a rank."""
        numbers = {p.number for p in parts if p.kind == "piece"}
        numbers |= {next(iter(p.of)) for p in parts if p.kind == "share" and len(p.of) == 1}
        if len(numbers) != 1 or any(p.kind not in ("whole", "piece", "share") for p in parts):
            return
        number = next(iter(numbers))
        given = tuple(P if p.kind == "share" else p.place for p in parts)
        for new in self.terms.by_uses.get((tuple(p.base for p in parts), site), ()):
            node, ins = new.pattern.node, new.pattern.ins
            rule = self.judge.factored(new.pattern)
            nothing = (None,) * len(node.types)
            for state in readings(rule, ins, node.types, given, nothing, self.slices.units):
                if state.inputs == given:
                    outs = [self._out(o, p, number) for o, p in zip(new.outs, state.outputs, strict=True)]
                    if all(o is not None for o in outs):
                        pattern = self._local(new.pattern, given, state.outputs, number)
                        yield pattern, tuple(o for o in outs if o is not None)

    def _out(self, term: int, placed: Placement | None, number: int) -> Derived | None:
        if isinstance(placed, Shard):
            return Derived("piece", term, placed, number)
        if isinstance(placed, Partial):
            return Derived("share", term, P, 0, frozenset((number,))) if placed == P else None
        return Derived("whole", term) if placed is None else None

    def _local(
        self,
        pattern: Pattern,
        given: tuple[Placement, ...],
        made: tuple[Placement | None, ...],
        number: int,
    ) -> Pattern:
        """The call for a slice: its sizes and offsets are those of a rank of the axis of slices."""
        node, rule = pattern.node, self.judge.factored(pattern)
        if rule.local is not None:
            layouts = tuple((p,) for p in given), tuple(None if p is None else (p,) for p in made)
            mesh = MeshShape((_AXIS,), (self.slices.units,), uneven=not self.slices.even)
            node = rule.local(LocalCall(node, pattern.ins, *layouts, mesh))
        args = tuple(self.slices.resolved(a, number) for a in node.args)
        kwargs = tuple((k, self.slices.resolved(v, number)) for k, v in node.kwargs)
        shape = self.slices.local_shape
        ins = [replace(t, shape=shape(t.shape, p, number)) for t, p in zip(pattern.ins, given, strict=True)]
        types = tuple(
            None if t is None or p is None else replace(t, shape=shape(t.shape, p, number))
            for t, p in zip(pattern.node.types, made, strict=True)
        )
        return self.terms.patterns.of(Node(node.op, args, kwargs, node.outs, types), ins)
