"""A step of several microbatches: the batch is cut along dim 0 of the inputs that have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.errors import UsageError
from autoshard.program.program import Program, Signature

#: arguments of a call: (positional, keyword)
Batch = tuple[tuple[Any, ...], dict[str, Any]]


def cut(program: Program, leaves: Sequence[Any]) -> list[Batch]:
    """The calls of one step, `Program.microbatches` of them, from the leaves of the full batch's arguments.

    leaves: in the order of the program's inputs. Dim 0 of those that have a batch is cut into equal parts
    in order; other arguments are the same in every call. A rank may give its own part of the batch, or a
    DTensor. Raises UsageError if a batch does not have as many sequences as the program runs in a step, or
    if no input has a batch.
    """
    spec = pytree.treespec_loads(program.signature.in_tree)
    count = program.microbatches
    if count == 1:
        return [pytree.tree_unflatten(list(leaves), spec)]
    sizes = _batch_sizes(program.signature)
    if not sizes:
        raise UsageError(
            f"the program runs {count} microbatches a step, and no input of the model has a batch",
            hint="plan for one microbatch",
        )
    parts = [list(leaves) for _ in range(count)]
    for position, size in sizes.items():
        name = program.signature.input_names[position]
        for part, piece in zip(parts, _pieces(leaves[position], name, size, count), strict=True):
            part[position] = piece
    return [pytree.tree_unflatten(part, spec) for part in parts]


def full_batch(program: Program, batch: Batch) -> Batch:
    """The batch of a step from an example: one of a single microbatch's size is repeated, others returned."""
    leaves, spec = pytree.tree_flatten(batch)
    sizes = _batch_sizes(program.signature)
    if pytree.treespec_dumps(spec) != program.signature.in_tree or not _is_one(leaves, sizes):
        return batch
    for position in sizes:
        leaves[position] = torch.cat([leaves[position]] * program.microbatches)
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs


def calls_of(program: Program, leaves: Sequence[Any]) -> list[Batch]:
    """As `cut`, where the leaves may also be those of a single microbatch, which is then the only call."""
    if _is_one(leaves, _batch_sizes(program.signature)):
        return [pytree.tree_unflatten(list(leaves), pytree.treespec_loads(program.signature.in_tree))]
    return cut(program, leaves)


def _batch_sizes(signature: Signature) -> dict[int, int]:
    """Position of every input with a batch -> its sequences in one microbatch."""
    return {
        int(p.target): p.type.shape[0]
        for p in signature.ports
        if p.kind == "input" and p.target in signature.batch_inputs
    }


def _is_one(leaves: Sequence[Any], sizes: dict[int, int]) -> bool:
    given = [leaves[k] for k in sizes]
    return all(
        isinstance(x, torch.Tensor) and x.dim() > 0 and x.shape[0] == size
        for x, size in zip(given, sizes.values(), strict=True)
    )


def _pieces(x: Any, name: str, size: int, count: int) -> Sequence[torch.Tensor]:
    if isinstance(x, DTensor):
        x = x.full_tensor()
    if not isinstance(x, torch.Tensor):
        raise UsageError(f"input {name} is {type(x).__name__}", why="a tensor was given when planning")
    given = x.shape[0] if x.dim() else 0
    # fewer than all: the rank's own part, whose size the program checks when it runs
    if given % count or not 0 < given <= size * count:
        raise UsageError(
            f"input {name} has shape {list(x.shape)}",
            why=f"a step is {count} microbatches of {size} sequences, {count * size} in all",
            hint="drop the last incomplete batch, or plan again for this batch",
        )
    return x.chunk(count)
