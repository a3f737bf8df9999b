"""The cost model of a mesh laid on a cluster."""

from __future__ import annotations

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cluster.order import RankOrder
from autoshard.cost.collective import AxisLink, link_of
from autoshard.cost.model import CostModel
from autoshard.cost.reshard import ReshardCost

#: parameter collectives go out in buckets, so a parameter pays only a part of the latency
BUCKET_SHARE = 1 / 8


def cost_model(cluster: Cluster, mesh: Mesh, order: RankOrder | None = None) -> CostModel:
    """Prices on a mesh whose rank r is the r-th device of the cluster, or the one that ``order`` says."""
    cluster = cluster if order is not None else cluster.used_by(mesh.world_size)
    links = tuple(link_of(cluster, mesh, axis, order) for axis in range(len(mesh.axes)))
    shared = tuple(
        AxisLink(x.latency * BUCKET_SHARE, x.bandwidth, x.size, x.device_bandwidth, x.local) for x in links
    )
    bandwidth = cluster.device.memory_bandwidth
    return CostModel(
        cluster.device,
        ReshardCost(mesh.sizes, links, bandwidth),
        ReshardCost(mesh.sizes, shared, bandwidth),
    )
