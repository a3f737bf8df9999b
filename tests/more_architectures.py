"""Architectures whose small configuration, and mostly the batch too, follow from their kind (``model_type``).

Batches are those of ``hf:`` targets. Models without a loss get one: how far all that they give is from one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from architecture_inputs import BATCH, Inputs
from small_configs import merged, small
from torch import nn
from torch.utils import _pytree as pytree

SEQ = 16
#: sizes that some kinds need beside the usual ones, by the mark of the tables below
_SIZES: tuple[Mapping[str, int], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"num_hidden_layers": 4},
    {"num_hidden_layers": 4, "num_key_value_heads": 4},
    {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "head_dim": 16,
    },
)


#: in fp64, since their norms over few numbers make large errors of small ones
DOUBLE = frozenset(
    """
    HGNetV2ForImageClassification TextNetForImageClassification MobileViTForImageClassification
    CvtForImageClassification OwlViTForObjectDetection DPTForDepthEstimation Tipsv2Model
    Gemma4UnifiedForCausalLM
    """.split()  # noqa: SIM905 - a table reads better than quoted names
)


@dataclass(frozen=True)
class Kind:
    """options: entries of the config beside the small ones. inputs: if not those of its task."""

    family: str
    name: str
    model_type: str
    sizes: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Inputs | None = None

    def config(self) -> Any:
        from transformers import AutoConfig

        from autoshard.interop.huggingface import same_every_step

        default = AutoConfig.for_model(self.model_type)
        entries = merged(small(default, _SIZES[self.sizes]), self.options)
        config = AutoConfig.for_model(self.model_type, **entries)
        config.architectures = []
        same_every_step(config)
        return config

    def build(self) -> nn.Module:
        import transformers as hf
        from transformers.models import auto

        from autoshard.interop.hf_tasks import task_of

        config = self.config()
        if self.inputs is not None:
            return WithLoss(getattr(hf, self.name)(config))
        model: nn.Module = getattr(auto, task_of(config).auto).from_config(config)
        return model

    def batch(self, model: nn.Module) -> dict[str, Any]:
        from autoshard.interop.hf_inputs import InputRequest
        from autoshard.interop.hf_tasks import task_of

        if self.inputs is not None:
            return self.inputs()
        config = self.config()
        return task_of(config).inputs(InputRequest(model, config, BATCH, SEQ)).inputs


class WithLoss(nn.Module):
    """A model with a loss: its own, or how far all that it gives is from one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> dict[str, torch.Tensor]:
        out = self.model(**inputs)
        loss = out.get("loss")
        if isinstance(loss, torch.Tensor) and loss.dim() == 0:
            return {"loss": loss}
        found = [t for t in pytree.tree_leaves(dict(out)) if isinstance(t, torch.Tensor)]
        made = [(t - 1).square().mean() for t in found if t.is_floating_point() and t.requires_grad]
        return {"loss": torch.stack(made).sum()}


def kinds() -> Iterator[Kind]:
    """All of them."""
    for family, rows in _BY_TASK.items():
        for row in rows.split():
            model_type, name, sizes = row.split(":")
            yield Kind(family, name, model_type, int(sizes))
    yield from _loops()
    yield from _strides()
    yield from _dense_images()
    yield from _others()


def _tokens(**more: Callable[[], torch.Tensor]) -> Inputs:
    return lambda: {
        "input_ids": torch.randint(3, 90, (BATCH, SEQ)),
        **{k: make() for k, make in more.items()},
    }


def _images(size: int, **more: Callable[[], torch.Tensor]) -> Inputs:
    return lambda: {
        "pixel_values": torch.randn(BATCH, 3, size, size),
        **{k: make() for k, make in more.items()},
    }


def _ids(length: int = SEQ) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(3, 90, (BATCH, length))


def _ones(length: int = SEQ) -> Callable[[], torch.Tensor]:
    return lambda: torch.ones(BATCH, length, dtype=torch.int64)


def _loops() -> Iterator[Kind]:
    """Experts that the model's own loop finds."""
    family = "mixture of experts"
    sparse = {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "num_experts": 4}
    yield Kind(
        family,
        "SwitchTransformersForConditionalGeneration",
        "switch_transformers",
        options={
            **sparse,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "expert_capacity": 8,
            "router_jitter_noise": 0.0,
        },
    )
    yield Kind(
        family,
        "NllbMoeForConditionalGeneration",
        "nllb-moe",
        options={**sparse, "expert_capacity": 64, "router_dtype": "float32"},
    )
    yield Kind(
        family,
        "DbrxForCausalLM",
        "dbrx",
        options={
            "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 48, "hidden_size": 32},
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            **{"d_model": 32, "n_heads": 4, "n_layers": 2},
        },
    )
    yield Kind(
        family,
        "LongcatFlashForCausalLM",
        "longcat_flash",
        1,
        options={
            **{"num_layers": 1, "num_hidden_layers": 2, "expert_ffn_hidden_size": 24, "zero_expert_num": 2},
            **{"qk_head_dim": 16, "num_attention_heads": 4},
        },
    )


def _strides() -> Iterator[Kind]:
    """Windows made by strides, with masks whose values the model asks for."""
    window = {"attention_window": 4}
    yield Kind("masked text", "LongformerForMaskedLM", "longformer", options=window)
    # it gives its loss twice, by two names
    yield Kind("masked text", "LukeForMaskedLM", "luke", inputs=_tokens(labels=_ids()))
    yield Kind(
        "masked text",
        "LongformerForSequenceClassification",
        "longformer",
        options=window,
        inputs=_tokens(labels=lambda: torch.randint(0, 2, (BATCH,))),
    )
    yield Kind("sequence to sequence", "LEDForConditionalGeneration", "led", options=window)
    yield Kind(
        "sequence to sequence",
        "FSMTForConditionalGeneration",
        "fsmt",
        options={"src_vocab_size": 128, "tgt_vocab_size": 128, "langs": ["en", "de"]},
        inputs=_tokens(
            attention_mask=_ones(),
            decoder_input_ids=_ids(8),
            decoder_attention_mask=_ones(8),
            labels=_ids(8),
        ),
    )


def _dense_images() -> Iterator[Kind]:
    """Detection, depth and segmentation, without labels: their matching is no part of a program."""
    resnet = {"model_type": "resnet", "embedding_size": 8, "layer_type": "basic", "num_labels": 3}
    two = {**resnet, "hidden_sizes": [8, 16], "depths": [1, 1], "out_features": ["stage2"]}
    four = {**resnet, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
    four["out_features"] = ["stage2", "stage3", "stage4"]
    detr = {
        **{"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None},
        **{"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
        **{"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 6},
        "backbone_config": two,
    }
    real_time = {
        "backbone_config": {**four, "model_type": "rt_detr_resnet", "out_indices": [2, 3, 4]},
        **{
            "encoder_hidden_dim": 16,
            "encoder_in_channels": [16, 16, 16],
            "decoder_in_channels": [16, 16, 16],
        },
        **{"d_model": 16, "decoder_ffn_dim": 24, "encoder_ffn_dim": 24, "decoder_layers": 2},
        **{"num_denoising": 0, "decoder_attention_heads": 2, "encoder_attention_heads": 2, "num_queries": 6},
    }
    swin = {
        **{"model_type": "swin", "image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [1, 1, 1, 1]},
        **{"num_heads": [1, 1, 1, 1], "window_size": 2},
        "out_features": ["stage1", "stage2", "stage3", "stage4"],
    }
    neck = {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16, "initializer_range": 0.08}
    stages = {"num_hidden_layers": 4, "out_features": ["stage1", "stage2", "stage3", "stage4"]}
    small_vit = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "image_size": 32,
        "reshape_hidden_states": False,
    }
    table: dict[str, tuple[str, dict[str, Any]]] = {
        "DetrForObjectDetection": ("detr", detr),
        "ConditionalDetrForObjectDetection": ("conditional_detr", detr),
        "DabDetrForObjectDetection": ("dab-detr", {**detr, "hidden_size": 32}),
        "TableTransformerForObjectDetection": ("table-transformer", detr),
        "DeformableDetrForObjectDetection": (
            "deformable_detr",
            {**detr, "backbone_config": four, "num_feature_levels": 3},
        ),
        "RTDetrForObjectDetection": ("rt_detr", real_time),
        "RTDetrV2ForObjectDetection": ("rt_detr_v2", real_time),
        "DPTForDepthEstimation": (
            "dpt",
            {
                **{**neck, "is_hybrid": False, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
                **{"reassemble_factors": [4, 2, 1, 0.5], "image_size": 32, "patch_size": 4},
            },
        ),
        "DepthAnythingForDepthEstimation": (
            "depth_anything",
            {
                "backbone_config": {**small_vit, **stages, "model_type": "dinov2", "patch_size": 4},
                **{**neck, "reassemble_hidden_size": 32, "patch_size": 4, "head_hidden_size": 16},
            },
        ),
        "GLPNForDepthEstimation": (
            "glpn",
            {
                **{"num_encoder_blocks": 4, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32]},
                **{"num_attention_heads": [1, 2, 2, 2], "decoder_hidden_size": 16, "sr_ratios": [4, 2, 2, 1]},
            },
        ),
        "Mask2FormerForUniversalSegmentation": (
            "mask2former",
            {
                **{"backbone_config": swin, "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32},
                **{"encoder_feedforward_dim": 24, "encoder_layers": 1, "decoder_layers": 2, "num_queries": 4},
                **{"num_attention_heads": 2, "dim_feedforward": 24},
            },
        ),
        "MaskFormerForInstanceSegmentation": (
            "maskformer",
            {
                **{"backbone_config": swin, "fpn_feature_size": 32, "mask_feature_size": 32},
                "decoder_config": {**detr, "model_type": "detr"},
            },
        ),
    }
    for name, (model_type, options) in table.items():
        yield Kind("vision", name, model_type, options=options, inputs=_images(32))


def _others() -> Iterator[Kind]:
    yield Kind(
        "multimodal",
        "Kosmos2ForConditionalGeneration",
        "kosmos-2",
        options={"latent_query_num": 4},
        inputs=_images(
            32,
            input_ids=_ids(),
            labels=_ids(),
            image_embeds_position_mask=lambda: torch.tensor([[0] + [1] * 4 + [0] * 11] * BATCH),
        ),
    )
    yield Kind(
        "multimodal",
        "LxmertForPreTraining",
        "lxmert",
        options={
            **{"visual_feat_dim": 16, "l_layers": 2, "r_layers": 1, "x_layers": 1, "task_obj_predict": False},
            **{"task_qa": False, "task_matched": False},
        },
        inputs=_tokens(
            labels=_ids(),
            visual_feats=lambda: torch.randn(BATCH, 5, 16),
            visual_pos=lambda: torch.rand(BATCH, 5, 4),
        ),
    )
    yield Kind(
        "multimodal",
        "OwlViTForObjectDetection",
        "owlvit",
        options={"projection_dim": 32},
        inputs=_images(32, input_ids=_ids(), attention_mask=_ones()),
    )


#: model_type:class:sizes
_BY_TASK: Mapping[str, str] = MappingProxyType(
    {
        "multimodal": """
            aria:AriaForConditionalGeneration:0 aya_vision:AyaVisionForConditionalGeneration:0
            clipseg:CLIPSegModel:0 cohere2_vision:Cohere2VisionForConditionalGeneration:0
            cosmos3_omni:Cosmos3OmniForConditionalGeneration:0
            deepseek_vl:DeepseekVLForConditionalGeneration:0 exaone4_5:Exaone4_5_ForConditionalGeneration:0
            granite_docling:GraniteDoclingForConditionalGeneration:0
            hyperclovax_vision_v2:HyperCLOVAXVisionV2ForConditionalGeneration:0
            idefics2:Idefics2ForConditionalGeneration:0 idefics3:Idefics3ForConditionalGeneration:0
            inkling_mm_model:InklingForConditionalGeneration:0 janus:JanusForConditionalGeneration:0
            kosmos-2.5:Kosmos2_5ForConditionalGeneration:0 lfm2_vl:Lfm2VlForConditionalGeneration:0
            lighton_ocr:LightOnOcrForConditionalGeneration:0 llava_next:LlavaNextForConditionalGeneration:0
            llava_next_video:LlavaNextVideoForConditionalGeneration:0
            llava_onevision:LlavaOnevisionForConditionalGeneration:0
            mistral3:Mistral3ForConditionalGeneration:0 qianfan_ocr:QianfanOCRForConditionalGeneration:0
            qwen3_omni_moe_thinker:Qwen3OmniMoeThinkerForConditionalGeneration:0
            qwen3_vl:Qwen3VLForConditionalGeneration:0 qwen3_vl_moe:Qwen3VLMoeForConditionalGeneration:0
            smolvlm:SmolVLMForConditionalGeneration:0 tipsv2:Tipsv2Model:0
            unlimited_ocr:UnlimitedOcrForConditionalGeneration:0
            video_llava:VideoLlavaForConditionalGeneration:0
            cosmos3_edge:Cosmos3EdgeForConditionalGeneration:0
            deepseek_vl_hybrid:DeepseekVLHybridForConditionalGeneration:0
            lfm3_vl:Lfm3VlForConditionalGeneration:2 minicpm_ocr:MiniCPMOcrForConditionalGeneration:2
            minicpmv4_6:MiniCPMV4_6ForConditionalGeneration:2
            minicpmv4_7:MiniCPMV4_7ForConditionalGeneration:2 mistral4:Mistral4ForCausalLM:4
            mistral_large4:MistralLarge4ForConditionalGeneration:1
        """,
        "causal text": """
            beam:BeamForCausalLM:0 bert-generation:BertGenerationDecoder:0
            cohere2_moe:Cohere2MoeForCausalLM:0 cpmant:CpmAntForCausalLM:0
            deepseek_v4:DeepseekV4ForCausalLM:0 doge:DogeForCausalLM:0 emu3:Emu3ForCausalLM:0
            exaone_moe:ExaoneMoeForCausalLM:0 flint:FlintForCausalLM:0 fuyu:FuyuForCausalLM:0
            gemma4:Gemma4ForConditionalGeneration:0
            gemma4_text:Gemma4ForCausalLM:0 gemma4_unified:Gemma4UnifiedForConditionalGeneration:0
            gemma4_unified_text:Gemma4UnifiedForCausalLM:0 got_ocr2:GotOcr2ForConditionalGeneration:0
            gpt_neox_japanese:GPTNeoXJapaneseForCausalLM:0 granite_swa:GraniteSWAForCausalLM:0
            granitemoe_swa:GraniteMoeSWAForCausalLM:0 hrm_text:HrmTextForCausalLM:0 hy_v3:HYV3ForCausalLM:0
            hy_v4:HYV4ForCausalLM:0 hyperclovax:HyperCLOVAXForCausalLM:0 inkling2_text:Inkling2ForCausalLM:0
            inkling_text:InklingForCausalLM:0 jais2:Jais2ForCausalLM:0 kolibri1:Kolibri1ForCausalLM:0
            laguna:LagunaForCausalLM:0 llama4:Llama4ForCausalLM:0 mellum:MellumForCausalLM:0
            mimo_v2_flash:MiMoV2FlashForCausalLM:0 minimax:MiniMaxForCausalLM:0
            minimax_m3_vl_text:MiniMaxM3VLForCausalLM:0 ministral3:Ministral3ForCausalLM:0
            mllama:MllamaForCausalLM:0 moshi:MoshiForCausalLM:0
            moss_transcribe_diarize:MossTranscribeDiarizeForConditionalGeneration:0
            phi4_multimodal:Phi4MultimodalForCausalLM:0 phimoe:PhimoeForCausalLM:0 rwkv:RwkvForCausalLM:0
            solar_open:SolarOpenForCausalLM:0 vaultgemma:VaultGemmaForCausalLM:0 zaya:ZayaForCausalLM:0
            axk1:AXK1ForCausalLM:1 axk2:AXK2ForCausalLM:1 dots3_note_text:Dots3NoteForCausalLM:1
            glm4_moe_lite:Glm4MoeLiteForCausalLM:1 glm_moe_dsa:GlmMoeDsaForCausalLM:1 lfm3:Lfm3ForCausalLM:2
            minicpm3:MiniCPM3ForCausalLM:1 qwen3_5:Qwen3_5ForCausalLM:2 qwen3_5_moe:Qwen3_5MoeForCausalLM:2
        """,
        "sequence to sequence": """
            bigbird_pegasus:BigBirdPegasusForConditionalGeneration:0
            blenderbot:BlenderbotForConditionalGeneration:0 mt5:MT5ForConditionalGeneration:0
            pegasus_x:PegasusXForConditionalGeneration:0
            prophetnet:ProphetNetForConditionalGeneration:0 seamless_m4t:SeamlessM4TForTextToText:0
            seamless_m4t_v2:SeamlessM4Tv2ForTextToText:0 t5gemma:T5GemmaForConditionalGeneration:0
            t5gemma2:T5Gemma2ForConditionalGeneration:0
        """,
        "masked text": """
            camembert:CamembertForMaskedLM:0 data2vec-text:Data2VecTextForMaskedLM:0
            funnel:FunnelForMaskedLM:0 gte:GteForMaskedLM:0 jina_embeddings_v3:JinaEmbeddingsV3ForMaskedLM:0
            modernvbert:ModernVBertForMaskedLM:0
            roberta-prelayernorm:RobertaPreLayerNormForMaskedLM:0 roc_bert:RoCBertForMaskedLM:0
            tapas:TapasForMaskedLM:0 ultrabert:UltrabertForMaskedLM:0 ultravbert:UltraVBertForMaskedLM:0
            xlm-roberta:XLMRobertaForMaskedLM:0 xlm-roberta-xl:XLMRobertaXLForMaskedLM:0
            yoso:YosoForMaskedLM:0 esmc:EsmcForMaskedLM:1 neomme:NeoMMEForMaskedLM:4
        """,
        "speech": """
            canary:CanaryForConditionalGeneration:0 cohere_asr:CohereAsrForConditionalGeneration:0
            moonshine:MoonshineForConditionalGeneration:0
        """,
        "vision": """
            cvt:CvtForImageClassification:0 hgnet_v2:HGNetV2ForImageClassification:0
            metaclip_2:MetaClip2ForImageClassification:0 pvt:PvtForImageClassification:0
            textnet:TextNetForImageClassification:0
            videoprism_vision_model:VideoPrismForVideoClassification:0
            mobilevit:MobileViTForImageClassification:0
        """,
    }
)
