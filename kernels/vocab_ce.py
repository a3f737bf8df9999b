"""Cross-entropy over a vocabulary that is split over ranks: references (the CPU implementations) and ops.

Each rank reduces its part of a row of logits to four numbers; one gather of those and `merge_stats` give
the row's loss and log-sum-exp on every rank, and the gradient of a part needs nothing more. Compare the
all-reduces of a maximum, a sum and a picked logit in M. Shoeybi et al., Megatron-LM, 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from autoshard.kernels.launch import launched
from autoshard.kernels.norm import wide
from autoshard.kernels.registry import KernelSpec, all_moved
from autoshard.kernels.samples import Generator, normal, whole
from autoshard.torch_adapters.op_library import define


def xent_stats(logits: torch.Tensor, target: torch.Tensor, offset: int) -> torch.Tensor:
    """Statistics of each row over the part ``[offset, offset + v)`` of the vocabulary.

    logits [n, v], target [n] -> [n, 4]: m and s with sum of exponentials s * exp(m), the logit of the
    target if it lies in this part (else 0), the sum of the logits.
    """
    full = wide(logits)
    local = target - offset
    inside = (local >= 0) & (local < logits.shape[1])
    picked = full.gather(1, local.masked_fill(~inside, 0).unsqueeze(1)).squeeze(1)
    lse = torch.logsumexp(full, 1)
    picked = picked.masked_fill(~inside, 0)
    return torch.stack((lse, torch.ones_like(lse), picked, full.sum(1)), 1)


def merge_stats(stats: Sequence[torch.Tensor]) -> torch.Tensor:
    """Row statistics [n, 4] of cross-entropy over vocabulary shards, merged.

    Columns: m, s (sum of exponentials is s * exp(m)), the target's logit, the sum of the logits.
    """
    return cast(torch.Tensor, torch.ops.autoshard.xent_merge(torch.stack(list(stats))))


def xent_merge(stacked: torch.Tensor) -> torch.Tensor:
    """Statistics of all shards [ways, n, 4] -> those of the full rows [n, 4]."""
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
    full = wide(logits)
    scale = grad.to(full.dtype).masked_fill(target == ignore_index, 0).unsqueeze(1)
    out = torch.exp(full - lse.to(full.dtype).unsqueeze(1))
    if label_smoothing:
        out -= label_smoothing / vocabulary
    local = target - offset
    inside = (local >= 0) & (local < logits.shape[1])
    hit = torch.where(inside, label_smoothing - 1.0, 0.0).to(full.dtype).unsqueeze(1)
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


define(
    "xent_stats(Tensor logits, Tensor target, int offset) -> Tensor",
    xent_stats,
    _stats_fake,
    cuda=launched("triton_vocab_ce", "xent_stats", xent_stats),
)
define(
    "xent_merge(Tensor stacked) -> Tensor",
    xent_merge,
    lambda stacked: stacked.new_empty(stacked.shape[1:]),
    cuda=launched("triton_vocab_ce", "xent_merge", xent_merge),
)
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
    cuda=launched("triton_vocab_ce", "xent_part_backward", xent_part_backward),
)


def _rows(
    g: Generator, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """(logits, targets, offset) with targets inside, outside and ignored."""
    for n, v, offset in ((5, 1000, 300), (3, 17, 0), (2, 5000, 4)):
        target = whole(g, 0, 2 * v, (n,), device)
        target[0] = offset
        target[-1] = -100
        yield normal(g, (n, v), dtype, device, 4.0), target, offset
    logits = normal(g, (4, 100), dtype, device)
    logits[0] = -float("inf")  # all of this part is masked
    logits[1, 5:] = -float("inf")
    logits[2] = 80.0
    logits[3, 7] = float("nan")
    yield logits, torch.tensor([3, 2, 99, 1], device=device), 0


def _stats_samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    return _rows(g, dtype, device)


def _merge_samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    yield (normal(g, (3, 300, 4), torch.float32, device).abs(),)
    one = normal(g, (2, 5, 4), torch.float32, device).abs()
    one[0, 1, 0] = -float("inf")
    one[:, 2, 0] = -float("inf")
    yield (one,)


def _backward_samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for smoothing, (logits, target, offset) in zip(
        (0.0, 0.1, 0.0, 0.1), _rows(g, dtype, device), strict=True
    ):
        lse = torch.logsumexp(logits.float().nan_to_num(neginf=0.0), 1) + 0.5
        grad = normal(g, (logits.shape[0],), dtype, device)
        yield grad, logits, target, lse, -100, smoothing, 2 * logits.shape[1], offset


def _large_stats(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    yield normal(g, (8192, 131072), dtype, device), whole(g, 0, 131072, (8192,), device), 0


def _large_merge(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    yield (normal(g, (8, 8192, 4), torch.float32, device).abs(),)


def _large_backward(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for logits, target, offset in _large_stats(g, dtype, device):
        lse = torch.full((logits.shape[0],), 12.5, device=device)
        grad = normal(g, (logits.shape[0],), dtype, device)
        yield grad, logits, target, lse, -100, 0.0, logits.shape[1], offset


SPECS = (
    KernelSpec(
        "xent_stats", xent_stats, ("triton_vocab_ce", "xent_stats"), all_moved, _stats_samples, _large_stats
    ),
    KernelSpec(
        "xent_merge", xent_merge, ("triton_vocab_ce", "xent_merge"), all_moved, _merge_samples, _large_merge
    ),
    KernelSpec(
        "xent_part_backward",
        xent_part_backward,
        ("triton_vocab_ce", "xent_part_backward"),
        all_moved,
        _backward_samples,
        _large_backward,
    ),
)
