"""Figures of all ranks of a measurement."""

from __future__ import annotations

import torch.distributed as dist


def worst_of(found: float) -> float:
    """The largest of all ranks; NaN if any is."""
    every = [0.0] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return max(every, key=lambda x: (x != x, x))
