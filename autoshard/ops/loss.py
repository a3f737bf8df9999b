"""Cross-entropy of rows of logits with class indices."""

from __future__ import annotations

from typing import Any

import torch

from autoshard.kernels.vocab_ce import xent_finish, xent_part_backward, xent_stats
from autoshard.torch_adapters.op_library import define


def xent(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [n, v], target [n] -> (loss of each row [n] in the type of the logits, log-sum-exp [n]).

    Rows whose target is ``ignore_index`` have loss 0. Computed in fp32 (f64 for f64 logits).
    """
    stats = xent_stats(logits, target, 0)
    return xent_finish(stats, target, ignore_index, label_smoothing, logits.shape[1], logits.dtype)


def xent_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    """Gradient [n, v] of the logits from the gradients [n] of the rows."""
    return xent_part_backward(grad, logits, target, lse, ignore_index, label_smoothing, logits.shape[1], 0)


def _fake(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = logits.new_empty(logits.shape[:1])
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return rows, torch.empty_like(rows, dtype=wide)


def _fake_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    return torch.empty_like(logits)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, target, ctx.ignore_index, ctx.label_smoothing = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_rows: torch.Tensor | None, grad_lse: object) -> tuple[Any, ...]:
    if grad_rows is None:
        return None, None, None, None
    logits, target, lse = ctx.saved_tensors
    grad = torch.ops.autoshard.xent_backward(
        grad_rows, logits, target, lse, ctx.ignore_index, ctx.label_smoothing
    )
    return grad, None, None, None


define(
    "xent(Tensor logits, Tensor target, int ignore_index, float label_smoothing) -> (Tensor, Tensor)",
    xent,
    _fake,
    backward=_backward,
    save=_save,
)
define(
    "xent_backward(Tensor grad, Tensor logits, Tensor target, Tensor lse, int ignore_index, "
    "float label_smoothing) -> Tensor",
    xent_backward,
    _fake_backward,
)
