"""Runs a body on some rows at a time (`ir.row_tiles`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from autoshard.ir.row_tiles import BATCH, BOTH, SEQUENCE, RowTiles, has_rows

#: types whose sums over tiles are kept in single precision
_HALF = (torch.bfloat16, torch.float16)


def run_in_tiles(
    tiles: RowTiles, body: Callable[[list[Any], int], Sequence[torch.Tensor]]
) -> Callable[..., Sequence[torch.Tensor]]:
    """What runs a ``row_tiles`` node, given its inputs. body: runs one tile."""

    def run(inputs: Sequence[torch.Tensor], *_: Any) -> Sequence[torch.Tensor]:
        batch, rows = _extent(tiles, inputs)
        result: list[torch.Tensor] = []
        dtypes: list[torch.dtype] = []
        for at in _tiles(batch, rows, tiles.rows):
            given = [_cut(x, kinds, rows, at) for x, kinds in zip(inputs, tiles.inputs, strict=True)]
            new = body(given, 0)
            if not result:
                dtypes = [x.dtype for x in new]
                result = [_begun(x, kinds, batch, rows) for x, kinds in zip(new, tiles.outputs, strict=True)]
            for out, x, kinds in zip(result, new, tiles.outputs, strict=True):
                part = _cut(out, kinds, rows, at)
                if has_rows(kinds):
                    part.copy_(x)
                else:
                    part.add_(x)
            del new
        return [x.to(dtype) for x, dtype in zip(result, dtypes, strict=True)]

    return run


def _extent(tiles: RowTiles, inputs: Sequence[torch.Tensor]) -> tuple[int, int]:
    """(sequences, rows of each) on this rank; where nothing tells sequences apart, all rows are of one."""
    sizes: dict[str, int] = {}
    for x, kinds in zip(inputs, tiles.inputs, strict=True):
        sizes.update(zip(kinds, x.shape, strict=True))
    if SEQUENCE not in sizes:
        return 1, sizes[BOTH]
    return sizes.get(BATCH, sizes.get(BOTH, sizes[SEQUENCE]) // max(1, sizes[SEQUENCE])), sizes[SEQUENCE]


def _tiles(batch: int, rows: int, most: int) -> Iterator[tuple[int, int, int]]:
    """(sequence, first row, rows) of each tile."""
    for sequence in range(batch):
        for first in range(0, max(1, rows), most):
            yield sequence, first, min(most, rows - first)


def _cut(x: torch.Tensor, kinds: str, rows: int, at: tuple[int, int, int]) -> torch.Tensor:
    sequence, first, count = at
    for dim, kind in enumerate(kinds):
        if kind == BATCH:
            x = x.narrow(dim, sequence, 1)
        elif kind == SEQUENCE:
            x = x.narrow(dim, first, count)
        elif kind == BOTH:
            x = x.narrow(dim, sequence * rows + first, count)
    return x


def _begun(x: torch.Tensor, kinds: str, batch: int, rows: int) -> torch.Tensor:
    """An output before the first tile. x: of one tile."""
    sizes = {BATCH: batch, SEQUENCE: rows, BOTH: batch * rows}
    shape = [sizes.get(kind, size) for kind, size in zip(kinds, x.shape, strict=True)]
    if not has_rows(kinds):
        return x.new_zeros(shape, dtype=torch.float32 if x.dtype in _HALF else x.dtype)
    return x.new_empty(shape)
