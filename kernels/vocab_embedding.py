"""Look-ups in a table of which a rank holds a range of rows: the reference, which is the CPU implementation.

An all-reduce (or reduce-scatter) of the parts gives the whole look-up; the gradient of a rank's rows
needs no communication beyond that of the incoming gradient.
"""

from __future__ import annotations

import torch

from autoshard.torch_adapters.op_library import define


def embedding_part(weight: torch.Tensor, indices: torch.Tensor, offset: int) -> torch.Tensor:
    """Rows of a table of which this rank holds ``[offset, offset + len)``; zeros for all others.

    weight [rows, h], indices [...] -> [..., h].
    """
    local = indices - offset
    outside = (local < 0) | (local >= weight.shape[0])
    result = torch.nn.functional.embedding(local.masked_fill(outside, 0), weight)
    return result.masked_fill_(outside.unsqueeze(-1), 0)


def embedding_part_backward(
    grad: torch.Tensor, indices: torch.Tensor, rows: int, offset: int, padding: int
) -> torch.Tensor:
    """Gradient of the rows ``[offset, offset + rows)``: grad [..., h] -> [rows, h]."""
    local = indices.reshape(-1) - offset
    outside = (local < 0) | (local >= rows)
    if padding >= 0:
        outside = outside | (local == padding - offset)
    out = grad.new_zeros((rows + 1, grad.shape[-1]))
    out.index_add_(0, local.masked_fill(outside, rows), grad.reshape(-1, grad.shape[-1]))
    return out[:rows]


define(
    "embedding_part(Tensor weight, Tensor indices, int offset) -> Tensor",
    embedding_part,
    lambda weight, indices, offset: weight.new_empty((*indices.shape, weight.shape[1])),
)
define(
    "embedding_part_backward(Tensor grad, Tensor indices, int rows, int offset, int padding) -> Tensor",
    embedding_part_backward,
    lambda grad, indices, rows, offset, padding: grad.new_empty((rows, grad.shape[-1])),
)
