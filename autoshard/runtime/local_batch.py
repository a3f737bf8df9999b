"""Batches of which each rank gives its own rows: the global batch is all, in the order of the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from autoshard.errors import UsageError
from autoshard.runtime.checks.agreement import hash_of


def batch_leaves(leaves: Sequence[Any]) -> list[int]:
    """The positions of tensors with a batch: dim 0 is the most frequent size among the tensors' dims 0, as in
    a capture."""
    sizes = Counter(x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.dim() and x.shape[0])
    if not sizes:
        return []
    batch = max(sizes, key=sizes.__getitem__)
    return [
        k for k, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == batch
    ]


def global_example(example: Any, ranks: int) -> Any:
    """Example inputs of the global batch, from those of one of so many ranks."""
    leaves, spec = pytree.tree_flatten(example)
    rows = batch_leaves(leaves)
    if not rows:
        raise UsageError("each rank gives its own rows of the batch, and no input has a batch")
    return pytree.tree_unflatten(
        [torch.cat([x] * ranks) if k in rows else x for k, x in enumerate(leaves)], spec
    )


def gathered_batch(
    leaves: Sequence[Any], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> tuple[list[Any], tuple[int, int]]:
    """The leaves of a call with the rows of all ranks; (first row, rows) of this rank.

    groups: along every axis of the mesh. Raises UsageError, on every rank, if the rows of some rank have
    another length or type than those of others.
    """
    # a rank without rows has tensors of none
    empty = [k for k, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.dim() and not x.shape[0]]
    result, positions = list(leaves), empty or batch_leaves(leaves)
    count = leaves[positions[0]].shape[0] if positions else 0
    parts = [leaves[k].detach().to(device).contiguous() for k in positions]
    form = hash_of(*((tuple(x.shape[1:]), x.dtype) for x in parts))
    told = _gathered(torch.tensor([[count, form]], device=device), groups)
    rows = told[:, 0].tolist()
    if len(set(told[:, 1].tolist())) > 1:
        raise UsageError(
            "the rows that ranks give have not all the same shape or type",
            where=f"here {[list(x.shape) for x in parts]}",
            why="together they are one batch",
            hint="pad to one length on all ranks, for instance with padding='max_length'",
        )
    if not sum(rows):
        raise UsageError("local_batch=True, and no argument of the call has rows on any rank")
    most, coords = max(rows), _position(groups)
    for position, part in zip(positions, parts, strict=True):
        padded = torch.cat([part, part.new_zeros((most - count, *part.shape[1:]))]) if count < most else part
        stacked = _gathered(padded[None], groups)
        result[position] = torch.cat([x[:n] for x, n in zip(stacked, rows, strict=True)])
    return result, (sum(rows[:coords]), count)


def _gathered(part: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """The parts of all ranks along dim 0, in the order of the mesh."""
    # the last axis varies fastest among the ranks of a mesh
    for group in reversed(groups):
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        part = torch.cat(parts)
    return part


def _position(groups: Sequence[dist.ProcessGroup]) -> int:
    """The number of this rank in the mesh."""
    at = 0
    for group in groups:
        at = at * group.size() + group.rank()
    return at
