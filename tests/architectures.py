"""Many architectures, each tiny and with one batch: how far the compiler reaches.

``python tests/architectures.py`` plans each one, runs all ranks in lockstep beside the eager model and
prints a table of the largest errors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from lockstep_check import RTOL, lockstep_step, relative_error
from torch import nn
from torch.nn import functional as F

from autoshard.analysis import analyse
from autoshard.api import compile_analysed, plan_analysed
from autoshard.cluster import Mesh, load_cluster
from autoshard.passes.capture import capture
from autoshard.program.program import Program

BATCH, SEQ, VOCAB, LABELS = 4, 8, 96, 6
Inputs = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """A model class with a small configuration, and how to make one batch for it."""

    family: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Inputs

    def make(self, seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(seed)
        model = self.build().train()
        torch.manual_seed(seed + 1)
        return model, self.inputs()


# -- batches -------------------------------------------------------------------------------------------


def tokens() -> dict[str, Any]:
    """Text with labels; some of them do not count."""
    labels = torch.randint(3, VOCAB, (BATCH, SEQ))
    labels[0, :3] = -100
    return {"input_ids": torch.randint(3, VOCAB, (BATCH, SEQ)), "labels": labels}


def padded() -> dict[str, Any]:
    """Text with a mask."""
    mask = torch.ones(BATCH, SEQ, dtype=torch.int64)
    mask[1, 6:] = 0
    return {**tokens(), "attention_mask": mask}


def classified_text() -> dict[str, Any]:
    return {
        "input_ids": torch.randint(3, VOCAB, (BATCH, SEQ)),
        "labels": torch.randint(0, LABELS, (BATCH,)),
    }


def images(size: int = 16) -> Inputs:
    return lambda: {
        "pixel_values": torch.randn(BATCH, 3, size, size),
        "labels": torch.randint(0, LABELS, (BATCH,)),
    }


def segmented(size: int) -> Inputs:
    return lambda: {
        "pixel_values": torch.randn(BATCH, 3, size, size),
        "labels": torch.randint(0, LABELS, (BATCH, size, size)),
    }


def speech_features(bins: int = 8, frames: int = 16) -> Inputs:
    return lambda: {
        "input_features": torch.randn(BATCH, bins, frames),
        "labels": torch.randint(3, VOCAB, (BATCH, SEQ)),
    }


def spectrograms() -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, 16, 8), "labels": torch.randint(0, LABELS, (BATCH,))}


def waves(samples: int = 200) -> Inputs:
    return lambda: {
        "input_values": torch.randn(BATCH, samples),
        "labels": torch.randint(0, LABELS, (BATCH,)),
    }


def pairs() -> dict[str, Any]:
    """Images with their captions."""
    return {
        "input_ids": torch.randint(3, VOCAB, (BATCH, SEQ)),
        "pixel_values": torch.randn(BATCH, 3, 16, 16),
        "return_loss": True,
    }


def masked_images() -> dict[str, Any]:
    """Images and the noise that chooses which patches are hidden."""
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16), "noise": torch.rand(BATCH, 16)}


def forecasts() -> dict[str, Any]:
    return {"past_values": torch.randn(BATCH, 16, 2), "future_values": torch.randn(BATCH, 4, 2)}


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


class Loss(nn.Module):
    """A network with a classification loss of its last dim."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.layers(pixel_values), labels)}


class Pointwise(nn.Module):
    """A network with one number per pixel, and a loss that says how far it is off."""

    def __init__(self, loss: nn.Module, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.loss = nn.Sequential(*layers), loss

    def forward(self, pixel_values: torch.Tensor, wanted: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(self.layers(pixel_values), wanted)}


class Joined(nn.Module):
    """What goes in beside what comes out (as in DenseNet and U-Net), at the size of what went in."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if y.shape[-2:] != x.shape[-2:]:
            y = F.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)
        return torch.cat((x, y), 1)


def _conv(
    before: int, after: int, norm: Callable[[int], nn.Module] = nn.BatchNorm2d, **more: Any
) -> nn.Module:
    conv = nn.Conv2d(before, after, 3, padding=1, bias=False, **more)
    return nn.Sequential(conv, norm(after), nn.ReLU())


def _head(channels: int) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, LABELS)


def vgg() -> nn.Module:
    return Loss(_conv(3, 8), nn.MaxPool2d(2), _conv(8, 16), nn.MaxPool2d(2), _conv(16, 16), *_head(16))


def densenet() -> nn.Module:
    return Loss(_conv(3, 8), Joined(_conv(8, 8)), Joined(_conv(16, 8)), nn.AvgPool2d(2), *_head(24))


def mobilenet() -> nn.Module:
    return Loss(_conv(3, 8), _conv(8, 8, groups=8), nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), *_head(16))


def unet() -> nn.Module:
    down = (nn.MaxPool2d(2), _conv(8, 16), Joined(nn.MaxPool2d(2), _conv(16, 16)), _conv(32, 8))
    return Pointwise(nn.BCEWithLogitsLoss(), _conv(3, 8), Joined(*down), nn.Conv2d(16, 1, 1))


def autoencoder() -> nn.Module:
    def norm(channels: int) -> nn.Module:
        return nn.GroupNorm(2, channels)

    up = nn.ConvTranspose2d(16, 8, 2, stride=2)
    return Pointwise(nn.MSELoss(), _conv(3, 8, norm), _conv(8, 16, norm, stride=2), up, nn.Conv2d(8, 1, 1))


def mixer() -> nn.Module:
    """Patches that are mixed by convolutions over all of them (ConvMixer)."""
    wide = nn.Conv2d(16, 16, 5, padding=2, groups=16)
    return Loss(nn.Conv2d(3, 16, 4, stride=4), nn.GELU(), nn.BatchNorm2d(16), wide, nn.GELU(), *_head(16))


def per_pixel(size: int = 8) -> Inputs:
    return lambda: {
        "pixel_values": torch.randn(BATCH, 3, size, size),
        "wanted": torch.rand(BATCH, 1, size, size),
    }


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
            *("Granite", "Starcoder2", "SmolLM3", "Nemotron", "Arcee"),
        )
    ]
    made += [
        hugging_face(family, f"{name}ForCausalLM", tokens, **GROUPED, head_dim=4)
        for name in ["Qwen3", "Gemma", "Gemma3", "Glm4", "Exaone4", "Helium"]
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
    }.items():
        made.append(hugging_face(family, name, tokens, **{**TEXT, **options}))
    return made


def _experts() -> list[Architecture]:
    few = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
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
    table: dict[str, dict[str, Any]] = {
        "Mixtral": {"num_local_experts": 4},
        "Qwen2Moe": {**few, "shared_expert_intermediate_size": 24},
        "Qwen3Moe": {**few, "head_dim": 4},
        "Olmoe": few,
        "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4},
        "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "DeepseekV2": latent,
        "DeepseekV3": {**latent, "n_group": 2},
    }
    return [
        hugging_face("mixture of experts", f"{name}ForCausalLM", tokens, **{**GROUPED, **options})
        for name, options in table.items()
    ]


def _recurrent() -> list[Architecture]:
    family = "state space, recurrent"
    mixed = {"block_types": ["recurrent", "attention"], "lru_width": 16, "attention_window_size": 8}
    return [
        hugging_face(family, "MambaForCausalLM", tokens, **TEXT, state_size=4),
        hugging_face(family, "FalconMambaForCausalLM", tokens, **TEXT, state_size=4),
        hugging_face(family, "RecurrentGemmaForCausalLM", tokens, **GROUPED, **mixed, head_dim=4),
        hugging_face(family, "Lfm2ForCausalLM", tokens, **GROUPED, full_attn_idxs=[1]),
    ]


def _masked() -> list[Architecture]:
    family = "masked text"
    names = ["Bert", "Roberta", "ModernBert", "LayoutLM", "Ernie", "Esm"]
    special = {"cls_token_id": 1, "sep_token_id": 2, "mask_token_id": 3}
    made = [hugging_face(family, f"{name}ForMaskedLM", padded, **TEXT, **special) for name in names]
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
        hugging_face(family, "BertForSequenceClassification", classified_text, **TEXT, num_labels=LABELS),
    ]


def _seq2seq() -> list[Architecture]:
    family = "sequence to sequence"
    t5 = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2}
    names = ["BartForConditionalGeneration", "MarianMTModel", "M2M100ForConditionalGeneration"]
    start = {"num_heads": 4, "decoder_start_token_id": 0}
    return [
        hugging_face(family, "T5ForConditionalGeneration", tokens, **t5, **start),
        *(hugging_face(family, name, tokens, **SEQ2SEQ) for name in names),
    ]


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
    }
    return [
        *(hugging_face(family, f"{name}{end}", images(), **options) for name, options in table.items()),
        hugging_face(family, "SegformerForSemanticSegmentation", segmented(16), **segformer),
        hugging_face(family, "ViTMAEForPreTraining", masked_images, **PATCHES, **decoder),
    ]


def _speech() -> list[Architecture]:
    family = "speech"
    ends = {"max_target_positions": 32, "begin_suppress_tokens": None, "suppress_tokens": None}
    frames = {"num_mel_bins": 8, "max_source_positions": 8}
    patches = {**PATCHES, "frequency_stride": 4, "time_stride": 4, "max_length": 16, "num_mel_bins": 8}
    end = "ForSequenceClassification"
    return [
        hugging_face(
            family, "WhisperForConditionalGeneration", speech_features(), **{**SEQ2SEQ, **ends, **frames}
        ),
        *(hugging_face(family, f"{name}{end}", waves(), **WAVES) for name in ("Wav2Vec2", "Hubert", "WavLM")),
        hugging_face(family, "ASTForAudioClassification", spectrograms, **patches),
    ]


def _several() -> list[Architecture]:
    series = {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4}
    small = {"d_model": 16, "num_attention_heads": 4, "ffn_dim": 24, "num_hidden_layers": 2}
    siglip = {"text_config": {**TEXT, "projection_size": 16}, "vision_config": dict(PATCHES)}
    return [
        hugging_face("multimodal", "CLIPModel", pairs, **TEXT_VISION),
        hugging_face("multimodal", "ChineseCLIPModel", pairs, **TEXT_VISION),
        hugging_face("multimodal", "SiglipModel", pairs, **siglip),
        hugging_face(
            "time series", "PatchTSTForPrediction", forecasts, **series, **small, prediction_length=4
        ),
    ]


def _plain() -> list[Architecture]:
    family = "plain torch.nn"
    classifiers = (vgg, densenet, mobilenet, mixer)
    return [
        *(Architecture(family, fn.__name__, fn, images(8)) for fn in classifiers),
        Architecture(family, "unet", unet, per_pixel()),
        Architecture(family, "autoencoder", autoencoder, per_pixel()),
    ]


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
)


# -- the check -----------------------------------------------------------------------------------------


def program_of(model: nn.Module, inputs: dict[str, Any], mesh: str = "dp=2,tp=2") -> Program:
    analysis = analyse(capture(model, (), inputs))
    return compile_analysed(plan_analysed(analysis, [Mesh.parse(mesh)], load_cluster("h100-dgx")))


def errors_of(model: nn.Module, inputs: dict[str, Any], program: Program | None = None) -> dict[str, float]:
    """Relative error of the loss, of every gradient and of every buffer that a step changes."""
    program = program or program_of(model, inputs)
    lockstep, env = lockstep_step(program, model, inputs)
    out = model(**inputs)
    out["loss"].backward()
    params = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    errors: dict[str, float] = {}
    for result in program.signature.results:
        found = lockstep.whole(env[result.value], result.value)
        if result.kind == "grad":
            grad = params[result.target].grad
            assert grad is not None
            errors[result.target] = relative_error(found, grad)
        elif result.kind == "buffer":
            errors[result.target] = relative_error(found.double(), buffers[result.target].double())
        elif result.kind == "output" and found.dim() == 0 and "loss" not in errors:
            errors["loss"] = relative_error(found, out["loss"].detach())
    return errors


def main() -> None:
    """Print a table in markdown, a row per architecture."""
    warnings.simplefilter("ignore")
    print("| family | architecture | worst relative error |\n| --- | --- | --- |")
    for architecture in ARCHITECTURES:
        model, inputs = architecture.make()
        worst = max(errors_of(model, inputs).values())
        mark = "" if worst < RTOL else " (too large)"
        print(f"| {architecture.family} | {architecture.name} | {worst:.1e}{mark} |", flush=True)


if __name__ == "__main__":
    main()
