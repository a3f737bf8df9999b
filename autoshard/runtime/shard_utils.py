"""Cutting tensors into the parts of a mesh axis and joining them again, by definition of Shard.

A dim is seen as (outer, middle, inner) and the middle is cut into ``ways`` like torch.chunk. A negative
``outer`` is a zigzag (`ir.placement`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.ir.placement import Layout, Shard, chunk, local_outer
from autoshard.kernels.vocab_ce import merge_stats
from autoshard.ops.attention_parts import merge_parts
from autoshard.runtime.transport.transport import reduced


def take_part(
    x: torch.Tensor, dim: int, ways: int, index: int, outer: int = 1, inner: int = 1
) -> torch.Tensor:
    """Part ``index`` of ``ways`` of a dim; a view where the memory allows it."""
    return _side_by_side(part_in_blocks(x, dim, ways, index, outer, inner), dim, outer)


def part_in_blocks(
    x: torch.Tensor, dim: int, ways: int, index: int, outer: int = 1, inner: int = 1
) -> torch.Tensor:
    """The same elements in the same order, with a dim for ``outer`` if it is not 1: a view of what is
    contiguous, but for a zigzag."""
    if outer < 0:
        pairs = _in_pairs(x, dim, -outer, ways)
        halves = [pairs.select(dim + 1, k).select(dim + 1, (index, ways - 1 - index)[k]) for k in (0, 1)]
        return torch.stack(halves, dim + 1).flatten(dim, dim + 1)
    start, size = chunk(x.shape[dim] // (outer * inner), ways, index)
    return _apart(x, dim, outer).narrow(dim if outer == 1 else dim + 1, start * inner, size * inner)


def join_parts(parts: Sequence[torch.Tensor], dim: int, outer: int = 1) -> torch.Tensor:
    """The whole from all parts, in order of the axis coordinate."""
    if outer < 0:
        pairs = [_in_pairs(part, dim, -outer, 1) for part in parts]
        halves = [
            torch.cat([p.select(dim + 1, k) for p in row], dim + 1)
            for k, row in enumerate((pairs, pairs[::-1]))
        ]
        return torch.stack(halves, dim + 1).flatten(dim, dim + 3)
    apart = [_apart(part, dim, outer) for part in parts]
    return _side_by_side(torch.cat(apart, dim if outer == 1 else dim + 1), dim, outer)


def _in_pairs(x: torch.Tensor, dim: int, outer: int, ways: int) -> torch.Tensor:
    """A dim as [pairs of blocks, 2, parts of a block, elements]."""
    shape = (outer // 2, 2, ways, x.shape[dim] // (outer * ways))
    return x.reshape(*x.shape[:dim], *shape, *x.shape[dim + 1 :])


def _apart(x: torch.Tensor, dim: int, outer: int) -> torch.Tensor:
    """With a dim for ``outer`` before a dim, if it is not 1; also where there are no elements."""
    if outer == 1:
        return x
    return x.reshape(*x.shape[:dim], outer, x.shape[dim] // outer, *x.shape[dim + 1 :])


def _side_by_side(x: torch.Tensor, dim: int, outer: int) -> torch.Tensor:
    """The inverse of `_apart`."""
    if outer == 1:
        return x
    outer = abs(outer)
    return x.reshape(*x.shape[:dim], outer * x.shape[dim + 1], *x.shape[dim + 2 :])


def shard_tensor(
    x: torch.Tensor, layout: Layout, sizes: Sequence[int], coords: Sequence[int]
) -> torch.Tensor:
    """What a rank holds of a global tensor (without partial placements)."""
    taken: dict[int, list[tuple[int, int]]] = {}
    for placed, ways, index in zip(layout, sizes, coords, strict=True):
        if isinstance(placed, Shard):
            before = taken.setdefault(placed.dim, [])
            outer = local_outer(placed, before) * (1 if placed.outer > 0 else -1)
            x = take_part(x, placed.dim, ways, index, outer, placed.inner)
            before.append((placed.blocks, ways))
    return x


def reduce_parts(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of the values of all ranks of an axis."""
    merge = {"lse": merge_stats, "attention": merge_parts}.get(op)
    return reduced(parts, op) if merge is None else merge(parts)


def part_shapes(
    shape: Sequence[int], dim: int, size: int, ways: int, outer: int = 1, inner: int = 1
) -> list[tuple[int, ...]]:
    """The shapes of all parts of a tensor of which a dim, of this size, is split."""
    outer = abs(outer)
    middle = size // (outer * inner)
    lengths = [outer * chunk(middle, ways, k)[1] * inner for k in range(ways)]
    return [with_size(shape, dim, n) for n in lengths]


def with_size(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """A shape with another size of one dim."""
    return (*shape[:dim], size, *shape[dim + 1 :])
