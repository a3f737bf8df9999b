"""Cutting full values into slices of the sequence, and joining slices again, as ops of a program.

A dim that is divided is seen as (outer, middle, inner) and the middle is cut (`autoshard/ir/placement.py`).
Types are global with respect to the mesh; layouts say what a rank holds, and change with what is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from autoshard.errors import UsageError
from autoshard.ir import Arg, Ref, TensorType
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.placement import Layout, Placement, R, Shard, layout_ok
from autoshard.ir.slices import Slices

#: adds a node: (op, arguments, what it makes, the end of its name) -> the name of what it makes
Add: TypeAlias = "Callable[[str, tuple[Arg, ...], PlacedValue, str], str]"


def sliced_type(type_: TensorType, placed: Placement, slices: Slices, number: int) -> TensorType:
    """The type of a slice of a value; of a term of a sum it is that of the sum."""
    return replace(type_, shape=slices.local_shape(type_.shape, placed, number))


def sliced_value(
    value: PlacedValue, placed: Placement, slices: Slices, number: int, sizes: Sequence[int], name: str
) -> PlacedValue:
    """Type and layout of one slice of a value; sizes: of the mesh axes.

    Raises UsageError if a mesh axis cannot divide a slice as it divides the whole.
    """
    type_ = sliced_type(value.type, placed, slices, number)
    if not isinstance(placed, Shard):
        return PlacedValue(type_, value.layout)
    layout = tuple(_inside(p, placed, value.type, slices, number) for p in value.layout)
    if any(p is None for p in layout) or not layout_ok(type_.shape, _known(layout), sizes):
        raise UsageError(
            f"slices of {value.type} cannot lie on the mesh as the whole does",
            where=f"value {name}, {', '.join(map(str, value.layout))}",
            why="a mesh axis divides the sequence into parts that do not divide its slices",
            hint="choose fewer slices, or a longer sequence",
        )
    return PlacedValue(type_, _known(layout))


def _known(layout: Sequence[Placement | None]) -> Layout:
    return tuple(p for p in layout if p is not None)


def _inside(p: Placement, placed: Shard, type_: TensorType, slices: Slices, number: int) -> Placement | None:
    """The placement of a mesh axis on a slice; None if it cuts the sequence at other places."""
    if not isinstance(p, Shard) or p.dim != placed.dim:
        return p
    size = type_.shape[p.dim]
    if p.outer > placed.outer:
        # a part of the dim inside the sequence: there are fewer blocks of it
        blocks = placed.outer * slices.units
        return replace(p, outer=slices.size(p.outer, number)) if p.outer % blocks == 0 else None
    if p.inner == 1:
        return p
    # whole multiples of `inner` elements: the sequence is in them, or they are in the sequence
    middle = size // (p.outer * p.inner)
    if placed.outer % (p.outer * middle) == 0:
        return replace(p, inner=slices.size(p.inner, number))
    return p if p.outer == placed.outer and middle % slices.units == 0 else None


def full_along(value: PlacedValue, placed: Shard) -> PlacedValue:
    """The value as every rank can cut it: whole on those axes of the mesh that divide the sequence itself."""
    middle = value.type.shape[placed.dim] // placed.outer

    def apart(p: Placement) -> bool:
        if not isinstance(p, Shard) or p.dim != placed.dim:
            return True
        outside = p.outer < placed.outer and placed.outer % p.outer == 0
        return outside or p.outer % (placed.outer * middle) == 0

    return PlacedValue(value.type, tuple(p if apart(p) else R for p in value.layout))


def moved_off(value: PlacedValue, bare: PlacedValue, dim: int, sizes: Sequence[int]) -> PlacedValue | None:
    """The value with those axes that divide its sequence on another dim; None if no other has room for all.

    bare: see `full_along`. dim: of the sequence. sizes: of the mesh axes.
    """
    layout, shape = list(bare.layout), value.type.shape
    for axis, (before, after) in enumerate(zip(value.layout, bare.layout, strict=True)):
        if before == after:
            continue
        for other in reversed([d for d in range(len(shape)) if d != dim]):
            layout[axis] = Shard(other)
            if shape[other] % sizes[axis] == 0 and layout_ok(shape, tuple(layout), sizes):
                break
        else:
            return None
    return PlacedValue(value.type, tuple(layout))


def cut(
    value: str, have: PlacedValue, placed: Shard, number: int, made: PlacedValue, slices: Slices, add: Add
) -> str:
    """Slice ``number`` of a full value. have, made: what it is and what a slice of it is."""
    span = slices.span(have.type.shape[placed.dim] // placed.outer, number)
    if placed.outer == 1:
        return add("aten.slice.Tensor", (Ref(value), placed.dim, *span), made, "")
    apart, part = _apart(have, placed), _apart(made, placed)
    wide = add("aten.reshape.default", (Ref(value), apart.type.shape), apart, "_apart")
    taken = add("aten.slice.Tensor", (Ref(wide), placed.dim + 1, *span), part, "_part")
    return add("aten.reshape.default", (Ref(taken), made.type.shape), made, "")


def join(
    values: Sequence[str], haves: Sequence[PlacedValue], placed: Shard, made: PlacedValue, add: Add
) -> str:
    """The whole of all slices, in order. haves, made: what each is and what the whole is."""
    if placed.outer == 1:
        return add("aten.cat.default", (tuple(Ref(v) for v in values), placed.dim), made, "")
    full, wide = _apart(made, placed), []
    for k, (value, have) in enumerate(zip(values, haves, strict=True)):
        apart = _apart(have, placed)
        wide.append(add("aten.reshape.default", (Ref(value), apart.type.shape), apart, f"_apart{k}"))
    joined = add("aten.cat.default", (tuple(map(Ref, wide)), placed.dim + 1), full, "_joined")
    return add("aten.reshape.default", (Ref(joined), made.type.shape), made, "")


def total(values: Sequence[str], made: PlacedValue, add: Add, op: str = "aten.add.Tensor") -> str:
    """The sum of the terms of all slices, or what else an op of two makes of them."""
    at = values[0]
    for k, value in enumerate(values[1:]):
        last = k == len(values) - 2
        at = add(op, (Ref(at), Ref(value)), made, "" if last else f"_sum{k}")
    return at


def _apart(value: PlacedValue, placed: Shard) -> PlacedValue:
    """The value with the outer part of the divided dim as a dim of its own."""
    dim, outer = placed.dim, placed.outer
    shape = value.type.shape
    wide = (*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])
    layout: list[Placement] = []
    for p in value.layout:
        if not isinstance(p, Shard) or p.dim < dim:
            layout.append(p)
        elif p.dim > dim:
            layout.append(replace(p, dim=p.dim + 1))
        elif p.outer < outer:
            layout.append(replace(p, inner=max(1, p.inner // (shape[dim] // outer))))
        else:
            layout.append(Shard(dim + 1, p.outer // outer, p.inner))
    return PlacedValue(TensorType(wide, value.type.dtype), tuple(layout))
