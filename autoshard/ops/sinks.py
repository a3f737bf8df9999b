"""Attention with a sink: every head has one more score that takes its share of a softmax and gives nothing.

With s = log-sum-exp of the scores, out [b, h, s, e] becomes out * exp(s - t), t = log(exp(s) + exp(sink)). In
its gradient the sink is one more key whose value is zero: gradients of queries, keys and values are those of
attention with t in place of s and the new output in place of the old one (Dao 2022, algorithm 4), and that of
the sink is minus the sum of exp(sink - t) * (gradient . output) over all rows.
"""

from __future__ import annotations

from typing import Any

import torch

import autoshard.ops.attention  # noqa: F401 (defines the ops called here)

_ops = torch.ops.autoshard


class AttentionWithSinks(torch.autograd.Function):
    """``apply(q, k, v, mask, causal, scale, sinks)``: as ``autoshard::sdpa``, sinks [h] -> [b, h, s, e]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float,
        sinks: torch.Tensor,
    ) -> torch.Tensor:
        out, lse = _ops.sdpa(q, k, v, mask, causal, scale)
        sink = sinks.to(lse.dtype).view(1, -1, 1)
        total = torch.logaddexp(lse, sink)
        kept: torch.Tensor = (out * torch.exp(lse - total).unsqueeze(-1)).to(out.dtype)
        ctx.save_for_backward(q, k, v, kept, total, sinks, *(() if mask is None else (mask,)))
        ctx.causal, ctx.scale = causal, scale
        return kept

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, total, sinks, *masks = ctx.saved_tensors
        (grad,) = grads
        mask = masks[0] if masks else None
        new = _ops.sdpa_backward(grad, q, k, v, out, total, mask, ctx.causal, ctx.scale)
        share = torch.exp(sinks.to(total.dtype).view(1, -1, 1) - total)
        lost = (grad.to(total.dtype) * out).sum(-1) * share
        return (*new, None, None, None, -lost.sum((0, 2)).to(sinks.dtype))
