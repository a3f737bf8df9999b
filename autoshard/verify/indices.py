"""Which elements of a dim a rank holds, written out: the definition that placements stand for.

Slow and plain on purpose: `autoshard.ir.placement` and the runtime compute the same by formulas, and are
checked against this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import gcd

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.placement import Layout, Shard

#: (placement, ranks of its axis), in the order of the mesh
Splits = tuple[tuple[Shard, int], ...]


def splits_of(layout: Layout, dim: int, sizes: Sequence[int]) -> Splits:
    """What splits a dim."""
    return tuple((p, n) for p, n in zip(layout, sizes, strict=True) if isinstance(p, Shard) and p.dim == dim)


def axes_of(layout: Layout, dim: int) -> tuple[int, ...]:
    """The axes (their numbers) that split a dim."""
    return tuple(k for k, p in enumerate(layout) if isinstance(p, Shard) and p.dim == dim)


def unit_of(size: int, all_splits: Iterable[Splits], moves: Iterable[tuple[int, int]] = ()) -> int:
    """Elements that stay together wherever a dim is cut, so that runs of so many can stand for one; 1 where
    parts are uneven.

    moves: (elements, parts) of what a collective cuts evenly, or joins from even parts.
    """
    unit = size
    for splits in all_splits:
        local = size
        for (placed, ways), outer in zip(splits, _outers(splits), strict=True):
            run, rest = divmod(local, max(1, abs(outer) * ways))
            if rest or not outer or run % placed.inner:
                return 1
            unit, local = gcd(unit, run), local // ways
    for elements, parts in moves:
        if parts < 1 or elements % parts:
            return 1
        unit = gcd(unit, elements // parts)
    return max(1, unit)


def in_runs(
    size: int, layouts: tuple[Layout, Layout], dim: int, sizes: Sequence[int], parts: int
) -> tuple[int, tuple[Layout, Layout], bool]:
    """(size, layouts, whether they changed) of a dim before and after a collective, in runs of elements.

    parts: into which a collective cuts what a rank has, or by which it joins it.
    """
    splits = [splits_of(layout, dim, sizes) for layout in layouts]
    unit = unit_of(size, splits, [(local_size(size, splits[0]), parts)])
    if unit == 1:
        return size, layouts, False
    return size // unit, (in_units(layouts[0], dim), in_units(layouts[1], dim)), True


def in_units(layout: Layout, dim: int) -> Layout:
    """A layout of a dim of units: what runs are made of no longer matters."""
    return tuple(replace(p, inner=1) if isinstance(p, Shard) and p.dim == dim else p for p in layout)


def local_size(size: int, splits: Splits) -> int:
    """Elements of an evenly split dim on a rank."""
    for _, ways in splits:
        size //= ways
    return size


def _outers(splits: Splits) -> Iterator[int]:
    """Per split, the blocks that it cuts: those of its own that axes further outside left; negative for those
    of a zigzag."""
    done: list[tuple[int, int]] = []
    for placed, ways in splits:
        outer = placed.blocks
        for other, split in done:
            if other < placed.blocks:
                outer //= split
        yield outer if placed.outer > 0 else -outer
        done.append((placed.blocks, ways))


@lru_cache(maxsize=1024)
def held(size: int, splits: Splits, at: tuple[int, ...]) -> NDArray[np.int64]:
    """Global indices, in order, of a dim of ``size`` elements on the rank at these coordinates of its axes.

    An axis splits the middle of (outer, middle, inner); of its outer blocks the rank has those that axes
    further outside left there.
    """
    index = np.arange(size, dtype=np.int64)
    for (placed, ways), outer, coordinate in zip(splits, _outers(splits), at, strict=True):
        index = cut(index, outer, placed.inner, ways, coordinate)
    return index


def cut(index: NDArray[np.int64], outer: int, inner: int, ways: int, coordinate: int) -> NDArray[np.int64]:
    """Part ``coordinate`` of ``ways`` of the middle of (outer, middle, inner), cut as torch.chunk does."""
    if not outer or len(index) % (abs(outer) * inner):
        return np.empty(0, dtype=np.int64)
    if outer < 0:
        if len(index) % (outer * ways):
            return np.empty(0, dtype=np.int64)
        return _turned(index.reshape(-outer, ways, -1))[:, coordinate].reshape(-1)
    blocks = index.reshape(outer, -1, inner)
    step = -(-blocks.shape[1] // ways)
    return blocks[:, coordinate * step : (coordinate + 1) * step].reshape(-1)


def _turned(blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """[blocks, parts, elements] with the parts of every second block the other way round: a zigzag."""
    turned = blocks.copy()
    turned[1::2] = blocks[1::2, ::-1]
    return turned


def join(parts: Sequence[NDArray[np.int64]], outer: int) -> NDArray[np.int64]:
    """The whole of parts of the middle, in order of their coordinates; empty if they do not fit together."""
    if not outer or any(len(p) % outer for p in parts):
        return np.empty(0, dtype=np.int64)
    if outer < 0:
        return _turned(np.stack([p.reshape(-outer, -1) for p in parts], axis=1)).reshape(-1)
    return np.concatenate([p.reshape(outer, -1) for p in parts], axis=1).reshape(-1)


@lru_cache(maxsize=4096)
def cover(size: int, splits: Splits) -> str:
    """What is wrong with how ranks divide a dim: "" if every element is held once and no rank holds none."""
    unit = unit_of(size, [splits])
    if unit > 1:
        return cover(size // unit, tuple((replace(p, inner=1), n) for p, n in splits))
    seen = np.zeros(size, dtype=np.int32)
    for at in product(*(range(n) for _, n in splits)):
        index = held(size, splits, at)
        if not len(index):
            return f"the rank at {at} holds nothing of {size} elements"
        seen[index] += 1
    if (seen == 1).all():
        return ""
    lost, twice = int((seen == 0).sum()), int((seen > 1).sum())
    return f"of {size} elements, {lost} are held by no rank and {twice} by several"


def coordinates(axes: Sequence[int], sizes: Sequence[int]) -> Iterator[dict[int, int]]:
    """Every combination of coordinates on these axes."""
    for at in product(*(range(sizes[a]) for a in axes)):
        yield dict(zip(axes, at, strict=True))


def held_at(
    size: int, layout: Layout, dim: int, sizes: Sequence[int], at: Mapping[int, int]
) -> NDArray[np.int64]:
    """`held` of one dim of a layout, at coordinates by axis."""
    own = tuple(at[a] for a in axes_of(layout, dim))
    return held(size, splits_of(layout, dim, sizes), own)
