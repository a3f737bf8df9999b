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


def ring_cluster(nodes_of: int = 0) -> Cluster:
    """Slow devices that compute beside messages at no cost and read memory in no time: keys go round."""
    base = slow_cluster(1e8, nodes_of)
    levels = tuple(replace(level, latency=1e-9) for level in base.levels)
    rates = dict.fromkeys(base.device.peak_flops, 1e9)
    device = replace(base.device, peak_flops=rates, memory_bandwidth=1e15, launch_overhead=0.0, overlap=1.0)
    return replace(base, levels=levels, device=device)
