"""Assignments ``x[mask] = value`` where no shape depends on how much is masked."""

from __future__ import annotations

from typing import Any

import torch


def setitem(x: torch.Tensor, index: Any, value: Any) -> None:
    """``Tensor.__setitem__``; one value for all masked places is a choice, one for each is scattered.

    The gradients, unlike those of torch's own form, have no shape that depends on the mask. That there are as
    many values as places is a check of values.
    """
    if not _is_mask_of(x, index) or not isinstance(value, torch.Tensor):
        torch.Tensor.__setitem__(x, index, value)
        return
    mask = index.reshape(*index.shape, *[1] * (x.dim() - index.dim()))
    if _same_everywhere(x, index, value):
        x.copy_(torch.where(mask, value.to(x.dtype), x))
    elif value.shape[1:] == x.shape[index.dim() :]:
        x.copy_(x.masked_scatter(mask.expand(x.shape), value.to(x.dtype)))
    else:
        torch.Tensor.__setitem__(x, index, value)


def _is_mask_of(x: torch.Tensor, index: Any) -> bool:
    if not isinstance(index, torch.Tensor) or index.dtype != torch.bool or index.dim() == 0:
        return False
    return index.shape == x.shape[: index.dim()]


def _same_everywhere(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a value has nothing that runs over the masked places."""
    rest = x.dim() - mask.dim()
    lead = value.shape[: value.dim() - rest]
    # how many rows a mask chose is not asked
    return value.dim() <= rest or all(isinstance(n, int) and n == 1 for n in lead)
