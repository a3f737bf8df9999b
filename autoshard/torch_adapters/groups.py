"""Process groups by the names under which functional collectives know them; torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import UsageError


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of a name."""
    group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    return group


def group_over(mesh: DeviceMesh, axes: Sequence[int]) -> dist.ProcessGroup:
    """The group of the ranks that differ from this one in some axes only; row-major over them. Collective."""
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    names = mesh.mesh_dim_names
    if names is None:
        raise UsageError(
            "a mesh of several axes has no names", hint="init_device_mesh(..., mesh_dim_names=...)"
        )
    flat: DeviceMesh = mesh[tuple(names[k] for k in axes)]._flatten()
    return flat.get_group()


def cpu_backend(group: dist.ProcessGroup) -> str:
    """What carries a group's messages between CPU processes: ``gloo``, for instance."""
    name: str = group._get_backend(torch.device("cpu")).name()
    return name


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that a group of CPU processes waits for a rank that is late."""
    options: Any = group._get_backend(torch.device("cpu")).options
    return float(options._timeout.total_seconds())


def copy_timeout(source: Any, group: dist.ProcessGroup) -> None:
    """Have a group wait for a rank as long as another group does."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    options = source._get_backend(device).options
    if options is None:
        return  # a backend that never waits, as torch's fake one
    timeout = options._timeout
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def default_store() -> Any:
    """The store that the process group was made with."""
    return dist.distributed_c10d._get_default_store()
