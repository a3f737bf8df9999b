"""Models that both sides of a benchmark run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def bench_llama(layers: int = 6, hidden: int = 256, vocab: int = 1024) -> nn.Module:
    """A small Llama with random weights, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        hidden_size=hidden,
        intermediate_size=int(2.75 * hidden),
        vocab_size=vocab,
        max_position_embeddings=512,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def bench_batch(batch: int = 8, seq: int = 64, vocab: int = 1024) -> dict[str, torch.Tensor]:
    """One global batch of tokens, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocab, (batch, seq), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def small_model(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model of a family with a batch: ``llama``, ``gpt2``, ``t5`` or ``mixtral``; 4 layers, width 128."""
    import transformers as hf

    torch.manual_seed(0)
    llama = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "use_cache": False}
    made: dict[str, Callable[[], nn.Module]] = {
        "llama": lambda: bench_llama(4, 128),
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=1024, n_embd=128, n_layer=4, n_head=8, use_cache=False, resid_pdrop=0.0,
                embd_pdrop=0.0, attn_pdrop=0.0,
            )
        ),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=1024, d_model=128, d_kv=16, d_ff=352, num_layers=4, num_heads=8, dropout_rate=0.0,
                use_cache=False, decoder_start_token_id=0,
            )
        ),
        "mixtral": lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(
                vocab_size=1024, intermediate_size=352, num_key_value_heads=8, num_local_experts=4, **llama
            )
        ),
    }  # fmt: skip
    return made[name](), bench_batch()
