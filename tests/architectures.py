"""Many architectures, each tiny and with one batch: how far the compiler reaches.

``python tests/architectures.py`` plans each one, runs all ranks in lockstep beside the eager model and
prints a table of the largest errors, or of those named on the command line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import plain_nets
import torch
from architecture_inputs import (
    BATCH,
    IMAGE,
    LABELS,
    VOCAB,
    Inputs,
    boxed,
    captioned,
    choices,
    classified_text,
    clicked,
    described,
    forecasts,
    framed,
    graph,
    hidden_patches,
    history,
    image_captions,
    images,
    labelled,
    masked_images,
    next_sentences,
    noisy,
    padded,
    pairs,
    per_pixel,
    pixels,
    pretraining,
    segmented,
    sized,
    spans,
    spectrograms,
    speech_features,
    spoken,
    tagged,
    tokens,
    transcribed,
    twins,
    videos,
    waves,
    written,
)
from architecture_runner import errors_of, print_table, program_of
from more_architectures import DOUBLE, kinds
from torch import nn

__all__ = ["ARCHITECTURES", "RARELY", "Architecture", "errors_of", "program_of"]


@dataclass(frozen=True)
class Architecture:
    """A model class with a small configuration, and how to make one batch for it.

    double: run it in fp64, since its batch norms over few pixels make large errors of small ones.
    of_kind: its configuration follows from its kind, and its inputs are made for the model.
    rarely: too slow, or too much like others, for every run of the tests; this file run alone runs all.
    """

    family: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Inputs | Callable[[nn.Module], dict[str, Any]]
    double: bool = False
    of_kind: bool = False

    @property
    def rarely(self) -> bool:
        return self.name in RARELY or self.of_kind

    def make(self, seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(seed)
        model = self.build().train()
        torch.manual_seed(seed + 1)
        inputs = self.inputs(model) if self.of_kind else self.inputs()  # type: ignore[call-arg]
        if not self.double:
            return model, inputs
        floats = {k: v.double() for k, v in inputs.items() if torch.is_tensor(v) and v.is_floating_point()}
        return model.double(), {**inputs, **floats}


# -- models --------------------------------------------------------------------------------------------

TEXT: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)
GROUPED: Mapping[str, Any] = MappingProxyType({**TEXT, "num_key_value_heads": 2})
SEQ2SEQ: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    }
)
XLM: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB,
        "emb_dim": 16,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 32,
        "n_langs": 1,
    }
)
PATCHES: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "image_size": 16,
        "patch_size": 4,
        "num_labels": LABELS,
    }
)
STAGES: Mapping[str, Any] = MappingProxyType(
    {"num_labels": LABELS, "hidden_sizes": [16, 32], "depths": [1, 1]}
)
PYRAMID: Mapping[str, Any] = MappingProxyType(
    {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "hidden_sizes": [8, 16],
        "patch_sizes": [3, 3],
        "strides": [2, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "num_labels": LABELS,
    }
)
WAVES: Mapping[str, Any] = MappingProxyType(
    {
        **TEXT,
        "vocab_size": 12,
        "conv_dim": [8, 8],
        "conv_stride": [4, 2],
        "conv_kernel": [4, 2],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "mask_time_prob": 0.0,
        "mask_feature_prob": 0.0,
        "num_labels": LABELS,
        "classifier_proj_size": 16,
    }
)


def hugging_face(family: str, name: str, inputs: Inputs, **options: Any) -> Architecture:
    """A class of transformers on a configuration of its own kind, without dropout of any sort."""

    def build() -> nn.Module:
        import transformers

        cls = getattr(transformers, name)
        config = cls.config_class(**options)
        _without_dropout(config)
        model: nn.Module = cls(config)
        return model

    return Architecture(family, name, build, inputs)


def _without_dropout(config: Any) -> None:
    for key, value in vars(config).items():
        if hasattr(value, "to_dict"):
            _without_dropout(value)
        elif "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)


TEXT_VISION: Mapping[str, Any] = MappingProxyType(
    {
        "text_config": {**TEXT, "projection_dim": 16},
        "vision_config": {**PATCHES, "projection_dim": 16},
        "projection_dim": 16,
    }
)


def _causal() -> list[Architecture]:
    family = "causal text"
    made = [
        hugging_face(family, f"{name}ForCausalLM", tokens, **GROUPED)
        for name in (
            *("Llama", "Mistral", "Qwen2", "Phi", "Phi3", "StableLm", "Cohere", "Olmo", "Olmo2"),
            *("Granite", "Starcoder2", "SmolLM3", "Nemotron", "Arcee", "Cohere2", "Apertus", "BitNet"),
            *("DiffLlama", "NanoChat", "Ernie4_5", "ModernBertDecoder", "Olmo3", "Cwm"),
        )
    ]
    made += [
        hugging_face(family, f"{name}ForCausalLM", tokens, **GROUPED, head_dim=4)
        for name in ["Qwen3", "Gemma", "Gemma2", "Gemma3", "Glm", "Glm4", "Exaone4", "Helium", "SeedOss"]
    ]
    for name, options in {
        "GPT2LMHeadModel": {},
        "GPTNeoXForCausalLM": {},
        "BloomForCausalLM": {},
        "FalconForCausalLM": {},
        "MptForCausalLM": {"max_seq_len": 32},
        "BioGptForCausalLM": {},
        "PersimmonForCausalLM": {},
        "CTRLLMHeadModel": {"dff": 24, "n_positions": 32},
        "GPTJForCausalLM": {"rotary_dim": 4, "n_positions": 32},
        "CodeGenForCausalLM": {"rotary_dim": 4, "n_positions": 32},
        "OPTForCausalLM": {"ffn_dim": 24, "word_embed_proj_dim": 16},
        "GPTBigCodeForCausalLM": {},
        "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
        "OpenAIGPTLMHeadModel": {"n_positions": 32},
        "XGLMForCausalLM": {"d_model": 16, "ffn_dim": 24, "attention_heads": 4, "num_layers": 2},
        "RoFormerForCausalLM": {"is_decoder": True},
    }.items():
        made.append(hugging_face(family, name, tokens, **{**TEXT, **options}))
    xlnet = {"vocab_size": VOCAB, "d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 24}
    return [*made, hugging_face(family, "XLNetLMHeadModel", tokens, **xlnet)]


def _experts() -> list[Architecture]:
    few = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    routed = {"n_routed_experts": 4, "moe_shared_expert_intermediate_size": 24, "head_dim": 4}
    latent = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "num_key_value_heads": 4,
    }
    state_space = {"mamba_d_state": 4, "mamba_dt_rank": 2, "use_mamba_kernels": False}
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
    }
    table: dict[str, dict[str, Any]] = {
        "Mixtral": {"num_local_experts": 4},
        "Qwen2Moe": {**few, "shared_expert_intermediate_size": 24},
        "Qwen3Moe": {**few, "head_dim": 4},
        "Olmoe": few,
        "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4},
        "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "DeepseekV2": latent,
        "DeepseekV3": {**latent, "n_group": 2},
        "NemotronH": {**few, **routed, "layers_block_type": ["moe", "attention"]},
        "GraniteMoeShared": {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
        },
        "Glm4Moe": {**few, **routed, "first_k_dense_replace": 1},
        "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
        "HunYuanMoEV1": {"num_experts": 4, "moe_topk": 2, "head_dim": 4},
        "MiniMaxM2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4},
        "FlexOlmo": few,
        "Afmoe": {**few, "num_dense_layers": 1, "head_dim": 4},
        "AriaText": {**few, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        "Lfm2Moe": {**few, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        "DeepseekV32": {**latent, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4},
        "Jamba": {"num_experts": 4, "attn_layer_offset": 1, "attn_layer_period": 2, **state_space},
        "Qwen3Next": {
            **few,
            **linear,
            "head_dim": 4,
            "shared_expert_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention"],
        },
    }
    return [
        hugging_face("mixture of experts", f"{name}ForCausalLM", tokens, **{**GROUPED, **options})
        for name, options in table.items()
    ]


def _recurrent() -> list[Architecture]:
    family = "state space, recurrent"
    heads = {"head_dim": 8, "num_heads": 4, "n_groups": 1, "expand": 2}
    mamba = {"mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_chunk_size": 4}
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "layer_types": ["linear_attention", "full_attention"],
    }
    return [
        hugging_face(family, "MambaForCausalLM", tokens, **TEXT, state_size=4),
        hugging_face(family, "FalconMambaForCausalLM", tokens, **TEXT, state_size=4),
        hugging_face(family, "Lfm2ForCausalLM", tokens, **GROUPED, full_attn_idxs=[1]),
        hugging_face(family, "Mamba2ForCausalLM", tokens, **TEXT, **heads, state_size=4, chunk_size=4),
        hugging_face(family, "BambaForCausalLM", tokens, **GROUPED, **mamba, attn_layer_indices=[1]),
        hugging_face(family, "FalconH1ForCausalLM", tokens, **GROUPED, **mamba, mamba_d_ssm=32),
        hugging_face(family, "OlmoHybridForCausalLM", tokens, **GROUPED, **linear),
    ]


def _masked() -> list[Architecture]:
    family = "masked text"
    names = ["Bert", "Roberta", "ModernBert", "LayoutLM", "Ernie", "Esm", "Deberta", "MPNet"]
    names += [
        "Nystromformer",
        "MegatronBert",
        "RoFormer",
        "BigBird",
        "EuroBert",
        "NomicBert",
        "RemBert",
        "Mra",
    ]
    special = {"cls_token_id": 1, "sep_token_id": 2, "mask_token_id": 3}
    made = [hugging_face(family, f"{name}ForMaskedLM", padded, **TEXT, **special) for name in names]
    mobile = {"intra_bottleneck_size": 8, "embedding_size": 16, "num_feedforward_networks": 2}
    canine = {**TEXT, "num_labels": LABELS, "local_transformer_stride": 4, "num_hash_buckets": 32}
    canine |= {"downsampling_rate": 2, "upsampling_kernel_size": 2}
    lilt = {**TEXT, "num_labels": LABELS, "hidden_size": 24, "num_attention_heads": 2}
    lilt["channel_shrink_ratio"] = 2
    layout = {**TEXT, "num_labels": LABELS, "coordinate_size": 2, "shape_size": 4, "visual_embed": False}
    narrow = {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4}
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8}
    return [
        *made,
        hugging_face(family, "DistilBertForMaskedLM", padded, **{**TEXT, **narrow}),
        hugging_face(family, "AlbertForMaskedLM", padded, **TEXT, embedding_size=16),
        hugging_face(family, "ElectraForMaskedLM", padded, **TEXT, embedding_size=16),
        hugging_face(family, "DebertaV2ForMaskedLM", padded, **TEXT, **relative),
        hugging_face(family, "FNetForMaskedLM", tokens, **TEXT),
        hugging_face(
            family, "ConvBertForMaskedLM", padded, **TEXT, embedding_size=16, head_ratio=2, conv_kernel_size=3
        ),
        hugging_face(family, "SqueezeBertForMaskedLM", padded, **TEXT, embedding_size=16),
        hugging_face(family, "XLMWithLMHeadModel", tokens, **XLM),
        hugging_face(family, "FlaubertWithLMHeadModel", tokens, **XLM),
        hugging_face(family, "MobileBertForMaskedLM", padded, **TEXT, **mobile),
        hugging_face(family, "BertForSequenceClassification", classified_text, **TEXT, num_labels=LABELS),
        hugging_face(family, "CanineForSequenceClassification", classified_text, **canine),
        hugging_face(family, "BertForPreTraining", pretraining, **TEXT),
        hugging_face(family, "BertForNextSentencePrediction", next_sentences, **TEXT),
        hugging_face(family, "RobertaForQuestionAnswering", spans, **TEXT),
        hugging_face(
            family, "DebertaV2ForTokenClassification", tagged, **TEXT, **relative, num_labels=LABELS
        ),
        hugging_face(family, "RobertaForMultipleChoice", choices, **TEXT),
        hugging_face(family, "LiltForTokenClassification", boxed, **lilt),
        hugging_face(family, "LayoutLMv3ForTokenClassification", boxed, **layout),
    ]


def _seq2seq() -> list[Architecture]:
    family = "sequence to sequence"
    t5 = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2}
    names = ["BartForConditionalGeneration", "MarianMTModel", "M2M100ForConditionalGeneration"]
    names += [
        f"{n}ForConditionalGeneration" for n in ("MBart", "Pegasus", "BlenderbotSmall", "Mvp", "PLBart")
    ]
    start = {"num_heads": 4, "decoder_start_token_id": 0}
    return [
        hugging_face(family, "T5ForConditionalGeneration", tokens, **t5, **start),
        hugging_face(family, "UMT5ForConditionalGeneration", tokens, **t5, **start),
        hugging_face(family, "LongT5ForConditionalGeneration", tokens, **t5, **start, local_radius=2),
        *(hugging_face(family, name, tokens, **SEQ2SEQ) for name in names),
        Architecture(family, "EncoderDecoderModel", _bert_to_bert, tokens),
    ]


def _bert_to_bert() -> nn.Module:
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel

    sizes = {**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**sizes), BertConfig(**sizes))
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model: nn.Module = EncoderDecoderModel(config)
    return model


def _vision() -> list[Architecture]:
    family, end = "vision", "ForImageClassification"
    windows = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "num_labels": LABELS}
    swin = {**windows, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
    focal = {"hidden_sizes": [8, 16], "depths": [1, 1], "focal_levels": [1, 1], "focal_windows": [3, 3]}
    hiera = {
        "image_size": [16, 16],
        "patch_size": [3, 3],
        "patch_stride": [2, 2],
        "patch_padding": [1, 1],
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "num_query_pool": 1,
        "masked_unit_size": [4, 4],
        "query_stride": [2, 2],
        "num_labels": LABELS,
    }
    decoder = {
        "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 24,
    }
    segformer = {**PYRAMID, "sr_ratios": [2, 1], "decoder_hidden_size": 16}
    small = {"image_size": 64, "depth_multiplier": 0.1, "num_labels": LABELS}
    small_net = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2, "out_indices": [1, 2]}
    upernet = {
        "backbone_config": {"model_type": "convnext", "patch_size": 2, **small_net},
        "hidden_size": 16,
        "pool_scales": [1, 2],
        "use_auxiliary_head": False,
        "num_labels": LABELS,
    }
    efficient = {
        "width_coefficient": 1.0,
        "depth_coefficient": 1.0,
        "depth_divisor": 4,
        "hidden_dim": 1280,
        "in_channels": [32, 16],
        "out_channels": [16, 24],
        "kernel_sizes": [3, 3],
        "strides": [1, 2],
        "num_block_repeats": [1, 1],
        "expand_ratios": [1, 2],
        "depthwise_padding": [],
    }
    levit = {
        "image_size": 64,
        "hidden_sizes": [16, 24],
        "num_attention_heads": [2, 3],
        "depths": [1, 1],
        "key_dim": [4, 4],
        "mlp_ratio": [2, 2],
        "attention_ratio": [2, 2],
        "down_ops": [["Subsample", 4, 4, 4, 2, 2], [""]],
        "num_labels": LABELS,
    }
    clips: dict[str, Any] = {"VideoMAE": {"tubelet_size": 2}, "Vivit": {"tubelet_size": [2, 4, 4]}}
    table: dict[str, dict[str, Any]] = {
        **{name: {**PATCHES} for name in ("ViT", "DeiT", "Beit", "Dinov2", "Dinov2WithRegisters", "IJepa")},
        "Swin": swin,
        "ConvNext": {**STAGES, "patch_size": 2, "num_stages": 2},
        "ConvNextV2": {**STAGES, "patch_size": 2, "num_stages": 2},
        "ResNet": {**STAGES, "embedding_size": 8, "layer_type": "basic"},
        "RegNet": {**STAGES, "embedding_size": 8, "groups_width": 8},
        "Bit": {**STAGES, "embedding_size": 16, "num_groups": 4},
        "Segformer": segformer,
        "PvtV2": {**PYRAMID, "image_size": 16, "sr_ratios": [2, 1]},
        "PoolFormer": {**PYRAMID, "padding": [1, 1]},
        "FocalNet": {**windows, **focal},
        "Hiera": hiera,
        "ViTMSN": dict(PATCHES),
        "Data2VecVision": dict(PATCHES),
        "Swinv2": swin,
        "MobileNetV1": {**small, "min_depth": 4},
        "MobileNetV2": {**small, "min_depth": 4, "depth_divisible_by": 4},
        "EfficientNet": {**small, **efficient},
        "MobileViTV2": {"image_size": 64, "num_labels": LABELS, "width_multiplier": 0.25},
        "Levit": levit,
        "SwiftFormer": {"image_size": 64, "depths": [1, 1], "embed_dims": [8, 16], "num_labels": LABELS},
        "ImageGPT": {"vocab_size": 33, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 4},
        "CLIP": {**TEXT_VISION, "num_labels": LABELS},
    }
    wide = ("MobileViTV2", "Levit", "SwiftFormer", "EfficientNet", "MobileNetV1", "MobileNetV2")
    return [
        *(
            replace(
                hugging_face(
                    family,
                    f"{name}{end}",
                    pixels if name == "ImageGPT" else images(64 if name in wide else 16),
                    **options,
                ),
                double=name in wide,
            )
            for name, options in table.items()
        ),
        *(
            hugging_face(family, f"{n}ForMaskedImageModeling", hidden_patches, **PATCHES, encoder_stride=4)
            for n in ("ViT", "DeiT")
        ),
        *(
            hugging_face(
                family, f"{n}ForVideoClassification", videos, **PATCHES, num_frames=4, **clips.get(n, {})
            )
            for n in ("VideoMAE", "Vivit", "Timesformer")
        ),
        hugging_face(family, "UperNetForSemanticSegmentation", segmented(32), **upernet),
        hugging_face(family, "SegformerForSemanticSegmentation", segmented(16), **segformer),
        hugging_face(family, "ViTMAEForPreTraining", masked_images, **PATCHES, **decoder),
    ]


def _speech() -> list[Architecture]:
    family = "speech"
    ends = {"max_target_positions": 32, "begin_suppress_tokens": None, "suppress_tokens": None}
    frames = {"num_mel_bins": 8, "max_source_positions": 8}
    patches = {**PATCHES, "frequency_stride": 4, "time_stride": 4, "max_length": 16, "num_mel_bins": 8}
    end = "ForSequenceClassification"
    xvector = {"tdnn_dim": [16, 16], "tdnn_kernel": [3, 1], "tdnn_dilation": [1, 1], "xvector_output_dim": 8}
    features = {"input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 32}
    return [
        hugging_face(
            family, "WhisperForConditionalGeneration", speech_features(), **{**SEQ2SEQ, **ends, **frames}
        ),
        *(hugging_face(family, f"{name}{end}", waves(), **WAVES) for name in ("Wav2Vec2", "Hubert", "WavLM")),
        hugging_face(family, "ASTForAudioClassification", spectrograms, **patches),
        *(
            hugging_face(family, f"{name}ForCTC", spoken(), **WAVES)
            for name in ("Wav2Vec2", "Hubert", "WavLM", "UniSpeech", "UniSpeechSat", "Data2VecAudio")
        ),
        hugging_face(family, "SEWForCTC", spoken(), **WAVES, squeeze_factor=1),
        hugging_face(
            family, "Wav2Vec2ConformerForCTC", spoken(), **{**WAVES, "conv_depthwise_kernel_size": 3}
        ),
        hugging_face(family, "Wav2Vec2ForXVector", waves(), **WAVES, **xvector),
        hugging_face(family, "Wav2Vec2ForAudioFrameClassification", framed, **WAVES),
        hugging_face(family, "Speech2TextForConditionalGeneration", transcribed, **SEQ2SEQ, **features),
    ]


def _several() -> list[Architecture]:
    series = {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4}
    small = {"d_model": 16, "num_attention_heads": 4, "ffn_dim": 24, "num_hidden_layers": 2}
    mixer = {**series, "prediction_length": 4, "d_model": 16, "num_layers": 2}
    siglip = {"text_config": {**TEXT, "projection_size": 16}, "vision_config": dict(PATCHES)}
    return [
        hugging_face("multimodal", "CLIPModel", pairs, **TEXT_VISION),
        hugging_face("multimodal", "ChineseCLIPModel", pairs, **TEXT_VISION),
        hugging_face("multimodal", "SiglipModel", pairs, **siglip),
        *_image_text(),
        hugging_face("time series", "PatchTSMixerForPrediction", forecasts, **mixer),
        hugging_face("time series", "TimeSeriesTransformerForPrediction", history, **WINDOW),
        hugging_face(
            "time series", "PatchTSTForPrediction", forecasts, **series, **small, prediction_length=4
        ),
    ]


WINDOW: Mapping[str, Any] = MappingProxyType(
    {
        "prediction_length": 4,
        "context_length": 8,
        "lags_sequence": [1, 2],
        "num_time_features": 1,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "loss": "nll",
    }
)


def _image_text() -> list[Architecture]:
    family, end = "multimodal", "ForConditionalGeneration"
    text = {**GROUPED, "model_type": "llama"}
    clip = {**PATCHES, "model_type": "clip_vision_model"}
    siglip = {**PATCHES, "model_type": "siglip_vision_model"}
    llava = {"text_config": text, "vision_config": clip, "image_token_id": IMAGE}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    qwen = {
        "text_config": {**GROUPED, "hidden_size": 32, "rope_parameters": rope},
        "vision_config": {
            **{"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
            **{"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2},
        },
        **{
            "image_token_id": IMAGE,
            "video_token_id": 91,
            "vision_start_token_id": 92,
            "vision_end_token_id": 93,
        },
    }
    windows = {
        **{"depth": 2, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 24},
        **{"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 8},
        "fullatt_block_indexes": [1],
    }
    gemma = {**GROUPED, "head_dim": 4}
    intern = {**PATCHES, "model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]}
    blip = {"text_config": {**TEXT, "encoder_hidden_size": 16}, "vision_config": dict(PATCHES)}
    table: dict[str, tuple[Inputs, dict[str, Any]]] = {
        "Llava": (described(16), llava),
        "VipLlava": (described(16), {**llava, "vision_feature_layers": [-1, -2]}),
        "PaliGemma": (
            described(16),
            {
                "text_config": {**gemma, "model_type": "gemma"},
                "vision_config": siglip,
                "image_token_id": IMAGE,
                "projection_dim": 16,
            },
        ),
        "Gemma3": (
            described(4),
            {
                "text_config": {**gemma, "model_type": "gemma3_text"},
                "vision_config": siglip,
                "image_token_id": IMAGE,
                "mm_tokens_per_image": 4,
            },
        ),
        "InternVL": (described(4), {"text_config": text, "vision_config": intern, "image_token_id": IMAGE}),
        "Blip": (captioned, blip),
        "Qwen2VL": (sized, qwen),
        "Qwen2_5_VL": (sized, {**qwen, "vision_config": windows}),
    }
    lone = {"vision_config": dict(PATCHES), "num_labels": LABELS}
    return [
        *(
            hugging_face(family, f"{name}{end}", inputs, **options)
            for name, (inputs, options) in table.items()
        ),
        hugging_face(family, "GitForCausalLM", captioned, **{**TEXT, "vision_config": lone["vision_config"]}),
        hugging_face(family, "AltCLIPModel", pairs, **TEXT_VISION),
        Architecture(family, "VisionEncoderDecoderModel", _vit_to_gpt2, image_captions),
        Architecture(family, "VisionTextDualEncoderModel", _vit_and_bert, pairs),
    ]


def _vit_to_gpt2() -> nn.Module:
    import transformers as hf

    gpt2 = hf.GPT2Config(**TEXT, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(hf.ViTConfig(**PATCHES), gpt2)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model: nn.Module = hf.VisionEncoderDecoderModel(config)
    return model


def _vit_and_bert() -> nn.Module:
    import transformers as hf

    bert = hf.BertConfig(**TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = hf.VisionTextDualEncoderConfig.from_vision_text_configs(
        hf.ViTConfig(**PATCHES), bert, projection_dim=16
    )
    model: nn.Module = hf.VisionTextDualEncoderModel(config)
    return model


def _plain() -> list[Architecture]:
    family, p = "plain torch.nn", plain_nets
    classifiers = (
        p.vgg,
        p.densenet,
        p.mobilenet,
        p.mixer,
        p.resnet,
        p.resnext,
        p.mobilenet_v3,
        p.efficientnet,
    )
    classifiers += (p.shufflenet, p.inception, p.squeezenet, p.alexnet, p.Pyramid)
    painters = (p.unet, p.autoencoder, p.deeplab, p.pixel_shuffle, p.style_transfer, p.generator)
    readers = (p.temporal_convolutions, p.lstm, p.gru, p.transformer_encoder)
    others: dict[Callable[[], nn.Module], Inputs] = {
        p.video: labelled(pixel_values=(3, 4, 6, 6)),
        p.Points: labelled(points=(3, 10)),
        p.Translator: lambda: {k: torch.randint(0, 32, (BATCH, 6)) for k in ("source", "target")},
        p.Recogniser: written,
        p.Graphs: graph,
        p.Clicks: clicked,
        p.Diffusion: noisy,
        p.Twins: twins,
    }
    return [
        *(Architecture(family, fn.__name__, fn, images(8)) for fn in classifiers),
        *(Architecture(family, fn.__name__, fn, per_pixel()) for fn in (*painters, p.fractional_unet)),
        *(Architecture(family, fn.__name__, fn, labelled(x=(7, 8))) for fn in readers),
        *(Architecture(family, fn.__name__, fn, inputs) for fn, inputs in others.items()),
    ]


RARELY = frozenset(
    """
    CwmForCausalLM SeedOssForCausalLM Olmo3ForCausalLM GlmForCausalLM Ernie4_5ForCausalLM
    GPTBigCodeForCausalLM NanoChatForCausalLM RoFormerForCausalLM BambaForCausalLM FalconH1ForCausalLM
    MPNetForMaskedLM MegatronBertForMaskedLM RoFormerForMaskedLM RemBertForMaskedLM EuroBertForMaskedLM
    NomicBertForMaskedLM FlaubertWithLMHeadModel CanineForSequenceClassification
    DebertaV2ForTokenClassification MBartForConditionalGeneration PegasusForConditionalGeneration
    BlenderbotSmallForConditionalGeneration MvpForConditionalGeneration PLBartForConditionalGeneration
    UMT5ForConditionalGeneration EncoderDecoderModel Data2VecVisionForImageClassification
    Swinv2ForImageClassification MobileNetV1ForImageClassification MobileNetV2ForImageClassification
    EfficientNetForImageClassification MobileViTV2ForImageClassification DeiTForMaskedImageModeling
    HubertForCTC WavLMForCTC UniSpeechForCTC UniSpeechSatForCTC Data2VecAudioForCTC
    VipLlavaForConditionalGeneration BlipForConditionalGeneration Qwen2_5_VLForConditionalGeneration
    GitForCausalLM AltCLIPModel VisionTextDualEncoderModel
    """.split()  # noqa: SIM905 - a table reads better than 40 quoted lines
)
ARCHITECTURES: tuple[Architecture, ...] = (
    *_causal(),
    *_experts(),
    *_recurrent(),
    *_masked(),
    *_seq2seq(),
    *_vision(),
    *_speech(),
    *_several(),
    *_plain(),
    *(Architecture(k.family, k.name, k.build, k.batch, k.name in DOUBLE, of_kind=True) for k in kinds()),
)


if __name__ == "__main__":
    print_table([a for a in ARCHITECTURES if a.name in sys.argv[1:] or len(sys.argv) == 1])
