"""Functions of torch that a trace does not get through as torch writes them.

They look at values first, or change in place what they make of a constant.
"""

from __future__ import annotations

import math
from typing import Any

import torch

#: not torch.cov and torch.nn.functional.gaussian_nll_loss, which are replaced while a model is traced
_COV, _NLL = torch.ops.aten.cov.default, torch.nn.functional.gaussian_nll_loss


def gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """The loss of a variance that is taken to be positive."""
    if not isinstance(var, torch.Tensor) or reduction not in ("none", "mean", "sum"):
        return _NLL(input, target, var, full, eps, reduction)
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    elif var.shape != input.shape and (
        var.dim() != input.dim() or sum(n for m, n in zip(input.shape, var.shape, strict=True) if m != n) != 1
    ):
        raise ValueError("var is of incorrect size")
    var = _at_least(var, eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def cosine_similarity(x1: torch.Tensor, x2: torch.Tensor, dim: int = 1, eps: float = 1e-8) -> torch.Tensor:
    """Along a dim of tensors that broadcast, each divided by its norm, of at least ``eps``."""
    dtype = torch.result_type(x1, x2)
    pair = torch.broadcast_tensors(x1.to(dtype), x2.to(dtype))
    first, second = (x / _at_least(torch.linalg.vector_norm(x, 2, dim, True), eps) for x in pair)
    return (first * second).sum(dim)


def _at_least(x: torch.Tensor, least: float) -> torch.Tensor:
    """A clamp that gradients go through."""
    return x + (x.clamp(min=least) - x).detach()


def cov(
    input: torch.Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None
) -> torch.Tensor:
    """Covariances of the rows of [v, n]; with weights, torch's own."""
    if fweights is not None or aweights is not None or input.dim() > 2:
        return _COV(input, correction=correction, fweights=fweights, aweights=aweights)
    rows = input.reshape(1, -1) if input.dim() < 2 else input
    apart = rows - rows.mean(1, keepdim=True)
    result = apart @ apart.mH / max(0, rows.shape[1] - correction)
    return result if input.dim() == 2 else result.reshape(())


def corrcoef(input: torch.Tensor) -> torch.Tensor:
    """Correlations of the rows of [v, n]."""
    result = cov(input)
    if result.dim() == 0:
        return result / result
    spread = result.diagonal().real.sqrt()
    result = result / spread.unsqueeze(1) / spread
    if not result.is_complex():
        return result.clamp(-1.0, 1.0)
    return torch.complex(result.real.clamp(-1.0, 1.0), result.imag.clamp(-1.0, 1.0))
