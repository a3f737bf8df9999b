"""Which output of a model is its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoshard.errors import UsageError
from autoshard.ir.lowered import PlacedValue
from autoshard.program.program import Signature
from autoshard.torch_adapters.dtypes import torch_dtype
from autoshard.torch_adapters.records import to_records


def loss_position(signature: Signature, values: Mapping[str, PlacedValue]) -> int:
    """Which output of the model is the loss; values: of the results. Raises UsageError if none is."""
    types = {int(r.target): values[r.value].type for r in signature.results if r.kind == "output"}
    flat: list[Any] = []
    for position, (kind, _) in enumerate(signature.out_leaves):
        type_ = types.get(position)
        known = kind == "tensor" and type_ is not None
        flat.append(
            torch.empty(type_.shape, dtype=torch_dtype(type_.dtype), device="meta")
            if known and type_
            else None
        )
    output = pytree.tree_unflatten(flat, pytree.treespec_loads(signature.out_tree))
    loss = loss_of(output)
    position = next(k for k, x in enumerate(flat) if x is loss)
    if loss.dim():
        raise UsageError("the model's loss is not a scalar", why=f"its shape is {list(loss.shape)}")
    return position


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a model returned: its ``loss``, or the only floating scalar."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor):
        return named
    leaves = [x for x in pytree.tree_leaves(to_records(output)) if isinstance(x, torch.Tensor)]
    scalars = [x for x in leaves if x.dim() == 0 and x.is_floating_point()]
    if len(scalars) != 1:
        raise UsageError(
            "the model returns no loss",
            why=f"it returns {len(leaves)} tensors, {len(scalars)} of them floating scalars",
            hint="return the loss as a scalar, alone or under the name `loss`",
        )
    return scalars[0]
