"""Functions of torch whose own form has no rule, or is traced wrongly, in terms of others."""

from __future__ import annotations

import torch


def multilabel_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Hinges of labels against all other classes.

    input: [n, classes] or [classes]. target: labels up to the first -1. What torch 2.13 traces counts labels
    behind it, too (`torch._decomp.decompositions.multilabel_margin_loss_forward`).
    """
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    counts = (target >= 0).to(input.dtype).cumprod(-1)
    labels = target.clamp(min=0)
    others = torch.zeros_like(input).scatter_add(-1, labels, counts) == 0
    hinges = (1 - input.gather(-1, labels).unsqueeze(-1) + input.unsqueeze(-2)).clamp(min=0)
    loss = (hinges * counts.unsqueeze(-1) * others.unsqueeze(-2)).sum((-2, -1)) / input.shape[-1]
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def diag(input: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
    """The diagonal of a matrix, or a matrix with one."""
    return torch.diag_embed(input, diagonal) if input.dim() == 1 else torch.diagonal(input, diagonal).clone()


def fill_diagonal(x: torch.Tensor, fill_value: float, wrap: bool = False) -> torch.Tensor:
    """A matrix that need not be wrapped; others are left to torch."""
    if x.dim() != 2 or (wrap and x.shape[0] > x.shape[1]):
        return x.fill_diagonal_(fill_value, wrap)
    here = torch.eye(*x.shape, dtype=torch.bool, device=x.device)
    return x.copy_(x.masked_fill(here, fill_value))


def take(input: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Elements by their numbers."""
    return input.reshape(-1)[index]
