"""The cost model of a mesh laid on a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autoshard.cluster.assign import assign_ranks
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cluster.order import RankOrder
from autoshard.cost.collective import link_of
from autoshard.cost.model import CostModel
from autoshard.cost.reshard import ReshardCost
from autoshard.cost.stage_machines import StageMachine, bounding_machine, full_mesh, kinds_of


def cost_model(cluster: Cluster, mesh: Mesh, order: RankOrder | None = None) -> CostModel:
    """Prices on a mesh whose rank r is the r-th device of the cluster, or the one that ``order`` says."""
    cluster = cluster if order is not None else cluster.used_by(mesh.world_size)
    links = tuple(link_of(cluster, mesh, axis, order) for axis in range(len(mesh.axes)))
    return CostModel(cluster.device, ReshardCost(mesh.sizes, links, cluster.device.traffic))


def model_of(machine: StageMachine, mesh: Mesh) -> CostModel:
    """Prices on a mesh of which every pipeline rank runs on such a machine."""
    traffic = machine.device.traffic
    return CostModel(machine.device, ReshardCost(mesh.sizes, machine.links, traffic))


def laid_roughly(cluster: Cluster, whole: Mesh) -> Cluster:
    """The ranks of a mesh on devices whose links were measured, in an order that is soon found."""
    if cluster.links is None:
        return cluster
    used = cluster.used_by(whole.world_size)
    assert used.links is not None
    return used.laid(assign_ranks(whole, used.links, moves=0, kinds=kinds_of(used)))


@dataclass(frozen=True)
class CostModels:
    """Cost models of meshes on one cluster, each made once.

    Meshes whose axes have equal links share the cheapest ways between layouts that were found already.
    world: ranks in all, of which a smaller mesh is one of several pipeline ranks, wherever it lies; 0 where
    every mesh is the first ranks of the cluster.
    """

    cluster: Cluster
    world: int = 0
    made: dict[tuple[Mesh, RankOrder | None], CostModel] = field(default_factory=dict, repr=False)
    alike: dict[ReshardCost, ReshardCost] = field(default_factory=dict, repr=False)

    def of(self, mesh: Mesh, order: RankOrder | None = None) -> CostModel:
        """As `cost_model`; on what bounds all ranks of a pipeline. order: of all its ranks."""
        key = (mesh, order)
        if key not in self.made:
            ranks = self.ranks(mesh)
            if ranks == 1:
                model = cost_model(self.cluster, mesh, order)
            else:
                model = model_of(bounding_machine(self.cluster.laid(order), mesh, ranks), mesh)
            self.made[key] = replace(model, reshard=self.alike.setdefault(model.reshard, model.reshard))
        return self.made[key]

    def ranks(self, mesh: Mesh) -> int:
        """Pipeline ranks, of which each is such a mesh."""
        return max(1, self.world // mesh.world_size)

    def roughly(self, mesh: Mesh) -> CostModel:
        """The same in an order of ranks that is soon found."""
        return self.of(mesh, self.rough_order(mesh))

    def rough_order(self, mesh: Mesh) -> RankOrder | None:
        """Of all ranks of a pipeline whose ranks are such meshes; None where no links were measured."""
        return laid_roughly(self.cluster, full_mesh(mesh, self.ranks(mesh))).order
