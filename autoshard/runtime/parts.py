"""Cutting tensors into the parts of a mesh axis and joining them again, by definition of Shard.

A dim is seen as (outer, middle, inner) and the middle is cut into ``ways`` like torch.chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.kernels.vocab_ce import merge_stats
from autoshard.placement import Layout, Shard, chunk, local_outer


def take_part(
    x: torch.Tensor, dim: int, ways: int, index: int, outer: int = 1, inner: int = 1
) -> torch.Tensor:
    """Part ``index`` of ``ways`` of a dim; a view where the memory allows it."""
    part = part_in_blocks(x, dim, ways, index, outer, inner)
    return part if outer == 1 else part.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])


def part_in_blocks(
    x: torch.Tensor, dim: int, ways: int, index: int, outer: int = 1, inner: int = 1
) -> torch.Tensor:
    """The same elements in the same order, with a dim for ``outer`` if it is not 1: a view of what is
    contiguous."""
    middle = x.shape[dim] // (outer * inner)
    start, size = chunk(middle, ways, index)
    if outer == 1:
        return x.narrow(dim, start * inner, size * inner)
    apart = x.reshape(*x.shape[:dim], outer, middle * inner, *x.shape[dim + 1 :])
    return apart.narrow(dim + 1, start * inner, size * inner)


def join_parts(parts: Sequence[torch.Tensor], dim: int, outer: int = 1) -> torch.Tensor:
    """The whole from all parts, in order of the axis coordinate."""
    if outer == 1:
        return torch.cat(list(parts), dim)
    apart = [p.reshape(*p.shape[:dim], outer, -1, *p.shape[dim + 1 :]) for p in parts]
    joined = torch.cat(apart, dim + 1)
    return joined.reshape(*joined.shape[:dim], -1, *joined.shape[dim + 2 :])


def shard_tensor(
    x: torch.Tensor, layout: Layout, sizes: Sequence[int], coords: Sequence[int]
) -> torch.Tensor:
    """What a rank holds of a global tensor (without partial placements)."""
    taken: dict[int, list[tuple[int, int]]] = {}
    for placed, ways, index in zip(layout, sizes, coords, strict=True):
        if isinstance(placed, Shard):
            before = taken.setdefault(placed.dim, [])
            outer = local_outer(placed, before)
            x = take_part(x, placed.dim, ways, index, outer, placed.inner)
            before.append((placed.outer, ways))
    return x


def reduce_parts(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of the values of all ranks of an axis."""
    if op == "lse":
        return merge_stats(parts)
    result = parts[0]
    for other in parts[1:]:
        result = torch.maximum(result, other) if op == "max" else result + other
    return result if len(parts) > 1 else result.clone()
