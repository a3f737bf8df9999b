"""FlexAttention as the attention that it describes: block masks as masks, soft caps as such, other changes of
scores written out.

`passes.simplify.band_masks` reads causal order, windows and documents from the mask, so that none is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoshard.errors import CaptureError
from autoshard.ops.attention import repeat_heads
from autoshard.torch_adapters.flex import change_of, mask_of, softcap_of


class _Left:
    """What is not computed. Raises CaptureError where it is asked for."""

    def numel(self) -> int:
        raise CaptureError(
            "flex_attention is asked for more than its output",
            why="log-sum-exps and largest scores are not captured",
            hint="leave return_lse and return_aux out",
        )


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: Sequence[Any],
    scale: float,
    *rest: Any,
    **options: Any,
) -> tuple[torch.Tensor, _Left, _Left]:
    """query [b, h, s, d], key and value [b or 1, h or fewer, t, ..] -> ([b, h, s, e], no statistics)."""
    key, value = (repeat_heads(x, query.shape[1]) for x in (key, value))
    key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    mask = mask_of(block_mask, query.device)
    change = change_of(score_mod)
    softcap = 0.0 if change is None else softcap_of(score_mod)
    if change is None or softcap:
        out, _ = torch.ops.autoshard.sdpa(query, key, value, mask, False, scale, 0, softcap)
        return out, _Left(), _Left()
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = change((query @ key.transpose(2, 3)).to(wide) * scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    shares = scores.softmax(-1).masked_fill(empty, 0.0)
    return shares.to(value.dtype) @ value, _Left(), _Left()
