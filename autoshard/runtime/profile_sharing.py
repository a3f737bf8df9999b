"""Which share of a core a process of a CPU gets while the others of its node compute, too."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

#: seconds of computing that count, and before and after them, as ranks begin later or earlier
_TURNS, _AROUND = 0.5, 0.2
_SIDE = 256


def measure_share(device: torch.device, per_node: int) -> float:
    """Seconds that pass while a core computes a second for a process, all processes of a node computing; 1 on
    other devices than CPUs. Collective.

    That is what the cores that a process may use make of it, or more if that was measured, as where a
    container is granted less than whole cores; a system may take turns that are longer than a measurement, so
    that less does not count.
    """
    if device.type != "cpu":
        return 1.0
    together = dist.is_initialized()
    if together:
        dist.barrier()
    _compute(_AROUND)
    taken = torch.tensor(_compute(_TURNS), dtype=torch.float64)
    _compute(_AROUND)
    if together:
        dist.all_reduce(taken)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(per_node * torch.get_num_threads() / cores, float(taken[0] / taken[1]))


def _compute(seconds: float) -> tuple[float, float]:
    """(seconds that passed, seconds of a core) of so many seconds of products."""
    square = torch.ones(_SIDE, _SIDE)
    start, computed = time.perf_counter(), time.thread_time()
    while time.perf_counter() - start < seconds:
        torch.mm(square, square)
    return time.perf_counter() - start, time.thread_time() - computed
