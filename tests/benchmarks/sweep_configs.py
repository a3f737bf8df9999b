"""Published configurations: entries of a `config.json` where the defaults of its class are others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

Entries = Mapping[str, Any]


def _dense(layers: int, hidden: int, ffn: int, heads: int, kv: int, vocab: int, **more: Any) -> Entries:
    """As Llama and those after it name their sizes."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        **more,
    }


def _bert(layers: int, hidden: int, heads: int, vocab: int, **more: Any) -> Entries:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        **more,
    }


def _gpt2(layers: int, hidden: int, heads: int, **more: Any) -> Entries:
    return {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 1024, **more}


def _opt(layers: int, hidden: int, heads: int, **more: Any) -> Entries:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "ffn_dim": 4 * hidden,
        "num_attention_heads": heads,
        "word_embed_proj_dim": hidden,
        "max_position_embeddings": 2048,
        **more,
    }


def _t5(layers: int, hidden: int, ffn: int, heads: int, **more: Any) -> Entries:
    return {"num_layers": layers, "d_model": hidden, "d_ff": ffn, "num_heads": heads, "d_kv": 64, **more}


def _encoder_decoder(layers: int, hidden: int, heads: int, **more: Any) -> Entries:
    """As BART and Whisper name their sizes."""
    return {
        "d_model": hidden,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": 4 * hidden,
        "decoder_ffn_dim": 4 * hidden,
        **more,
    }


def _latent(rank: int | None, **more: Any) -> Entries:
    """Latent attention as of DeepSeek-V2. rank: of queries, None for whole ones."""
    return {
        "q_lora_rank": rank,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        **more,
    }


#: (model type, architecture) -> name -> entries
FAMILIES: Mapping[tuple[str, str], Mapping[str, Entries]] = MappingProxyType(
    {
        ("llama", "LlamaForCausalLM"): {
            "Llama-2 7B": _dense(32, 4096, 11008, 32, 32, 32000, max_position_embeddings=4096),
            "Llama-2 13B": _dense(40, 5120, 13824, 40, 40, 32000, max_position_embeddings=4096),
            "Llama-2 70B": _dense(80, 8192, 28672, 64, 8, 32000, max_position_embeddings=4096),
            "Llama-3.1 8B": _dense(32, 4096, 14336, 32, 8, 128256, max_position_embeddings=131072),
            "Llama-3.1 70B": _dense(80, 8192, 28672, 64, 8, 128256, max_position_embeddings=131072),
            "Llama-3.1 405B": _dense(126, 16384, 53248, 128, 8, 128256, max_position_embeddings=131072),
            "Llama-3.2 1B": _dense(
                16, 2048, 8192, 32, 8, 128256, head_dim=64, tie_word_embeddings=True,
                max_position_embeddings=131072,
            ),
        },
        ("qwen2", "Qwen2ForCausalLM"): {
            "Qwen2.5 0.5B": _dense(24, 896, 4864, 14, 2, 151936, tie_word_embeddings=True),
            "Qwen2.5 7B": _dense(28, 3584, 18944, 28, 4, 152064),
            "Qwen2.5 72B": _dense(80, 8192, 29568, 64, 8, 152064),
        },
        ("qwen3", "Qwen3ForCausalLM"): {
            "Qwen3 0.6B": _dense(28, 1024, 3072, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
            "Qwen3 8B": _dense(36, 4096, 12288, 32, 8, 151936, head_dim=128),
            "Qwen3 32B": _dense(64, 5120, 25600, 64, 8, 151936, head_dim=128),
        },
        ("qwen2_moe", "Qwen2MoeForCausalLM"): {
            "Qwen1.5-MoE A2.7B": _dense(
                24, 2048, 5632, 16, 16, 151936, num_experts=60, num_experts_per_tok=4,
                moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
            ),
        },
        ("qwen3_moe", "Qwen3MoeForCausalLM"): {
            "Qwen3 30B-A3B": _dense(
                48, 2048, 6144, 32, 4, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
                moe_intermediate_size=768,
            ),
            "Qwen3 235B-A22B": _dense(
                94, 4096, 12288, 64, 4, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
                moe_intermediate_size=1536,
            ),
        },
        ("mistral", "MistralForCausalLM"): {
            "Mistral 7B": _dense(32, 4096, 14336, 32, 8, 32000, sliding_window=4096),
            "Mistral Large 123B": _dense(88, 12288, 28672, 96, 8, 32768, head_dim=128, sliding_window=None),
        },
        ("mixtral", "MixtralForCausalLM"): {
            "Mixtral 8x7B": _dense(32, 4096, 14336, 32, 8, 32000, num_local_experts=8),
            "Mixtral 8x22B": _dense(56, 6144, 16384, 48, 8, 32768, num_local_experts=8),
        },
        ("deepseek_v2", "DeepseekV2ForCausalLM"): {
            "DeepSeek-V2-Lite": _dense(
                27, 2048, 10944, 16, 16, 102400, moe_intermediate_size=1408, n_routed_experts=64,
                n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, **_latent(None),
            ),
            "DeepSeek-V2": _dense(
                60, 5120, 12288, 128, 128, 102400, moe_intermediate_size=1536, n_routed_experts=160,
                n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, n_group=8, topk_group=3,
                topk_method="group_limited_greedy", **_latent(1536),
            ),
        },
        ("deepseek_v3", "DeepseekV3ForCausalLM"): {
            "DeepSeek-V3": _dense(
                61, 7168, 18432, 128, 128, 129280, moe_intermediate_size=2048, n_routed_experts=256,
                num_experts_per_tok=8, first_k_dense_replace=3, n_group=8, topk_group=4, **_latent(1536),
            ),
            "Kimi-K2": _dense(
                61, 7168, 18432, 64, 64, 163840, moe_intermediate_size=2048, n_routed_experts=384,
                num_experts_per_tok=8, first_k_dense_replace=1, n_group=1, topk_group=1, **_latent(1536),
            ),
        },
        ("gemma2", "Gemma2ForCausalLM"): {
            "Gemma-2 2B": _dense(26, 2304, 9216, 8, 4, 256000, head_dim=256),
            "Gemma-2 27B": _dense(46, 4608, 36864, 32, 16, 256000, head_dim=128),
        },
        ("gemma3_text", "Gemma3ForCausalLM"): {
            "Gemma-3 1B": _dense(26, 1152, 6912, 4, 1, 262144, head_dim=256, sliding_window=512),
            "Gemma-3 27B": _dense(62, 5376, 21504, 32, 16, 262208, head_dim=128, sliding_window=1024),
        },
        ("gpt2", "GPT2LMHeadModel"): {
            "GPT-2 small": _gpt2(12, 768, 12),
            "GPT-2 XL": _gpt2(48, 1600, 25),
            "GPT-3 6.7B": _gpt2(32, 4096, 32, n_positions=2048),
            "GPT-3 175B": _gpt2(96, 12288, 96, n_positions=2048, vocab_size=51200),
        },
        ("opt", "OPTForCausalLM"): {
            "OPT 350M": _opt(24, 1024, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
            "OPT 13B": _opt(40, 5120, 40),
            "OPT 175B": _opt(96, 12288, 96),
        },
        ("bloom", "BloomForCausalLM"): {
            "BLOOM 7.1B": {"n_layer": 30, "hidden_size": 4096, "n_head": 32, "vocab_size": 250880},
            "BLOOM 176B": {"n_layer": 70, "hidden_size": 14336, "n_head": 112, "vocab_size": 250880},
        },
        ("falcon", "FalconForCausalLM"): {
            "Falcon 7B": {
                "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71, "vocab_size": 65024,
                "multi_query": True, "parallel_attn": True, "bias": False,
            },
            "Falcon 40B": {
                "num_hidden_layers": 60, "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8,
                "vocab_size": 65024, "new_decoder_architecture": True, "bias": False,
            },
        },
        ("gpt_neox", "GPTNeoXForCausalLM"): {
            "GPT-NeoX 20B": _bert(44, 6144, 64, 50432, max_position_embeddings=2048),
            "Pythia 1.4B": _bert(24, 2048, 16, 50304, max_position_embeddings=2048),
        },
        ("phi3", "Phi3ForCausalLM"): {
            "Phi-3 mini": _dense(32, 3072, 8192, 32, 32, 32064, max_position_embeddings=4096),
            "Phi-3 medium": _dense(40, 5120, 17920, 40, 10, 32064, max_position_embeddings=4096),
        },
        ("bert", "BertForMaskedLM"): {
            "BERT base": _bert(12, 768, 12, 30522, max_position_embeddings=512),
            "BERT large": _bert(24, 1024, 16, 30522, max_position_embeddings=512),
        },
        ("roberta", "RobertaForMaskedLM"): {
            "RoBERTa large": _bert(24, 1024, 16, 50265, max_position_embeddings=514),
        },
        ("t5", "T5ForConditionalGeneration"): {
            "T5 base": _t5(12, 768, 3072, 12, vocab_size=32128, decoder_start_token_id=0),
            "FLAN-T5 XXL": _t5(
                24, 4096, 10240, 64, vocab_size=32128, decoder_start_token_id=0, tie_word_embeddings=False,
                feed_forward_proj="gated-gelu",
            ),
        },
        ("bart", "BartForConditionalGeneration"): {
            "BART large": _encoder_decoder(12, 1024, 16, vocab_size=50265, max_position_embeddings=1024),
        },
        ("vit", "ViTForImageClassification"): {
            "ViT B/16": _bert(12, 768, 12, 0),
            "ViT H/14": _bert(32, 1280, 16, 0, patch_size=14),
        },
        ("clip", "CLIPModel"): {
            "CLIP ViT-L/14": {
                "projection_dim": 768,
                "text_config": _bert(12, 768, 12, 49408, projection_dim=768),
                "vision_config": _bert(24, 1024, 16, 0, patch_size=14, projection_dim=768),
            },
        },
        ("whisper", "WhisperForConditionalGeneration"): {
            "Whisper small": _encoder_decoder(12, 768, 12),
            "Whisper large-v3": _encoder_decoder(32, 1280, 20, vocab_size=51866, num_mel_bins=128),
        },
        ("mamba", "MambaForCausalLM"): {
            "Mamba 130M": {"num_hidden_layers": 24, "hidden_size": 768, "vocab_size": 50280},
            "Mamba 2.8B": {"num_hidden_layers": 64, "hidden_size": 2560, "vocab_size": 50280},
        },
        ("gpt_oss", "GptOssForCausalLM"): {
            "gpt-oss 20B": _dense(24, 2880, 2880, 64, 8, 201088, head_dim=64, num_local_experts=32),
            "gpt-oss 120B": _dense(36, 2880, 2880, 64, 8, 201088, head_dim=64, num_local_experts=128),
        },
        ("olmoe", "OlmoeForCausalLM"): {
            "OLMoE 1B-7B": _dense(16, 2048, 1024, 16, 16, 50304, num_experts=64, num_experts_per_tok=8),
        },
        ("olmo2", "Olmo2ForCausalLM"): {
            "OLMo-2 32B": _dense(64, 5120, 27648, 40, 8, 100352, max_position_embeddings=4096),
        },
        ("glm4", "Glm4ForCausalLM"): {
            "GLM-4 32B": _dense(61, 6144, 23040, 48, 2, 151552, head_dim=128),
        },
        ("glm4_moe", "Glm4MoeForCausalLM"): {
            "GLM-4.5 Air": _dense(
                46, 4096, 10944, 96, 8, 151552, head_dim=128, moe_intermediate_size=1408,
                n_routed_experts=128, num_experts_per_tok=8, first_k_dense_replace=1,
            ),
        },
        ("starcoder2", "Starcoder2ForCausalLM"): {
            "StarCoder2 15B": _dense(40, 6144, 24576, 48, 4, 49152, sliding_window=4096),
        },
        ("cohere", "CohereForCausalLM"): {
            "Command R 35B": _dense(40, 8192, 22528, 64, 64, 256000),
        },
    }
)  # fmt: skip


def published() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, `config.json`) of all, in bfloat16."""
    for (kind, architecture), named in FAMILIES.items():
        for name, entries in named.items():
            yield name, {"model_type": kind, "architectures": [architecture], "dtype": "bfloat16", **entries}
