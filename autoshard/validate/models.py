"""Transformers by their sizes alone, without memory for their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from autoshard.errors import UsageError
from autoshard.interop.unfilled import Unfilled

Kind = Literal["gpt2", "llama", "deepseek_v3"]


@dataclass(frozen=True)
class Architecture:
    """The sizes of a transformer.

    kind: ``gpt2`` (learned positions, GELU, one bias per product, tied embeddings), ``llama`` (rotary
    positions, SwiGLU) or ``deepseek_v3`` (latent attention and experts, the sizes of DeepSeek-V3 itself
    beside those given here). ffn: width of the dense feed-forward layers. kv_heads: of keys and values;
    gpt2 has as many as heads.
    """

    kind: Kind
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    positions: int


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
    return {"gpt2": _gpt2, "llama": _llama, "deepseek_v3": _deepseek_v3}[shape.kind](shape)


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

    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def _deepseek_v3(shape: Architecture) -> nn.Module:
    """Sizes that are not of the architecture: DeepSeek-AI, DeepSeek-V3 Technical Report, section 4.2."""
    from transformers.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.positions,
        moe_intermediate_size=2048,
        n_shared_experts=1,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        use_cache=False,
    )
    model: nn.Module = DeepseekV3ForCausalLM(config)
    return model
