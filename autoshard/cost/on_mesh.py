"""The cost model of a mesh laid on a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cluster.order import RankOrder
from autoshard.cost.collective import link_of
from autoshard.cost.model import CostModel
from autoshard.cost.reshard import ReshardCost


def cost_model(cluster: Cluster, mesh: Mesh, order: RankOrder | None = None) -> CostModel:
    """Prices on a mesh whose rank r is the r-th device of the cluster, or the one that ``order`` says."""
    cluster = cluster if order is not None else cluster.used_by(mesh.world_size)
    links = tuple(link_of(cluster, mesh, axis, order) for axis in range(len(mesh.axes)))
    return CostModel(cluster.device, ReshardCost(mesh.sizes, links, cluster.device.traffic))


@dataclass(frozen=True)
class CostModels:
    """Cost models of meshes on one cluster, each made once.

    Meshes whose axes have equal links share the cheapest ways between layouts that were found already.
    """

    cluster: Cluster
    made: dict[tuple[Mesh, RankOrder | None], CostModel] = field(default_factory=dict, repr=False)
    alike: dict[ReshardCost, ReshardCost] = field(default_factory=dict, repr=False)

    def of(self, mesh: Mesh, order: RankOrder | None = None) -> CostModel:
        """As `cost_model`."""
        key = (mesh, order)
        if key not in self.made:
            model = cost_model(self.cluster, mesh, order)
            self.made[key] = replace(model, reshard=self.alike.setdefault(model.reshard, model.reshard))
        return self.made[key]
