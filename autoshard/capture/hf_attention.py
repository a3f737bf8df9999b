"""Hugging Face attention for the time of a capture: kernels that only GPUs have, and sinks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from autoshard.errors import CaptureError
from autoshard.ops.attention import repeat_heads
from autoshard.ops.sinks import AttentionWithSinks

#: the name under which transformers finds `attention_forward`
NAME = "autoshard"


@contextmanager
def registered() -> Iterator[None]:
    """Offer `attention_forward` in transformers' tables, with the masks that its ``sdpa`` takes."""
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    masks = sys.modules["transformers.masking_utils"].ALL_MASK_ATTENTION_FUNCTIONS
    functions.register(NAME, attention_forward)
    masks.register(NAME, masks["sdpa"])
    try:
        yield
    finally:
        for table in (functions, masks):
            del table._global_mapping[NAME]  # to which register adds, and nothing public takes from


def choose(model: nn.Module, configs: Sequence[Any]) -> bool:
    """Set the attention that a capture follows in every config; whether it is ours in any.

    Kernels of GPUs (FlashAttention, FlexAttention) become torch's, or the model's own code where torch's do
    not compute the same, as for soft caps. Sinks, which are written out otherwise, are ours.
    """
    owners = [m for m in model.modules() if hasattr(m, "_supports_attention_backend")]
    ours = False
    for config in configs:
        own = [m for m in owners if m.__dict__.get("config") is config]
        given = config.__dict__.get("_attn_implementation_internal")
        gpu = isinstance(given, str) and ("flash" in given or "flex" in given)
        if given in (None, "eager") or gpu:
            if own and all(map(_has_sinks, own)):
                config._attn_implementation_internal, ours = NAME, True
            elif gpu:
                plain = all(getattr(m, "_supports_sdpa", True) for m in own)
                config._attn_implementation_internal = "sdpa" if plain else "eager"
    return ours


def _has_sinks(model: Any) -> bool:
    """Whether its attention is called by name, and given sinks."""
    kernels = ("_supports_flash_attn", "_supports_flex_attn")
    called = model._supports_attention_backend and any(getattr(model, k, False) for k in kernels)
    return called and any(
        isinstance(m.__dict__["_parameters"].get("sinks"), nn.Parameter) for m in model.modules()
    )


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [b, h, s, d], key and value of as many heads or fewer, s_aux: sinks [h] -> ([b, s, h, e], None).

    Raises CaptureError for what changes scores in another way.
    """
    unknown = [n for n in ("softcap", "position_bias") if kwargs.get(n) is not None]
    if unknown:
        raise CaptureError(
            f"attention is given sinks and {' and '.join(unknown)}",
            why="sinks are computed from the log-sum-exp of plain scores",
            hint="leave one of them out in the model's config",
        )
    key, value = (repeat_heads(x, query.shape[1]) for x in (key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if s_aux is None:
        out = F.scaled_dot_product_attention(query, key, value, attention_mask, dropout, causal, scale)
    elif dropout > 0.0:
        out = _written_out(query, key, value, attention_mask, dropout, causal, scale, s_aux)
    else:
        out = AttentionWithSinks.apply(query, key, value, attention_mask, causal, scale, s_aux)
    return out.transpose(1, 2).contiguous(), None


def _written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Dropout drops shares of the softmax, which no kernel hands out."""
    scores = q @ k.transpose(2, 3) * scale
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    shares = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return F.dropout(shares, dropout) @ v
