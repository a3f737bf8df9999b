"""Adding to a tensor what a rank has of the terms: the tensor itself is counted by the first rank only.

The results of all ranks are terms of a sum. offsets: global positions at which this rank's part of the
indices begins; the rank where all of them are 0 is the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.torch_adapters.op_library import define


def _counted(x: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
    return torch.zeros_like(x) if any(offsets) else x


def scatter_add_part(
    x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, offsets: Sequence[int]
) -> torch.Tensor:
    """``x.scatter_add(dim, index, src)`` of this rank's part of index and src (same shapes) -> as x."""
    return _counted(x, offsets).scatter_add(dim, index, src)


def index_add_part(
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    offsets: Sequence[int],
) -> torch.Tensor:
    """``x.index_put(indices, values, accumulate=True)`` of this rank's part of indices and values -> as x."""
    return torch.ops.aten.index_put(_counted(x, offsets), list(indices), values, True)


define(
    "scatter_add_part(Tensor x, int dim, Tensor index, Tensor src, int[] offsets) -> Tensor",
    scatter_add_part,
    lambda x, dim, index, src, offsets: torch.empty_like(x),
)
define(
    "index_add_part(Tensor x, Tensor?[] indices, Tensor values, int[] offsets) -> Tensor",
    index_add_part,
    lambda x, indices, values, offsets: torch.empty_like(x),
)
