"""A batch of each rank's own: the global batch is all of them, in the order of the ranks of the mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from autoshard.errors import UsageError

if TYPE_CHECKING:
    from autoshard.runtime.runner import Runner


def global_example(example: Any, ranks: int) -> Any:
    """Example inputs of the global batch, from those of one rank.

    A tensor has a batch if its dim 0 is the most frequent size among the tensors' dims 0, as in a capture.
    """
    leaves, spec = pytree.tree_flatten(example)
    sizes = Counter(x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.dim() and x.shape[0])
    if not sizes:
        raise UsageError("local_batch=True, and no example input has a batch")
    batch = max(sizes, key=sizes.__getitem__)
    grown = [
        torch.cat([x] * ranks) if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == batch else x
        for x in leaves
    ]
    return pytree.tree_unflatten(grown, spec)


def gathered_batch(runner: Runner, leaves: Sequence[Any]) -> list[Any]:
    """The arguments with the batches of all ranks, by an all-gather along every axis of the mesh.

    Raises UsageError if a rank's batch has another size than the example had.
    """
    found = list(leaves)
    ranks = len(runner.place.order)
    for port in runner.inputs:
        if port.target not in runner.program.signature.batch_inputs:
            continue
        x, shape = leaves[int(port.target)], runner.step_shape(port)
        if not isinstance(x, torch.Tensor) or tuple(x.shape) != (shape[0] // ranks, *shape[1:]):
            raise UsageError(
                f"input {runner.input_name(port)} has shape {list(getattr(x, 'shape', []))}",
                why=f"every rank gives {shape[0] // ranks} rows of the global batch of {shape[0]}",
                hint="drop the last incomplete batch",
            )
        part = x.detach().to(runner.device).contiguous()
        # the last axis varies fastest among the ranks of a mesh
        for group in reversed(runner.axis_groups):
            parts = [torch.empty_like(part) for _ in range(group.size())]
            dist.all_gather(parts, part, group=group)
            part = torch.cat(parts)
        found[int(port.target)] = part
    return found
