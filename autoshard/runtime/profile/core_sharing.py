"""Which share of a core a process of a CPU gets while the others of its node compute, too."""

from __future__ import annotations

import os
from pathlib import Path

import torch

#: what a container is granted of the processors: microseconds of computing in so many microseconds, or "max"
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def share_of_core(device: torch.device, per_node: int) -> float:
    """Seconds that pass while a core computes a second for a process, all processes of a node computing; 1 on
    other devices than CPUs.

    From what the system says that there is, as the turns that it takes may be longer than any measurement.
    """
    if device.type != "cpu":
        return 1.0
    return max(1.0, per_node * torch.get_num_threads() / _cores())


def _cores() -> float:
    """Cores that this process may use, on Linux no more than its container is granted."""
    result = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if not _QUOTA.is_file():
        return result
    granted, period = _QUOTA.read_text().split()
    return result if granted == "max" else min(result, int(granted) / int(period))
