"""Process groups by the names under which functional collectives know them; torch 2.11 to 2.13."""

from __future__ import annotations

import torch.distributed as dist


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of a name."""
    group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    return group
