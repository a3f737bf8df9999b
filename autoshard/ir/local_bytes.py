"""What the fullest rank holds of a value: the one at coordinate 0 of every mesh axis.

shape: of the full value, elements per dim. layout: its placement on every axis. sizes: of the axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autoshard.ir.placement import Layout, Shard, local_shape
from autoshard.ir.types import DTYPES, TensorType


def held_shape(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """Elements per dim on the fullest rank."""
    return local_shape(shape, layout, sizes, (0,) * len(sizes))


def held_numel(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> int:
    """Elements on the fullest rank."""
    shards = [(p, t) for p, t in zip(layout, sizes, strict=True) if isinstance(p, Shard)]
    if len({p.dim for p, _ in shards}) < len(shards):
        return prod(held_shape(shape, layout, sizes))
    # no dim is split twice, which the search asks for very often
    held = list(shape)
    for placed, ways in shards:
        block = placed.blocks * placed.inner
        held[placed.dim] = block * -(-(held[placed.dim] // block) // ways)
    return prod(held)


def held_bytes(type_: TensorType, layout: Layout, sizes: Sequence[int]) -> int:
    """Bytes on the fullest rank; type_: of the full value."""
    return type_.existing(held_numel(type_.shape, layout, sizes)) * DTYPES[type_.dtype][1]
