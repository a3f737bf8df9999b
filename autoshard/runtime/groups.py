"""Process groups for a mesh."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.cluster.mesh import Mesh
from autoshard.errors import UsageError


def device_mesh_for(mesh: str, given: DeviceMesh | None = None) -> DeviceMesh:
    """The DeviceMesh of a program, made from torchrun's environment unless one is given.

    Raises UsageError if the world does not have as many ranks as the mesh.
    """
    wanted = Mesh.parse(mesh)
    if given is not None:
        if tuple(given.mesh.shape) != wanted.sizes or tuple(given.mesh_dim_names or ()) != wanted.names:
            raise UsageError(f"the DeviceMesh given is not the mesh {mesh}", where=str(given))
        return given
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise UsageError(
                "no process group, and none can be made",
                why="the environment has no RANK: this process was not started by torchrun",
                hint=f"torchrun --nproc-per-node {wanted.world_size} ...",
            )
        _check_world(int(os.environ["WORLD_SIZE"]), wanted)
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    _check_world(dist.get_world_size(), wanted)
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(kind, wanted.sizes, mesh_dim_names=wanted.names)


def _check_world(size: int, mesh: Mesh) -> None:
    if size != mesh.world_size:
        raise UsageError(
            f"the world has {size} ranks, the mesh {mesh} has {mesh.world_size}",
            hint=f"torchrun --nproc-per-node {mesh.world_size} ..., or plan for another mesh",
        )
