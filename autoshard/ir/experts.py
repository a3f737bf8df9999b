"""Slots of experts, as `TensorType.filled` counts them, and the messages that bring tokens to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from autoshard.ir.placement import Layout, Shard
from autoshard.ir.routing import EVEN, Routing
from autoshard.ir.types import TensorType


def owner_ways(layout: Layout, sizes: Sequence[int]) -> int:
    """Among how many ranks the experts, outer blocks of slots, are divided. sizes: of the mesh axes."""
    split = [isinstance(p, Shard) and p.dim == 0 and p.outer == 1 for p in layout]
    return prod(size for size, divided in zip(sizes, split, strict=True) if divided)


def destinations(slots: TensorType, ways: int, routing: Routing = EVEN) -> float:
    """To how many of ``ways`` ranks with equal parts of the experts a token goes on average, if all had as
    many tokens as the fullest.

    slots: type of a value of slots.
    """
    assert slots.filled is not None
    return routing.owners(*slots.filled, ways)


def exchanged_bytes(
    nbytes: float, slots: TensorType, ways: Sequence[int], routing: Routing = EVEN
) -> Iterator[float]:
    """Bytes that a rank sends over each of some axes, outermost first, on which tokens go to their experts.

    nbytes: of its tokens, a row of each. A token goes once to each part of the outermost axis that has an
    expert of its choice, and from there once to each part of the next. All ranks have as many tokens.
    """
    parts = 1
    for size in ways:
        parts *= size
        yield nbytes * destinations(slots, parts, routing)
