"""Clusters with links so slow that everything which sends less is worth it, or with messages that begin at
once."""

from __future__ import annotations

from dataclasses import replace

from autoshard.cluster import Cluster, load_cluster
from autoshard.cluster.cluster import Level


def without_latency() -> Cluster:
    """The CPU cluster with messages that begin at once."""
    base = load_cluster("cpu-gloo")
    return replace(base, levels=tuple(replace(level, latency=1e-9) for level in base.levels))


def slow_cluster(bandwidth: float = 1e6, nodes_of: int = 0) -> Cluster:
    """The CPU cluster with links of so many bytes/s; nodes_of: devices of a node, 0 for a single level."""
    base = load_cluster("cpu-gloo")
    (level,) = base.levels[-1:]
    outer = replace(level, name="network", bandwidth=bandwidth, measured=())
    if not nodes_of:
        return replace(base, name="slow", levels=(outer,))
    inner = Level("node", nodes_of, 1e-6, 100 * bandwidth)
    return replace(base, name="slow-nodes", levels=(inner, outer))
