"""Clusters (devices and wiring, from TOML files) and the meshes laid over them."""

from autoshard.cluster.axes import AxisMeaning, meaning_of
from autoshard.cluster.cluster import Cluster, Device, Level, usable_memory
from autoshard.cluster.load import catalog_names, load_cluster, parse_cluster
from autoshard.cluster.mesh import Axis, Mesh, mesh_candidates, parse_target

__all__ = [
    "Axis",
    "AxisMeaning",
    "Cluster",
    "Device",
    "Level",
    "Mesh",
    "catalog_names",
    "load_cluster",
    "meaning_of",
    "mesh_candidates",
    "parse_cluster",
    "parse_target",
    "usable_memory",
]
