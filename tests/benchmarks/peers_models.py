"""Tiny models with random weights, the same on all ranks, and their data."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import nn

#: of a global batch
ROWS, LENGTH = 8, 16
VOCAB = 64
_TEXT = {
    "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0
}  # fmt: skip
_LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_IMAGES = {"image_size": 16, "patch_size": 4, "num_labels": 5}
_NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
#: kind -> class of transformers, without "Config" or its head; its head; sizes
_KINDS: Mapping[str, tuple[str, str, dict[str, Any]]] = MappingProxyType(
    {
        "Llama": ("Llama", "ForCausalLM", _TEXT | _LAYERS),
        "GPT2": ("GPT2", "LMHeadModel", _TEXT | _GPT2 | _NO_DROPOUT),
        "GPT2 with dropout": ("GPT2", "LMHeadModel", _TEXT | _GPT2),
        "T5": ("T5", "ForConditionalGeneration", _TEXT | {
            "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "dropout_rate": 0.0
        }),
        "Mixtral": ("Mixtral", "ForCausalLM", _TEXT | _LAYERS | {
            "num_key_value_heads": 2, "num_local_experts": 4
        }),
        "ViT": ("ViT", "ForImageClassification", _LAYERS | _IMAGES),
        "Mamba2": ("Mamba2", "ForCausalLM", _TEXT | {
            "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16, "num_heads": 4, "n_groups": 1,
            "state_size": 8, "chunk_size": 8,
        }),
    }
)  # fmt: skip


def build(kind: str) -> Any:
    torch.manual_seed(0)
    name, head, sizes = _KINDS[kind]
    return getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**sizes))


def layers_of(model: Any) -> list[nn.Module]:
    """Those that transformers names as to be kept in one piece, but for embeddings."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = [name for name in base._no_split_modules if "Embedding" not in name]
    return [m for m in model.modules() if type(m).__name__ in names]


def dataset(kind: str, count: int = 40) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    if kind == "ViT":
        pixels = torch.randn(count, 3, 16, 16, generator=generator)
        return [{"pixel_values": x, "labels": torch.tensor(k % 5)} for k, x in enumerate(pixels)]
    ids = torch.randint(3, VOCAB, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def of_varying_lengths(count: int = 40) -> list[dict[str, torch.Tensor]]:
    """From 5 to 16 tokens."""
    rows = dataset("Llama", count)
    return [{k: x[: 5 + (7 * n) % 12] for k, x in row.items()} for n, row in enumerate(rows)]


def stacked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {k: torch.stack([row[k] for row in rows]) for k in rows[0]}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """To the longest row, with a mask; padding has no label."""
    pad = nn.utils.rnn.pad_sequence
    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": pad(ids, True, 0),
        "attention_mask": pad([torch.ones_like(x) for x in ids], True, 0),
        "labels": pad([row["labels"] for row in rows], True, -100),
    }
