"""``torch.nn.functional.embedding_bag`` as look-ups that are added up: a table may be split by rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

#: which is replaced while a model is traced
_BAG = F.embedding_bag


def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """Bags are rows of [b, n], or parts of [n] that begin at ``offsets`` [b] -> [b, h].

    What changes the table or how its gradient is stored is left to torch.
    """
    ours = (input.dim() == 2) != (offsets is not None) and (mode != "max" or input.dim() == 2)
    ours = ours and mode in ("sum", "mean", "max") and (per_sample_weights is None or mode == "sum")
    if not ours or max_norm is not None or scale_grad_by_freq or sparse:
        return _BAG(
            input,
            weight,
            offsets,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            per_sample_weights,
            include_last_offset,
            padding_idx,
        )
    each = F.embedding(input, weight)
    if per_sample_weights is not None:
        each = each * per_sample_weights.unsqueeze(-1)
    counted = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        counted = input != padding_idx % len(weight)
        each = each.masked_fill(~counted.unsqueeze(-1), float("-inf") if mode == "max" else 0.0)
    if mode == "max":
        most = each.max(1).values
        return most.masked_fill(~counted.any(1, keepdim=True), 0.0)
    numbers = counted.to(each.dtype).unsqueeze(-1)
    if offsets is None:
        total, number = each.sum(1), numbers.sum(1)
    else:
        begins = offsets[:-1] if include_last_offset else offsets
        places = torch.arange(len(input), device=input.device, dtype=begins.dtype)
        bag = torch.searchsorted(begins, places, right=True) - 1
        total = each.new_zeros(len(begins), each.shape[1]).index_add(0, bag, each)
        number = each.new_zeros(len(begins), 1).index_add(0, bag, numbers)
    return total if mode == "sum" else total / number.clamp(min=1.0)
