"""A small configuration of any kind of model, made from the default one by the names of its entries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

VOCAB = 128
_SIZES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(
            ("hidden_size", "d_model", "embed_dim", "n_embd", "emb_dim", "dim", "hidden_dim"), 32
        ),
        **dict.fromkeys(
            ("embedding_size", "word_embed_proj_dim", "decoder_hidden_size", "out_hidden_size"), 32
        ),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "d_inner", "decoder_intermediate_size"), 48),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
        **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "depth", "num_codebooks"), 2),
        **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_register_tokens"), 1),
        **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
        **dict.fromkeys(("max_source_positions", "max_target_positions", "max_seq_len"), 64),
        **dict.fromkeys(
            ("q_lora_rank", "kv_lora_rank", "projection_dim", "num_mel_bins", "index_head_dim"), 16
        ),
        **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
        **dict.fromkeys(("patch_size", "encoder_stride", "state_size", "mamba_d_state", "sliding_window"), 8),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input"), 8),
        **dict.fromkeys(("num_frames", "rotary_dim", "linear_num_value_heads", "index_topk"), 4),
        **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "index_n_heads", "mlp_ratio"), 2),
        **{"num_labels": 3, "num_queries": 6, "image_size": 32, "max_2d_position_embeddings": 512},
    }
)
#: end of a name -> size
_ENDS = (
    (re.compile(r"vocab_size(_per_layer_input)?$"), VOCAB),
    (re.compile(r"^n_layers?$|(^|_)(num_)?(hidden_|encoder_|decoder_)?layers?$"), 2),
    (re.compile(r"(heads?)$"), 4),
    (re.compile(r"(ffn_dim|intermediate_size|ffn_size|ffn_hidden_size|mlp_dim)$"), 48),
    (re.compile(r"(hidden_size|hidden_dim|_embed_dim|_dim)$"), 32),
)
_TOKEN = re.compile(r"token_(id|index)$")


def small(config: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Entries that make a config like this one small, those of its parts included.

    sizes: by name, before those that are usual.
    """
    found: dict[str, Any] = {}
    token = VOCAB - 1
    for name, value in config.__dict__.items():
        if name.startswith("_"):
            continue
        if hasattr(value, "to_dict"):
            found[name] = {**small(value, sizes), "model_type": value.model_type}
        elif _TOKEN.search(name) and isinstance(value, int) and value >= VOCAB:
            found[name], token = token, token - 1
        elif name == "decoder_start_token_id" and value is None:
            found[name] = 1
        elif name in ("rope_parameters", "rope_scaling") and "mrope_section" in str(value):
            found[name] = _sections(value)
        elif "drop" in name and isinstance(value, list | tuple):
            found[name] = [0.0] * len(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            size = _size(name, value, sizes)
            if size is not None:
                found[name] = size
    return found


def _size(name: str, value: float, sizes: Mapping[str, int]) -> float | None:
    if isinstance(value, float):
        return (
            0.0
            if "drop" in name or "jitter" in name
            else min(value, float(_SIZES[name]))
            if name in _SIZES
            else None
        )
    if name in sizes:
        return sizes[name]
    if name in _SIZES:
        return min(value, _SIZES[name]) if value > 0 else None
    if name.startswith(("first", "full", "kernel")):
        return None
    most = next((size for end, size in _ENDS if end.search(name)), None)
    return None if most is None else min(value, most)


def _sections(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary embeddings in time, height and width for heads of 8."""
    fixed = {"mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    return {k: _sections(v) if isinstance(v, dict) else fixed.get(k, v) for k, v in entries.items()}


def merged(entries: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(entries)
    for name, value in more.items():
        inner = out.get(name)
        both = isinstance(value, dict) and isinstance(inner, dict)
        out[name] = merged(inner, value) if both else value
    return out
