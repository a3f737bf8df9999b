"""Sharded tensors, gathered for a while so that rows of them can be changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from autoshard.errors import UsageError
from autoshard.torch_adapters.blocks import blocks_of, plain_local


@contextmanager
def full_tensors(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Full values of parameters or gradients, which may be changed in place; every rank keeps its shards of
    what they are at the end.

        with autoshard.full_tensors(model.emb.weight, model.emb.weight.grad) as (weight, grad):
            weight[0] = 0.0
            grad[:50].zero_()

    All ranks that have the tensors call it and make the same changes: torch gathers a slice of a sharded
    DTensor into a copy, and drops what is changed there.

    Args: DTensors, as a parallel module has them; a plain tensor is given as it is. Yields: plain tensors
    without gradients, in that order, as large as the model's. Raises UsageError for tensors of other stages
    of a pipeline, and for sums that are not reduced yet.
    """
    for x in tensors:
        if x.is_meta or (isinstance(x, DTensor) and any(p.is_partial() for p in x.placements)):
            what = "is of another stage" if x.is_meta else "is a sum that is not reduced yet"
            raise UsageError(
                f"a tensor of shape {list(x.shape)} {what}",
                where="autoshard.full_tensors",
                hint="give what this rank has of parameters(), or their gradients",
            )
    with torch.no_grad():
        full = tuple(x.full_tensor().detach() if isinstance(x, DTensor) else x.detach() for x in tensors)
        # replicated ones are their own full tensors
        values = tuple(f.clone() if isinstance(x, DTensor) else f for x, f in zip(tensors, full, strict=True))
    yield values
    with torch.no_grad():
        for x, value in zip(tensors, values, strict=True):
            if isinstance(x, DTensor):
                part = plain_local(x._local_tensor)
                for block in blocks_of(x.shape, x.device_mesh, x.placements):
                    block.of(part).copy_(block.in_full(value))
                torch.autograd.graph.increment_version(x)
