"""Numbers in a program that differ from rank to rank: the size and the offset of a local shard.

They appear as arguments of ops only where a dim does not divide evenly (sizes) or where an op must
know which global indices it holds (offsets). They are resolved to integers when a program is loaded
for one rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardOf:
    """One mesh axis splitting the middle part of a dim seen as (outer, middle, inner)."""

    axis: str
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True, slots=True)
class LocalSize:
    """Elements of a dim of global size ``size`` held by the rank, after ``shards`` in order."""

    size: int
    shards: tuple[ShardOf, ...]


@dataclass(frozen=True, slots=True)
class LocalOffset:
    """Global index of the rank's first element of a dim of global size ``size``."""

    size: int
    shards: tuple[ShardOf, ...]


@dataclass(frozen=True, slots=True)
class CallSite:
    """The number of a random op: ``offset`` within its segment, plus the call's own base."""

    offset: int
