"""Messages of several tensors, filled and emptied in one kernel where there is one (`kernels.bucket`)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

import autoshard.kernels.bucket  # noqa: F401  (defines the ops that are called below)

#: (dim, outer, inner, size before the split or None if it divides evenly)
Where = tuple[int, int, int, "int | None"]


def in_one_kernel(xs: Sequence[torch.Tensor], wheres: Sequence[Where] = ()) -> bool:
    """Whether a kernel can fill or empty a message: on a CUDA device, tensors of one floating type, of more
    than 8 bits, that are split by rows, evenly, or not at all."""
    first = xs[0]
    by_rows = all((dim, outer, inner, size) == (0, 1, 1, None) for dim, outer, inner, size in wheres)
    return (
        first.device.type == "cuda"
        and first.dtype.is_floating_point
        and first.dtype.itemsize > 1
        and by_rows
        and all(x.dtype == first.dtype and x.numel() for x in xs)
    )


def filled(xs: Sequence[torch.Tensor], ways: int = 1) -> torch.Tensor:
    """What is sent of full tensors that ``ways`` ranks share by rows: for each, its rows of all of them."""
    new: torch.Tensor = torch.ops.autoshard.bucket_pack(list(xs), ways, xs[0].dtype, 1.0)
    return new.view(-1)


def emptied(got: torch.Tensor, parts: Sequence[Sequence[int]], ways: int) -> list[torch.Tensor]:
    """Full tensors from what all ranks of an axis sent, one after the other. parts: shapes of one rank's."""
    sizes = [prod(shape) for shape in parts]
    flat: torch.Tensor = torch.ops.autoshard.bucket_unpack(got.view(ways, -1), sizes, got.dtype, 1.0)
    pieces = flat.split([ways * n for n in sizes])
    return [p.view(ways * shape[0], *shape[1:]) for p, shape in zip(pieces, parts, strict=True)]
