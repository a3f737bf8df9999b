"""Causal attention of one slice of the sequence: its queries with the keys and values up to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoshard.ir import Arg, Node, Ref, TensorType
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.placement import Shard
from autoshard.passes.sequence.slice_places import ATTENTION_BACKWARD, POSITIONS
from autoshard.rules.attention import rows_args

if TYPE_CHECKING:
    from autoshard.passes.sequence.slice_emit import SliceEmitter


def _seen(to: SliceEmitter, inner: str, value: str, number: int) -> str:
    """Keys or values up to a slice."""
    if value in to.of.again:
        # what backward recomputes of a slice comes too late for the slices behind it
        inner, value = to.inner(inner, "_kept"), to.of.again[value]
    if number == 0:
        return to.piece(inner, value, POSITIONS, 0)
    end = f"_to{number}"
    name = to.inner(inner, end)
    if name in to.group.made:
        return name
    parts = [to.piece(inner, value, POSITIONS, k) for k in range(number + 1)]
    args = (tuple(Ref(p) for p in parts), POSITIONS.dim)
    return to.added(inner, value, "aten.cat.default", args, _up_to(to, value, number), end)


def _up_to(to: SliceEmitter, value: str, number: int) -> PlacedValue:
    """What the slices of a value up to one are."""
    full, one = to.of.values[value], to.of.sliced(value, POSITIONS, number)
    shape = list(one.type.shape)
    shape[POSITIONS.dim] = to.of.slices.seen(full.type.shape[POSITIONS.dim], number)
    return PlacedValue(TensorType(tuple(shape), full.type.dtype), one.layout)


def _span(to: SliceEmitter, value: str, number: int) -> tuple[int, int]:
    """From which position to which a slice of queries, or of keys, is."""
    return to.of.slices.span(to.of.values[value].type.shape[POSITIONS.dim], number)


def _mask(to: SliceEmitter, inner: str, value: str, number: int) -> str:
    """The part of a mask [..., s, s] for the queries of a slice and the keys up to it."""
    end = f"_to{number}"
    name = to.inner(inner, end)
    if name in to.group.made:
        return name
    dim = len(to.of.values[value].type.shape) - 2
    rows = to.piece(inner, value, Shard(dim), number)
    what = to.of.sliced(value, Shard(dim), number)
    seen = to.of.slices.seen(to.of.values[value].type.shape[-2], number)
    new = PlacedValue(TensorType((*what.type.shape[:-1], seen), what.type.dtype), what.layout)
    return to.added(inner, value, "aten.slice.Tensor", (Ref(rows), dim + 1, 0, seen), new, end)


def _mask_of_keys(to: SliceEmitter, inner: str, value: str, number: int) -> str:
    """The part of a mask [..., 1, s] for the keys up to a slice."""
    if number == len(to.of.slices) - 1:
        return to.whole(inner, value)
    end = f"_to{number}"
    name, full = to.inner(inner, end), to.of.values[value]
    if name in to.group.made:
        return name
    *rest, length = full.type.shape
    seen = to.of.slices.seen(length, number)
    new = PlacedValue(TensorType((*rest, seen), full.type.dtype), full.layout)
    args = (Ref(to.whole(inner, value)), len(rest), 0, seen)
    return to.added(inner, value, "aten.slice.Tensor", args, new, end)


def _hidden(to: SliceEmitter, masks: list[tuple[str, str]], number: int) -> Arg:
    """The mask of a slice's queries, None without one."""
    if not masks:
        return None
    inner, value = masks[0]
    by_keys = to.of.values[value].type.shape[-2] == 1
    return Ref((_mask_of_keys if by_keys else _mask)(to, inner, value, number))


def attend(to: SliceEmitter, number: int) -> None:
    """Attention of a slice's queries to the keys and values up to it."""
    (q, query), (k, key), (v, value), *masks = to.uses()
    args: tuple[Arg, ...] = (
        Ref(to.piece(q, query, POSITIONS, number)),
        Ref(_seen(to, k, key, number)),
        Ref(_seen(to, v, value, number)),
    )
    mask, causal = _hidden(to, masks, number), to.node.args[4]
    if causal and number:
        rows = rows_args(to.node, 5, _span(to, to.statement.makes[0], number)[0], mask)
        _attend(to, "autoshard.sdpa_rows.default", (*args, *rows), number)
    else:
        _attend(to, to.node.op, (*args, mask, *to.node.args[4:]), number)


def _attend(to: SliceEmitter, op: str, args: tuple[Arg, ...], number: int) -> None:
    end = f"_s{number}"
    outs = tuple(to.inner(o, end) for o in to.node.outs)
    whats = [to.of.sliced(value, POSITIONS, number) for value in to.statement.makes]
    for out, value, what in zip(outs, to.statement.makes, whats, strict=True):
        to.mark(out, to.of.outer(value, end), what)
    types = tuple(w.type for w in whats)
    to.emit(Node(op, args, (), outs, types, to.node.origin, to.statement.backward))


def attend_backward(to: SliceEmitter, number: int) -> None:
    """Gradients of a slice's queries, and what they add to those of the keys and values they see."""
    (g, grad), (q, query), (k, key), (v, value), (o, out), (e, lse), *masks = to.uses()
    args: list[Arg] = [
        Ref(to.piece(g, grad, POSITIONS, number)),
        Ref(to.piece(q, query, POSITIONS, number)),
        Ref(_seen(to, k, key, number)),
        Ref(_seen(to, v, value, number)),
        Ref(to.piece(o, out, POSITIONS, number)),
        Ref(to.piece(e, lse, POSITIONS, number)),
    ]
    first, *rest = zip(to.node.outs, to.statement.makes, strict=True)
    own = to.inner(first[0], f"_s{number}")
    end = f"_sum{number}" if number == len(to.of.slices) - 1 else f"_by{number}"
    added = [to.inner(inner, end) for inner, _ in rest]
    whats = [_up_to(to, value, number) for _, value in rest]
    rows = to.of.sliced(first[1], POSITIONS, number)
    to.mark(own, to.of.outer(first[1], f"_s{number}"), rows)
    for name, (_, value_), what in zip(added, rest, whats, strict=True):
        to.mark(name, to.of.outer(value_, end), what)
    types = (rows.type, *(w.type for w in whats))
    mask = _hidden(to, masks, number)
    op, last = ATTENTION_BACKWARD, (mask, *to.node.args[7:])
    if to.node.args[7] and number:
        op = "autoshard.sdpa_rows_backward.default"
        last = rows_args(to.node, 8, _span(to, first[1], number)[0], mask)
    origin = to.node.origin
    to.emit(Node(op, (*args, *last), (), (own, *added), types, origin, to.statement.backward))
    for name, (inner, value_), what in zip(added, rest, whats, strict=True):
        _gathered(to, name, inner, value_, what, number)


def _gathered(to: SliceEmitter, name: str, inner: str, value: str, what: PlacedValue, number: int) -> None:
    """The gradients of keys up to a slice, with what later slices have added: its own are complete."""
    begin, end = _span(to, value, number)
    if number < len(to.of.slices) - 1:
        before = to.given(
            to.inner(inner, f"_sum{number + 1}"),
            to.of.outer(value, f"_sum{number + 1}"),
            _up_to(to, value, number + 1),
        )
        span = (POSITIONS.dim, 0, end)
        rest = to.added(inner, value, "aten.slice.Tensor", (Ref(before), *span), what, f"_before{number}")
        name = to.added(
            inner,
            value,
            "aten.add.Tensor",
            (Ref(rest), Ref(name)),
            what,
            f"_sum{number}" if number else "_s0",
        )
    if number:
        span = (POSITIONS.dim, begin, end)
        one = to.of.sliced(value, POSITIONS, number)
        to.added(inner, value, "aten.slice.Tensor", (Ref(name), *span), one, f"_s{number}")
