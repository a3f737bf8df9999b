"""Models that both sides of a benchmark run."""

from __future__ import annotations

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
