"""Tensors made from numbers alone that forward leaves in an attribute for its next calls, as text.

A program has the table that its own capture made. Where a longer sequence makes a longer table, calls share
one: that is the same as long as the tables agree where both have values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

#: relative and absolute difference of values that are the same, computed in another order
_CLOSE = 1e-5


def table_text(table: torch.Tensor | None) -> str:
    """Sizes, and values at the first and at further and further positions of every dim; "" of what has none.

    table: real values, of any type.
    """
    if table is None or table.is_sparse:
        return ""
    for dim, size in enumerate(table.shape):
        table = table.index_select(dim, torch.tensor(_places(size), dtype=torch.int64))
    kind = torch.complex128 if table.is_complex() else torch.float64
    values = torch.view_as_real(table.to(kind)) if table.is_complex() else table.to(kind)
    return json.dumps([list(table.shape), [float(f"{x:.7g}") for x in values.flatten().tolist()]])


def tables_agree(one: str, other: str) -> bool:
    """Whether two tables have the same values where both have some; of one without values that is not known,
    and so not the case."""
    if not one or not other:
        return one == other != ""
    (shape, values), (shape_too, values_too) = json.loads(one), json.loads(other)
    if len(shape) != len(shape_too):
        return False
    common = [min(sizes) for sizes in zip(shape, shape_too, strict=True)]
    first, second = _cut(shape, values, common), _cut(shape_too, values_too, common)
    return first.shape == second.shape and torch.allclose(first, second, _CLOSE, _CLOSE, equal_nan=True)


def _cut(shape: Sequence[int], values: Sequence[float], common: Sequence[int]) -> torch.Tensor:
    parts = torch.tensor(values, dtype=torch.float64).reshape(*shape, -1)
    return parts[tuple(slice(n) for n in common)]


def _places(size: int) -> list[int]:
    """0 to 3, then powers of two and what lies halfway: those of a shorter dim are the first of a longer."""
    places, step = list(range(4)), 4
    while step < size:
        places += [step, step + step // 2]
        step *= 2
    return [n for n in places if n < size]
