"""Attention over a part of the keys, and the merge of parts: softmax-weighted sums, by their log-sum-exp.

Few queries attend to many keys in cross-attention to long inputs, resamplers and pooling. Where an axis
divides the keys, a rank attends to those that it has, and ranks merge results of the queries' size rather
than gather the keys (Shyam et al., "Tree attention", 2024, section 5).

A part is [b, h, s, e + 1] in fp32 (fp64 for fp64): its output, and its log-sum-exp, -inf for rows that attend
to none of its keys. The masks of keys are as in `ops.attention`, without documents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.ops.attention import in_bshd, in_groups
from autoshard.torch_adapters.op_library import define

_NONE = float("-inf")


def sdpa_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    """q [b, h, s, d], k [b, h, t, d], v [b, h, t, e] -> [b, h, s, e + 1]."""
    out, lse = torch.ops.autoshard.sdpa(q, k, v, mask, False, scale, 0, softcap)
    lse = lse.unsqueeze(-1)
    if mask is not None:  # of rows without a key kernels give any value
        seen = mask if mask.dtype == torch.bool else mask > _NONE
        hidden = ~seen.any(-1, keepdim=True)
        out, lse = out.masked_fill(hidden, 0.0), lse.masked_fill(hidden, _NONE)
    return torch.cat((out.to(lse.dtype), lse), -1)


def sdpa_joined(parts: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [b, h, s, e], log-sum-exp [b, h, s]) of merged parts; 0 where a row attends to no key."""
    lse = parts[..., -1]
    return in_bshd(parts[..., :-1].to(dtype)), lse.masked_fill(lse == _NONE, 0.0)


def weighted(parts: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """What is added up of a part: its output and 1, both times its weight. most: the largest log-sum-exp of
    all parts [b, h, s, 1]."""
    weight = torch.exp(parts[..., -1:] - most.masked_fill(most == _NONE, 0.0))
    return torch.cat((parts[..., :-1] * weight, weight), -1)


def normalised(total: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """The merged part, of the sum of `weighted` ones."""
    weight = total[..., -1:]
    out = total[..., :-1] / weight.masked_fill(weight == 0, 1.0)
    return torch.cat((out, most + weight.log()), -1)


def merge_parts(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The part over the keys of all."""
    most = torch.stack([each[..., -1:] for each in parts]).amax(0)
    return normalised(torch.stack([weighted(each, most) for each in parts]).sum(0), most)


def _fake_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:3], v.shape[-1] + 1), dtype=dtype)


def _fake_joined(parts: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    b, h, s, width = parts.shape
    out = parts.new_empty((b, s, h, width - 1), dtype=dtype).transpose(1, 2)
    return out, parts.new_empty((b, h, s))


define(
    "sdpa_parts(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, float softcap=0.0) -> Tensor",
    in_groups(sdpa_parts),
    in_groups(_fake_parts),
)
define("sdpa_joined(Tensor parts, ScalarType dtype) -> (Tensor, Tensor)", sdpa_joined, _fake_joined)
