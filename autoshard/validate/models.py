"""Transformers by their sizes alone, without memory for their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from autoshard.errors import UsageError
from autoshard.interop.unfilled import Unfilled

Kind = Literal["gpt2", "llama", "qwen3_moe", "glm4_moe", "deepseek_v3"]


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of a layer.

    chosen: experts per token. ffn: width of one. shared: width of what all tokens take beside them, 0 for
    nothing. dense: how many first layers have a dense feed-forward layer instead.
    """

    count: int
    chosen: int
    ffn: int
    shared: int = 0
    dense: int = 0


@dataclass(frozen=True)
class Latent:
    """Widths of latent attention (DeepSeek-AI, DeepSeek-V2, section 2.1). queries: 0 if not compressed."""

    queries: int
    keys: int
    nope: int
    rope: int
    values: int


@dataclass(frozen=True)
class Architecture:
    """The sizes of a transformer.

    kind: ``gpt2`` (learned positions, GELU, one bias per product, tied embeddings), ``llama`` (rotary
    positions, SwiGLU), ``qwen3_moe`` (experts), ``glm4_moe`` (experts and shared ones) or ``deepseek_v3``
    (both, and latent attention). ffn: width of the dense feed-forward layers. kv_heads: of keys and values;
    gpt2 has as many as heads. head_dim: 0 for hidden / heads.
    """

    kind: Kind
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    positions: int
    head_dim: int = 0
    experts: Experts | None = None
    latent: Latent | None = None


def on_meta(
    shape: Architecture, batch: int, seq: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """(model in a type, inputs [batch, seq]) on the meta device: no memory for weights.

    Raises UsageError for a sequence longer than the model has positions for.
    """
    if seq > shape.positions:
        raise UsageError(
            f"sequences of {seq} tokens for a model with {shape.positions} positions",
            hint="give the architecture more positions",
        )
    with torch.device("meta"), Unfilled():
        model = model_of(shape).to(dtype)
        ids = torch.zeros(batch, seq, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


def model_of(shape: Architecture) -> nn.Module:
    """The model in fp32, on the default device."""
    build = {"gpt2": _gpt2, "llama": _llama, "qwen3_moe": _qwen3_moe, "glm4_moe": _glm4_moe}
    return build.get(shape.kind, _deepseek_v3)(shape)


def _gpt2(shape: Architecture) -> nn.Module:
    from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

    if shape.kv_heads != shape.heads:
        raise UsageError(f"a gpt2 with {shape.heads} heads and {shape.kv_heads} heads of keys and values")
    config = GPT2Config(
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.hidden,
        n_inner=shape.ffn,
        vocab_size=shape.vocab,
        n_positions=shape.positions,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def _llama(shape: Architecture) -> nn.Module:
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_sizes(shape), **_heads(shape))
    model: nn.Module = LlamaForCausalLM(config)
    return model


def _qwen3_moe(shape: Architecture) -> nn.Module:
    from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = _experts_of(shape)
    config = Qwen3MoeConfig(
        **_sizes(shape),
        **_heads(shape),
        num_experts=experts.count,
        num_experts_per_tok=experts.chosen,
        moe_intermediate_size=experts.ffn,
        mlp_only_layers=list(range(experts.dense)),
        norm_topk_prob=True,
    )
    model: nn.Module = Qwen3MoeForCausalLM(config)
    return model


def _glm4_moe(shape: Architecture) -> nn.Module:
    from transformers.models.glm4_moe import Glm4MoeConfig, Glm4MoeForCausalLM

    config = Glm4MoeConfig(**_sizes(shape), **_heads(shape), **_routed(_experts_of(shape)))
    model: nn.Module = Glm4MoeForCausalLM(config)
    return model


def _deepseek_v3(shape: Architecture) -> nn.Module:
    from transformers.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM

    latent = shape.latent
    if latent is None:
        raise UsageError(f"a {shape.kind} without the widths of its latent attention")
    config = DeepseekV3Config(
        **_sizes(shape),
        **_routed(_experts_of(shape)),
        kv_lora_rank=latent.keys,
        q_lora_rank=latent.queries or None,
        qk_rope_head_dim=latent.rope,
        qk_nope_head_dim=latent.nope,
        v_head_dim=latent.values,
    )
    model: nn.Module = DeepseekV3ForCausalLM(config)
    return model


def _sizes(shape: Architecture) -> dict[str, Any]:
    return {
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn or shape.hidden,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions,
        "tie_word_embeddings": False,
        "use_cache": False,
    }


def _heads(shape: Architecture) -> dict[str, Any]:
    return {"head_dim": shape.head_dim or shape.hidden // shape.heads}


def _experts_of(shape: Architecture) -> Experts:
    if shape.experts is None:
        raise UsageError(f"a {shape.kind} without the sizes of its experts")
    return shape.experts


def _routed(experts: Experts) -> dict[str, Any]:
    """Groups of experts decide which are chosen, and not how many."""
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.ffn,
        "n_shared_experts": max(1, experts.shared // experts.ffn),
        "first_k_dense_replace": experts.dense,
        "n_group": 1,
        "topk_group": 1,
    }
