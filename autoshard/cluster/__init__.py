"""Clusters (devices and wiring, from TOML files) and the meshes laid over them."""

from autoshard.cluster.assign import assign_ranks, order_seconds
from autoshard.cluster.axes import AxisMeaning, meaning_of
from autoshard.cluster.cluster import Cluster, Device, Level, bounding, usable_memory
from autoshard.cluster.links import Links
from autoshard.cluster.load import catalog_names, load_cluster, parse_cluster
from autoshard.cluster.mesh import Axis, Mesh, mesh_candidates, parse_target
from autoshard.cluster.order import RankOrder

__all__ = [
    "Axis",
    "AxisMeaning",
    "Cluster",
    "Device",
    "Level",
    "Links",
    "Mesh",
    "RankOrder",
    "assign_ranks",
    "bounding",
    "catalog_names",
    "load_cluster",
    "meaning_of",
    "mesh_candidates",
    "order_seconds",
    "parse_cluster",
    "parse_target",
    "usable_memory",
]
