"""A small config of the same architecture: few layers, few heads, narrow, with the ratios that matter kept.

Entries are known by the names that Hugging Face configs give them, not by model: what counts layers, heads,
widths, experts, tokens. Anything else stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_LAYERS = re.compile(r"^(num_(hidden_|encoder_|decoder_)?layers|n_layers?|(en|de)coder_layers|depth)$")
_HEADS = re.compile(r"^(n_heads?|num_heads|.*attention_heads|num_key_value_heads)$")
_HEAD_WIDTH = re.compile(r"(^|_)(head_dim|d_kv)$")
_WIDTH = re.compile(r"^(hidden_size|n_embd|d_model|embed_dim)$")
_INNER = re.compile(r"(intermediate_size|^n_inner$|ffn_dim$|^d_ff$)")
_RANK = re.compile(r"_lora_rank$")
_TOKEN = re.compile(r"_token_id$")

#: entries with a largest value of their own
_CAPS: Mapping[str, int] = MappingProxyType(
    {
        "vocab_size": 256,
        "n_routed_experts": 16,
        "num_local_experts": 8,
        "num_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    }
)
#: elements of a head of the small model
HEAD = 16
#: of the kind that there are fewest of: each axis of the small mesh divides them
HEADS = 2
#: at most so many heads of queries to one of keys
RATIO = 4


def shrunk(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Entries of a small config, to be put over those of ``config``.

    layers: how many there shall be, if there are as many. Fewer heads of keys than of queries stay fewer.
    """
    numbers = {k: v for k, v in config.items() if isinstance(v, int) and not isinstance(v, bool)}
    heads = {k: v for k, v in numbers.items() if _HEADS.match(k) and v > 0}
    least = min(heads.values(), default=1)
    result: dict[str, Any] = {
        k: min(least, HEADS) * (min(v // least, RATIO) if v % least == 0 else 1) for k, v in heads.items()
    }
    most = max(result.values(), default=4)
    wide = max((v for k, v in numbers.items() if _WIDTH.match(k)), default=0)
    for key, value in numbers.items():
        if _LAYERS.match(key):
            result[key] = min(value, layers)
        elif _HEAD_WIDTH.search(key):
            result[key] = min(value, HEAD)
        elif _WIDTH.match(key):
            result[key] = min(value, most * HEAD)
        elif _INNER.search(key):
            result[key] = _inner(value, wide, most * HEAD)
        elif _RANK.search(key):
            result[key] = min(value, 2 * HEAD)
        elif _TOKEN.search(key):
            result[key] = min(value, 1)
        elif key in _CAPS:
            result[key] = min(value, _CAPS[key])
    return {k: v for k, v in result.items() if v != config[k]}


def _inner(value: int, wide: int, narrow: int) -> int:
    """A width inside a layer, as many times that of the layer as before, in full heads."""
    if not wide:
        return min(value, 4 * HEAD)
    return min(value, max(HEAD, round(value * narrow / wide / HEAD) * HEAD))
