"""Seconds of the nodes of a program, for the passes that decide by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cost.collective import link_of
from autoshard.ir import Node, refs_of
from autoshard.ir.collectives import is_ring
from autoshard.ir.lowered import PlacedValue
from autoshard.rules.chains import ALONE, InKernel
from autoshard.simulate.behaviour import behaviour_on
from autoshard.simulate.op_work import Ops
from autoshard.simulate.rings import alone
from autoshard.simulate.streams import pricer


class NodePrices:
    """Called with a node and the values of its segment: seconds on the fullest rank of a mesh.

    Several passes ask for the same nodes, some of them once for each way that they try: each is priced once
    for what it takes and makes.
    """

    def __init__(self, cluster: Cluster, mesh: Mesh, whole: Mesh, codegen: str) -> None:
        """whole: the mesh with the pipeline, as the cluster is wired. codegen: of the program."""
        used = cluster.used_by(whole.world_size)
        behaviour = behaviour_on(cluster.device, codegen)
        self.ops, self.overlap = Ops(mesh, mesh.coords(0), behaviour), cluster.device.overlap
        self.price = pricer(cluster.device, [link_of(used, whole, whole.index(a.name)) for a in mesh.axes])
        #: by identity of a node -> (the node, names of its values, what they are, seconds)
        self._cache: dict[int, tuple[Node, tuple[str, ...], object, float]] = {}

    def __call__(self, node: Node, values: Mapping[str, PlacedValue], kernel: InKernel = ALONE) -> float:
        cached = self._cache.get(id(node))
        if cached is not None:
            _, names, values_of, seconds = cached
            if values_of == _around(names, values, kernel):
                return seconds
        names = (*refs_of(node), *node.outs)
        seconds = self._seconds(node, values, kernel if self.ops.behaviour.fused else ALONE)
        self._cache[id(node)] = node, names, _around(names, values, kernel), seconds
        return seconds

    def _seconds(self, node: Node, values: Mapping[str, PlacedValue], kernel: InKernel) -> float:
        if is_ring(node):
            return alone(self.ops.in_order(node, values), self.price, self.overlap)
        return sum(self.price(work) for work in self.ops.work(node, values, kernel))


def _around(names: Sequence[str], values: Mapping[str, PlacedValue], kernel: InKernel) -> object:
    """All that the price of an op depends on."""
    return kernel.joined, [(values.get(n), n in kernel.unmoved) for n in names]
