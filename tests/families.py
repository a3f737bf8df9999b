"""Small models of the families that every equality test goes over; odd sizes among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from expert_modules import ExpertModules
from torch import nn

BATCH, SEQ = 8, 12


@dataclass(frozen=True)
class Family:
    """A model with random weights and one batch for it; both the same in every process."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]

    def make(self, seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        torch.manual_seed(seed)
        model = self.build().train()
        torch.manual_seed(seed + 1)
        return model, self.inputs()


def _tokens(
    vocab: int, mask: bool = False, batch: int = BATCH, seq: int = SEQ
) -> Callable[[], dict[str, torch.Tensor]]:
    def make() -> dict[str, torch.Tensor]:
        ids = torch.randint(3, vocab, (batch, seq))
        labels = torch.randint(3, vocab, (batch, seq))
        labels[0, :5] = -100
        found = {"input_ids": ids, "labels": labels}
        if mask:
            attention = torch.ones(batch, seq, dtype=torch.int64)
            attention[1, 9:] = 0
            attention[-3, 4:] = 0
            found["attention_mask"] = attention
        return found

    return make


def _summaries(vocab: int, batch: int, seq: int, target: int) -> Callable[[], dict[str, torch.Tensor]]:
    """Long padded texts, and short ones made of them."""

    def make() -> dict[str, torch.Tensor]:
        found = _tokens(vocab, batch=batch, seq=seq)()
        mask = torch.ones(batch, seq, dtype=torch.int64)
        mask[1, seq // 5 :] = 0
        return {**found, "attention_mask": mask, "labels": torch.randint(3, vocab, (batch, target))}

    return make


def _packed(
    vocab: int, batch: int = BATCH, seq: int = SEQ, longest: int = 200
) -> Callable[[], dict[str, torch.Tensor]]:
    """Documents one after another, told apart by positions that begin anew."""

    def make() -> dict[str, torch.Tensor]:
        found = _tokens(vocab, batch=batch, seq=seq)()
        begins = torch.rand(batch, seq) < 3 / longest
        begins[:, 0] = True
        begins[0, 1:3] = True  # documents of one token
        places = torch.arange(seq).expand(batch, seq)
        found["position_ids"] = places - torch.where(begins, places, 0).cummax(-1).values
        return found

    return make


def _uncached(build: Callable[[], nn.Module]) -> nn.Module:
    """transformers looks for documents only where no cache is kept."""
    model = build()
    model.config.use_cache = False
    return model


def _images(classes: int, size: int) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {
        "pixel_values": torch.randn(BATCH, 3, size, size),
        "labels": torch.randint(0, classes, (BATCH,)),
    }


def _gpt2(
    dropout: float = 0.0,
    heads: int = 4,
    width: int = 32,
    vocab: int = 97,
    layers: int = 2,
    positions: int = 32,
) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers,
            n_head=heads,
            n_embd=width,
            vocab_size=vocab,
            n_positions=positions,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )


def _llama(
    heads: int = 4, kv: int = 2, width: int = 32, vocab: int = 96, tie: bool = False, layers: int = 2
) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            hidden_size=width,
            intermediate_size=88,
            vocab_size=vocab,
            max_position_embeddings=32,
            tie_word_embeddings=tie,
        )
    )


def _mixtral(layers: int = 2) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            hidden_size=32,
            intermediate_size=48,
            vocab_size=96,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=32,
        )
    )


def _mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 48}
    return MistralForCausalLM(
        MistralConfig(num_hidden_layers=3, vocab_size=96, head_dim=8, sliding_window=100, **sizes)
    )


def _gemma3() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 32, "intermediate_size": 48}
    kinds = ["sliding_attention", "full_attention"] * 2
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            num_hidden_layers=4, vocab_size=96, head_dim=8, sliding_window=100, layer_types=kinds, **sizes
        )
    )


def _gemma2() -> nn.Module:
    """Its attention has a soft cap, and a window in every second layer."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 48}
    caps = {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1}
    return Gemma2ForCausalLM(
        Gemma2Config(num_hidden_layers=4, vocab_size=96, head_dim=8, sliding_window=100, **sizes, **caps)
    )


def _modernbert() -> nn.Module:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    ids = {f"{n}_token_id": k for k, n in enumerate(("pad", "bos", "eos", "cls", "sep"))}
    sizes = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    windows = {"local_attention": 100, "global_attn_every_n_layers": 2}
    return ModernBertForMaskedLM(ModernBertConfig(vocab_size=96, **sizes, **windows, **ids))


def _mamba2() -> nn.Module:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"state_size": 16, "num_heads": 8, "head_dim": 16, "chunk_size": 32, "hidden_size": 64}
    return Mamba2ForCausalLM(Mamba2Config(num_hidden_layers=2, vocab_size=96, n_groups=2, **sizes))


def _bert(positions: int = 32) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            num_hidden_layers=2,
            num_attention_heads=4,
            hidden_size=32,
            intermediate_size=72,
            vocab_size=101,
            max_position_embeddings=positions,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _t5(layers: int = 2) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            num_layers=layers,
            num_decoder_layers=layers,
            num_heads=4,
            d_model=32,
            d_kv=8,
            d_ff=56,
            vocab_size=98,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def _bart(positions: int, heads: int) -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=97,
            d_model=16 * heads,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=positions,
            dropout=0.0,
        )
    )


def _vit(layers: int = 2) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            num_hidden_layers=layers,
            num_attention_heads=4,
            hidden_size=32,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
            num_labels=10,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


FAMILIES: tuple[Family, ...] = (
    Family("gpt2", _gpt2, _tokens(97)),
    Family("llama", _llama, _tokens(96)),
    Family("mixtral", _mixtral, _tokens(96)),
    Family("bert", _bert, _tokens(101, mask=True)),
    Family("t5", _t5, _tokens(98)),
    Family("vit", _vit, _images(10, 16)),
    # three and five heads do not divide by 2 or 4; neither do these vocabularies
    Family("gpt2-odd", lambda: _gpt2(heads=3, width=24, vocab=103), _tokens(103)),
    Family("llama-odd", lambda: _llama(heads=5, kv=5, width=40, vocab=103, tie=True), _tokens(103)),
)

#: deep enough for pipelines
DEEP: tuple[Family, ...] = (
    Family("gpt2-deep", lambda: _gpt2(layers=6), _tokens(97)),
    Family("llama-deep", lambda: _llama(layers=5), _tokens(96)),
    Family("t5-deep", lambda: _t5(layers=3), _tokens(98)),
    Family("expert-modules", lambda: ExpertModules(layers=4), _tokens(96)),
    Family("mixtral-deep", lambda: _mixtral(layers=4), _tokens(96)),
    Family("vit-deep", lambda: _vit(layers=4), _images(10, 16)),
    Family("gpt2-dropout", lambda: _gpt2(layers=4, dropout=0.1), _tokens(97)),
)

#: whose sequence is worth dividing, with fewer key-value heads than ranks
LONG: tuple[Family, ...] = (
    Family("llama-long", _llama, _tokens(96, batch=2, seq=512)),
    Family("llama-long-padded", _llama, _tokens(96, mask=True, batch=3, seq=512)),
    Family("mistral-window", _mistral, _tokens(96, batch=2, seq=512)),
    Family("mistral-window-padded", _mistral, _tokens(96, mask=True, batch=4, seq=512)),
    Family("gemma3-windows", _gemma3, _tokens(96, batch=2, seq=512)),
    Family("gemma3-windows-padded", _gemma3, _tokens(96, mask=True, batch=4, seq=512)),
    Family("llama-packed", lambda: _uncached(_llama), _packed(96, batch=4, seq=512)),
    Family("mistral-window-packed", lambda: _uncached(_mistral), _packed(96, batch=4, seq=512, longest=400)),
    Family("gemma3-windows-packed", lambda: _uncached(_gemma3), _packed(96, batch=4, seq=512, longest=400)),
    Family("gemma2-packed", lambda: _uncached(_gemma2), _packed(96, batch=4, seq=512, longest=400)),
    Family("modernbert-padded", _modernbert, _tokens(96, mask=True, batch=4, seq=512)),
    Family("mamba2-long", lambda: _uncached(_mamba2), _tokens(96, batch=2, seq=256)),
    Family("mixtral-long", _mixtral, _tokens(96, batch=2, seq=512)),
    Family("bert-long", lambda: _bert(512), _tokens(101, batch=2, seq=512)),
    # fewer heads than ranks, so that few queries have their many keys divided
    Family("bart-long", lambda: _bart(1024, heads=3), _summaries(97, batch=2, seq=1024, target=8)),
    Family("gpt2-long", lambda: _gpt2(positions=512), _tokens(97, batch=2, seq=512)),
    Family("gpt2-wide", lambda: _gpt2(width=256, positions=1024), _tokens(97, batch=2, seq=1024)),
)

MESHES = ("dp=4", "tp=4", "dp=2,tp=2", "fsdp=4")


def family(name: str) -> Family:
    return next(f for f in (*FAMILIES, *DEEP, *LONG) if f.name == name)


def dropout_gpt2() -> tuple[nn.Module, dict[str, Any]]:
    """GPT-2 with its dropouts on."""
    torch.manual_seed(0)
    model = _gpt2(dropout=0.2).train()
    return model, _tokens(97)()


#: what configs call how many layers there are
_DEPTHS = (
    "num_hidden_layers",
    "num_layers",
    "num_decoder_layers",
    "n_layer",
    "encoder_layers",
    "decoder_layers",
)


def deep(name: str, layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """A family with so many layers, and its inputs."""
    model, inputs = family(name).make()
    config = model.config
    for key in _DEPTHS:
        if hasattr(config, key):
            setattr(config, key, layers)
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = [kinds[k % len(kinds)] for k in range(layers)]
    torch.manual_seed(0)
    return type(model)(config).train(), inputs
