"""Rows that a mask chooses, without a shape that depends on how many they are.

``torch.where(mask)`` gives the places of a mask that hold. Here it gives all places, and remembers which of
them count. As long as nothing mixes rows, those that do not count change nothing but themselves, and where
rows are added up into a tensor they are left out: the same numbers, and the same gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Selection:
    """All places of a mask.

    shape: of the mask; counts: which places hold, flat [rows]; distinct: whether no two that hold share an
    index.
    """

    shape: tuple[int, ...]
    counts: torch.Tensor
    distinct: bool = False

    @property
    def rows(self) -> int:
        return prod(self.shape)

    def index(self, axis: int) -> torch.Tensor:
        """The index of each row along one axis of the mask."""
        numbers = torch.arange(self.shape[axis])
        shape = [n if d == axis else 1 for d, n in enumerate(self.shape)]
        return numbers.reshape(shape).expand(self.shape).reshape(-1)

    def gather(self, x: torch.Tensor, dim: int, axes: Sequence[int]) -> torch.Tensor | None:
        """``x`` indexed at dims ``dim``, ``dim + 1``, ... by the indices along these axes: rows at ``dim``.

        No copy of an index is needed, as all places are taken in order. None if the sizes differ.
        """
        sizes = [self.shape[a] for a in axes]
        if list(x.shape[dim : dim + len(axes)]) != sizes or len(set(axes)) < len(axes):
            return None
        order = sorted(range(len(axes)), key=lambda k: axes[k])
        before, after = list(range(dim)), list(range(dim + len(axes), x.dim()))
        x = x.permute([*before, *(dim + k for k in order), *after])
        lead, rest = list(x.shape[:dim]), list(x.shape[dim + len(axes) :])
        here = [n if a in axes else 1 for a, n in enumerate(self.shape)]
        full = x.reshape([*lead, *here, *rest]).expand([*lead, *self.shape, *rest])
        return full.reshape([*lead, self.rows, *rest])

    def added(self, rows: torch.Tensor, axis: int) -> torch.Tensor:
        """What the rows that count, [rows, ...], add to each index along an axis: [index, ...]."""
        counts = self.counts.reshape(-1, *[1] * (rows.dim() - 1))
        kept = torch.where(counts, rows, torch.zeros((), dtype=rows.dtype))
        kept = kept.reshape(*self.shape, *rows.shape[1:])
        others = [d for d in range(len(self.shape)) if d != axis]
        return kept.sum(others) if others else kept

    def assigned(self, x: torch.Tensor, rows: torch.Tensor, axis: int) -> torch.Tensor:
        """``x`` [index, ...] with the rows that count in the place of theirs. Indices are distinct."""
        others = [d for d in range(len(self.shape)) if d != axis]
        counts = self.counts.reshape(self.shape)
        here = counts.sum(others) != 0 if others else counts
        return torch.where(here.reshape(-1, *[1] * (x.dim() - 1)), self.added(rows, axis), x)


def moved(shape: Sequence[int], dim: int, new: Sequence[int]) -> int | None:
    """Where the rows at ``dim`` are after a reshape; None if they are not one dim of their own any more."""
    if prod(shape[:dim]) != 1 or shape[dim] < 2:
        return None
    for k, n in enumerate(new):
        if n != 1:
            return k if n == shape[dim] else None
    return None


def places(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)
