"""Cross-entropy over a vocabulary that is split over ranks: the reference, which is the CPU implementation.

Each rank reduces its part of a row of logits to four numbers; one gather of those and `merge_stats` give
the row's loss and log-sum-exp on every rank, and the gradient of a part needs nothing more. Compare the
all-reduces of a maximum, a sum and a picked logit in M. Shoeybi et al., Megatron-LM, 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.torch_adapters.op_library import define


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


def merge_stats(stats: Sequence[torch.Tensor]) -> torch.Tensor:
    """Row statistics [n, 4] of cross-entropy over vocabulary shards, merged.

    Columns: m, s (sum of exponentials is s * exp(m)), the target's logit, the sum of the logits.
    """
    stacked = torch.stack(list(stats))
    top = stacked[..., 0].amax(0)
    weights = torch.exp(stacked[..., 0] - top)
    weights = torch.where(torch.isfinite(stacked[..., 0]), weights, torch.zeros_like(weights))
    scale = (stacked[..., 1] * weights).sum(0)
    return torch.stack((top, scale, stacked[..., 2].sum(0), stacked[..., 3].sum(0)), -1)


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


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _stats_fake(logits: torch.Tensor, target: torch.Tensor, offset: int) -> torch.Tensor:
    return logits.new_empty((logits.shape[0], 4), dtype=_wide_dtype(logits.dtype))


def _finish_fake(
    stats: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    vocabulary: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    return stats.new_empty(stats.shape[:1], dtype=dtype), stats.new_empty(stats.shape[:1])


define("xent_stats(Tensor logits, Tensor target, int offset) -> Tensor", xent_stats, _stats_fake)
define(
    "xent_finish(Tensor stats, Tensor target, int ignore_index, float label_smoothing, int vocabulary, "
    "ScalarType dtype) -> (Tensor, Tensor)",
    xent_finish,
    _finish_fake,
)
define(
    "xent_part_backward(Tensor grad, Tensor logits, Tensor target, Tensor lse, int ignore_index, "
    "float label_smoothing, int vocabulary, int offset) -> Tensor",
    xent_part_backward,
    lambda grad, logits, *rest: torch.empty_like(logits),
)
