"""Ranks of a mesh that differ in some axes only."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.cluster import Mesh
from autoshard.runtime.lockstep.in_process import groups_of
from autoshard.runtime.resolve import RankView


def groups_over(mesh: Mesh, axes: Sequence[str]) -> list[list[int]]:
    """All groups of ranks that differ in these axes only."""
    views = [RankView(mesh.names, mesh.sizes, mesh.coords(k)) for k in range(mesh.world_size)]
    return groups_of(views, axes)


def group_of(mesh: Mesh, rank: int, axes: Sequence[str]) -> list[int]:
    """The group that a rank is in."""
    return next(group for group in groups_over(mesh, axes) if rank in group)


def axes_of(mesh: Mesh, ranks: Sequence[int]) -> list[str]:
    """The axes in which ranks differ."""
    at = [mesh.coords(rank) for rank in ranks]
    return [name for k, name in enumerate(mesh.names) if len({coords[k] for coords in at}) > 1]
