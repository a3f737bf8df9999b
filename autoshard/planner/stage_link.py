"""What joins the stages of a pipeline."""

from __future__ import annotations

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Axis, Mesh
from autoshard.cost.collective import AxisLink, link_of, seconds


def pipe_link(cluster: Cluster, inner: Mesh, ranks: int) -> AxisLink:
    """Between neighbouring pipeline ranks, each of which is a whole inner mesh."""
    full = Mesh((Axis("pp", ranks), *inner.axes))
    return link_of(cluster.used_by(full.world_size), full, 0)


def in_parts(nbytes: float, link: AxisLink, inside: AxisLink) -> float:
    """Seconds to send a value between stages in a part per rank of an axis, and to gather it behind."""
    return float(seconds("send", nbytes / inside.size, link) + seconds("all_gather", nbytes, inside))
