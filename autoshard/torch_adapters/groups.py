"""Process groups by the names under which functional collectives know them; torch 2.11 to 2.13."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of a name."""
    group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    return group


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
