"""Ops that programs call on shards: parts of a table look-up and of a cross-entropy.

They take and give plain tensors and need no gradient formula: programs are already differentiated.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("autoshard", "FRAGMENT")
_LIBRARY.define("embedding_part(Tensor weight, Tensor indices, int offset) -> Tensor")
_LIBRARY.define(
    "embedding_part_backward(Tensor grad, Tensor indices, int rows, int offset, int padding) -> Tensor"
)
_LIBRARY.define("xent_stats(Tensor logits, Tensor target, int offset) -> Tensor")
_LIBRARY.define(
    "xent_finish(Tensor stats, Tensor target, int ignore_index, float label_smoothing, int vocabulary, "
    "ScalarType dtype) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "xent_part_backward(Tensor grad, Tensor logits, Tensor target, Tensor lse, int ignore_index, "
    "float label_smoothing, int vocabulary, int offset) -> Tensor"
)


def embedding_part(weight: torch.Tensor, indices: torch.Tensor, offset: int) -> torch.Tensor:
    """Rows of a table of which this rank holds ``[offset, offset + len)``; zeros for all others.

    weight [rows, h], indices [...] -> [..., h].
    """
    local = indices - offset
    outside = (local < 0) | (local >= weight.shape[0])
    found = torch.nn.functional.embedding(local.masked_fill(outside, 0), weight)
    return found.masked_fill_(outside.unsqueeze(-1), 0)


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


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def xent_stats(logits: torch.Tensor, target: torch.Tensor, offset: int) -> torch.Tensor:
    """Statistics of each row over the part ``[offset, offset + v)`` of the vocabulary.

    logits [n, v], target [n] -> [n, 4]: m and s with sum of exponentials s * exp(m), the logit of the
    target if it lies in this part (else 0), the sum of the logits.
    """
    wide = _wide(logits)
    local = target - offset
    inside = (local >= 0) & (local < logits.shape[1])
    picked = wide.gather(1, local.masked_fill(~inside, 0).unsqueeze(1)).squeeze(1)
    lse = torch.logsumexp(wide, 1)
    picked = picked.masked_fill(~inside, 0)
    return torch.stack((lse, torch.ones_like(lse), picked, wide.sum(1)), 1)


def xent_finish(
    stats: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    vocabulary: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss of each row [n], log-sum-exp [n]) from merged statistics [n, 4]; 0 where ignored."""
    lse = stats[:, 0] + stats[:, 1].log()
    rows = lse - (1 - label_smoothing) * stats[:, 2]
    if label_smoothing:
        rows = rows - label_smoothing / vocabulary * stats[:, 3]
    return rows.masked_fill(target == ignore_index, 0).to(dtype), lse


def xent_part_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    vocabulary: int,
    offset: int,
) -> torch.Tensor:
    """Gradient of the logits [n, v] of one part of the vocabulary: (softmax - target) * grad."""
    wide = _wide(logits)
    scale = grad.to(wide.dtype).masked_fill(target == ignore_index, 0).unsqueeze(1)
    out = torch.exp(wide - lse.to(wide.dtype).unsqueeze(1))
    if label_smoothing:
        out -= label_smoothing / vocabulary
    local = target - offset
    inside = (local >= 0) & (local < logits.shape[1])
    hit = torch.where(inside, label_smoothing - 1.0, 0.0).to(wide.dtype).unsqueeze(1)
    out.scatter_add_(1, local.masked_fill(~inside, 0).unsqueeze(1), hit)
    return out.mul_(scale).to(logits.dtype)


for _name, _fn in (
    ("embedding_part", embedding_part),
    ("embedding_part_backward", embedding_part_backward),
    ("xent_stats", xent_stats),
    ("xent_finish", xent_finish),
    ("xent_part_backward", xent_part_backward),
):
    _LIBRARY.impl(_name, _fn, "CompositeExplicitAutograd")
