"""Which share of a core a process of a CPU gets while the others of its node compute, too."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

#: seconds of computing that count, many turns of the system's scheduler, and before and after them, so that
#: ranks that begin later or earlier still all compute in between
_TURNS, _AROUND = 0.5, 0.4
_SIDE = 256


def measure_share(device: torch.device) -> float:
    """Seconds that pass while a core computes a second for a process, the mean over all ranks of the process
    group, if there is one, which compute at once; 1 on other devices than CPUs. Collective.
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
    return float(taken[0] / taken[1])


def _compute(seconds: float) -> tuple[float, float]:
    """(seconds that passed, seconds of a core) of so many seconds of products."""
    square = torch.ones(_SIDE, _SIDE)
    start, computed = time.perf_counter(), time.thread_time()
    while time.perf_counter() - start < seconds:
        torch.mm(square, square)
    return time.perf_counter() - start, time.thread_time() - computed
