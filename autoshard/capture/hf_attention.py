"""Hugging Face attention for the time of a capture: kernels that only GPUs have, sinks and soft caps."""

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

#: the names under which transformers finds `attention_forward`: with sinks, and with soft caps
NAME, CAPPED = "autoshard", "autoshard_capped"
#: what attention with a soft cap calls it
_CAP = "attn_logit_softcapping"


@contextmanager
def registered() -> Iterator[None]:
    """Offer `attention_forward` in transformers' tables, with the masks that its ``sdpa`` takes."""
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    masks = sys.modules["transformers.masking_utils"].ALL_MASK_ATTENTION_FUNCTIONS

    def capped_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        # where padding may hide all keys, eager mode's gradients flow through scores that it hides
        padded = kwargs.get("attention_mask") is not None
        mask: torch.Tensor | None = masks["eager" if padded else "sdpa"](*args, **kwargs)
        return mask

    for name, mask in ((NAME, masks["sdpa"]), (CAPPED, capped_mask)):
        functions.register(name, attention_forward)
        masks.register(name, mask)
    try:
        yield
    finally:
        for table in (functions, masks):
            for name in (NAME, CAPPED):
                del table._global_mapping[name]  # to which register adds, and nothing public takes from


def choose(model: nn.Module, configs: Sequence[Any]) -> bool:
    """Set the attention that a capture follows in every config; whether it is ours in any.

    Kernels of GPUs (FlashAttention, FlexAttention) become torch's, or the model's own code where torch's do
    not compute the same. Attention with sinks or soft caps, which is written out otherwise, is ours.
    """
    owners = [m for m in model.modules() if hasattr(m, "_supports_attention_backend")]
    ours = False
    for config in configs:
        own = [m for m in owners if m.__dict__.get("config") is config]
        given = config.__dict__.get("_attn_implementation_internal")
        gpu = isinstance(given, str) and ("flash" in given or "flex" in given)
        if given in (None, "eager") or gpu:
            named = {_name_of(m) for m in own}
            if len(named) == 1 and named != {""}:
                (config._attn_implementation_internal,), ours = named, True
            elif gpu:
                plain = all(getattr(m, "_supports_sdpa", True) for m in own)
                config._attn_implementation_internal = "sdpa" if plain else "eager"
    return ours


def _name_of(model: Any) -> str:
    """Of ours, if its attention is called by name and given sinks or a soft cap; else ""."""
    kernels = ("_supports_flash_attn", "_supports_flex_attn")
    if not (model._supports_attention_backend and any(getattr(model, k, False) for k in kernels)):
        return ""
    if any(isinstance(m.__dict__["_parameters"].get("sinks"), nn.Parameter) for m in model.modules()):
        return NAME
    return CAPPED if any(m.__dict__.get(_CAP) is not None for m in model.modules()) else ""


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
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [b, h, s, d], key and value of as many heads or fewer, s_aux: sinks [h] -> ([b, s, h, e], None).

    Raises CaptureError for sinks beside a soft cap, and for what changes scores in another way.
    """
    names = {"sinks": s_aux, "a softcap": softcap, "a position_bias": kwargs.get("position_bias")}
    given = [name for name, value in names.items() if value is not None]
    if len(given) > 1 or "a position_bias" in given:
        raise CaptureError(
            f"attention is given {' and '.join(given)}",
            why="of what changes scores, sinks alone and a soft cap alone are known",
            hint="leave one of them out in the model's config",
        )
    key, value = (repeat_heads(x, query.shape[1]) for x in (key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    hides = attention_mask is None or attention_mask.dtype == torch.bool
    if softcap is not None and (dropout > 0.0 or not hides):
        out = _capped(query, key, value, attention_mask, dropout, causal, scale, softcap)
    elif softcap is not None:
        out = torch.ops.autoshard.sdpa(query, key, value, attention_mask, causal, scale, 0, softcap)[0]
    elif s_aux is None:
        out = F.scaled_dot_product_attention(query, key, value, attention_mask, dropout, causal, scale)
    elif dropout > 0.0:
        out = _written_out(query, key, value, attention_mask, dropout, causal, scale, s_aux)
    else:
        out = AttentionWithSinks.apply(query, key, value, attention_mask, causal, scale, s_aux)
    return out.transpose(1, 2).contiguous(), None


def _capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Scores c tanh(x / c) written out, as eager mode does."""
    scores = torch.tanh(q @ k.transpose(2, 3) * scale / softcap) * softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    shares = scores.softmax(-1, dtype=torch.float64 if scores.dtype == torch.float64 else torch.float32)
    return F.dropout(shares.to(q.dtype), dropout) @ v


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
