"""Which levels of wiring the groups of a mesh axis cross, as an axis of its own for each."""

from __future__ import annotations

import re

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh


def levels_of(cluster: Cluster, mesh: Mesh, axis: str) -> tuple[tuple[str, int], ...]:
    """(name, ranks) of every level that an axis crosses, outermost first; () if it is only one.

    Neighbours along the part ``fsdp_node`` are connected by the level ``node``. () also where groups of the
    axis do not lie alike on the wiring, and for clusters of unlike parts or with measured links, of which no
    part of an axis is known to be fast.
    """
    used = cluster.used_by(mesh.world_size)
    if used.groups or used.links is not None:
        return ()
    size, stride = mesh.sizes[mesh.index(axis)], mesh.stride(axis)
    levels: list[tuple[str, int]] = []
    below = 1
    for level in used.levels:
        inside = size if level.size is None else min(size, level.size // stride)
        if level.size is not None and level.size > stride and level.size % stride:
            return ()
        if inside <= below:
            continue
        if inside % below or size % inside or (inside < size and (size * stride) % (inside * stride)):
            return ()
        levels.append((f"{axis}_{re.sub('[^a-zA-Z0-9_]', '_', level.name)}", inside // below))
        below = inside
    return tuple(reversed(levels)) if len(levels) > 1 and below == size else ()
