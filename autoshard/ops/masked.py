"""Assignments ``x[mask] = value`` where no shape depends on how much is masked."""

from __future__ import annotations

from typing import Any

import torch


def setitem(x: torch.Tensor, index: Any, value: Any) -> None:
    """``Tensor.__setitem__``; one value for all masked places is written as a choice.

    Its gradient, unlike that of torch's own form, has no shape that depends on the mask.
    """
    if _is_mask_of(x, index) and isinstance(value, torch.Tensor) and _same_everywhere(x, index, value):
        mask = index.reshape(*index.shape, *[1] * (x.dim() - index.dim()))
        x.copy_(torch.where(mask, value.to(x.dtype), x))
    else:
        torch.Tensor.__setitem__(x, index, value)


def _is_mask_of(x: torch.Tensor, index: Any) -> bool:
    if not isinstance(index, torch.Tensor) or index.dtype != torch.bool or index.dim() == 0:
        return False
    return index.shape == x.shape[: index.dim()]


def _same_everywhere(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a value has nothing that runs over the masked places."""
    rest = x.dim() - mask.dim()
    return value.dim() <= rest or all(n == 1 for n in value.shape[: value.dim() - rest])
