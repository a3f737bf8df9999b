"""Whether ``parameter.data = x`` was run: of a DTensor, torch takes that without an error, for nothing.

A DTensor keeps its shard as an attribute, while the assignment gives the tensor around it another storage,
which nobody reads: training and evaluation would go on with the old weights.

Leans on ``DTensor._local_tensor`` and on ``_cdata`` of storages. Tried on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

#: attribute of a parameter: identities of its storage and of its shard
_MARK = "_autoshard_storage"


def watch_data(parameters: Iterable[torch.Tensor]) -> None:
    """From now on `data_was_assigned` knows of them."""
    for parameter in parameters:
        data_was_assigned(parameter)


def data_was_assigned(parameter: torch.Tensor) -> bool:
    """Whether that was done since this function saw the parameter with its shard for the first time."""
    if not isinstance(parameter, DTensor):
        return False
    now = parameter.untyped_storage()._cdata, id(parameter._local_tensor)
    before = getattr(parameter, _MARK, (0, 0))
    # copies have another shard, and so has what `Module.half` and its like put in a parameter's place
    if before[1] != now[1]:
        setattr(parameter, _MARK, now)
    return bool(before[1] == now[1] and before[0] != now[0])
