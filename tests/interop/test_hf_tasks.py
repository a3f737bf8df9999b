"""Which class a Hugging Face config stands for, and whether its batch is one that the class learns from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import GROUPED, PATCHES, WAVES

from autoshard.capture.capture import capture
from autoshard.errors import UsageError
from autoshard.interop.huggingface import load_hf_config
from autoshard.planner.analysis import analyse

TEXT: dict[str, Any] = {**GROUPED, "vocab_size": 96, "max_position_embeddings": 64}
SEEN: dict[str, Any] = {**PATCHES}
BERT: dict[str, Any] = {"model_type": "bert", **TEXT, "num_labels": 3}
SOUND: dict[str, Any] = {**WAVES, "layerdrop": 0.0, "apply_spec_augment": False}

#: architecture -> its config
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", **TEXT},
    "LlamaForSequenceClassification": {"model_type": "llama", **TEXT, "pad_token_id": 0},
    "BertForMaskedLM": BERT,
    "BertForSequenceClassification": BERT,
    "BertForTokenClassification": BERT,
    "BertForQuestionAnswering": {"model_type": "bert", **TEXT},
    "WhisperForConditionalGeneration": {
        "model_type": "whisper",
        "vocab_size": 96,
        "num_mel_bins": 8,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_source_positions": 16,
        "max_target_positions": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    },
    "T5ForConditionalGeneration": {
        "model_type": "t5",
        "vocab_size": 96,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 4,
    },
    "Wav2Vec2ForCTC": {"model_type": "wav2vec2", **SOUND, "vocab_size": 20},
    "Wav2Vec2ForSequenceClassification": {"model_type": "wav2vec2", **SOUND},
    "ASTForAudioClassification": {
        "model_type": "audio-spectrogram-transformer",
        **SEEN,
        "num_mel_bins": 16,
        "max_length": 24,
        "frequency_stride": 4,
        "time_stride": 4,
    },
    "CLIPModel": {
        "model_type": "clip",
        "text_config": {**TEXT, "max_position_embeddings": 12},
        "vision_config": SEEN,
    },
    "LlavaForConditionalGeneration": {
        "model_type": "llava",
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **SEEN},
        "image_token_id": 95,
        "vision_feature_layer": -1,
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "model_type": "qwen2_5_vl",
        "text_config": {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]}},
        "vision_config": {
            "depth": 2,
            "hidden_size": 16,
            "num_heads": 4,
            "intermediate_size": 24,
            "out_hidden_size": 16,
            "patch_size": 4,
            "fullatt_block_indexes": [1],
            "window_size": 16,
        },
        "image_token_id": 95,
    },
    "SegformerForSemanticSegmentation": {
        "model_type": "segformer",
        "image_size": 32,
        "hidden_sizes": [8, 8, 16, 16],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 1, 2, 2],
        "decoder_hidden_size": 8,
    },
    "VideoMAEForVideoClassification": {"model_type": "videomae", **SEEN, "num_frames": 4},
}


def written(folder: Path, entries: dict[str, Any], architecture: str | None = None) -> Path:
    named = {**entries, "architectures": [architecture]} if architecture else entries
    (folder / "config.json").write_text(json.dumps(named))
    return folder / "config.json"


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_named_class_learns_from_its_batch(architecture: str, tmp_path: Path) -> None:
    """It is built, not one like it; on meta it is captured with a rule for every op, on the CPU it runs."""
    pytest.importorskip("transformers")
    path = written(tmp_path, CONFIGS[architecture], architecture)
    model, made = load_hf_config(path, 4, 16)
    assert type(model).__name__ == architecture
    found = analyse(capture(model, (), made.inputs))
    trained = {p.target for g in found.flow.classes.values() if g.grads for p in g.ports}
    assert len(trained) > 0.8 * sum(p.requires_grad for p in model.parameters())
    real, made = load_hf_config(path, 4, 16, device="cpu")
    loss = real(**made.inputs).loss
    assert loss.requires_grad
    assert torch.isfinite(loss)


def test_detection_ends_with_its_outputs(tmp_path: Path) -> None:
    """The matching of boxes in its loss is no part of a program: images alone, and a note that says so."""
    pytest.importorskip("transformers")
    backbone = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    entries = {
        **{"model_type": "detr", "use_timm_backbone": False, "use_pretrained_backbone": False},
        **{"backbone": None, "backbone_config": {**backbone, "out_features": ["stage2"]}, "d_model": 16},
        **{"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "image_size": 64},
    }
    model, made = load_hf_config(written(tmp_path, entries), 2, 16)
    assert type(model).__name__ == "DetrForObjectDetection" and "no loss" in made.notes[-1]
    found = analyse(capture(model, (), made.inputs))
    assert any(g.grads for g in found.flow.classes.values())


def test_images_are_part_of_the_sequence(tmp_path: Path) -> None:
    """As many tokens as the model makes of an image, said in a note; other tokens are text."""
    path = written(tmp_path, CONFIGS["LlavaForConditionalGeneration"], "LlavaForConditionalGeneration")
    _, made = load_hf_config(path, 4, 8, device="cpu")
    ids, count = made.inputs["input_ids"], 16
    assert (ids == 95).sum(dim=1).tolist() == [count] * 4
    assert ids.shape == (4, 8 + count)
    assert made.notes == (f"sequences of {8 + count} tokens, {count} of them an image",)


def test_every_step_does_the_same(tmp_path: Path) -> None:
    """Layers left out and sounds hidden by chance are not, with a note; the model is captured."""
    entries = {**CONFIGS["Wav2Vec2ForCTC"], "layerdrop": 0.1, "apply_spec_augment": True}
    model, made = load_hf_config(written(tmp_path, entries, "Wav2Vec2ForCTC"), 4, 16)
    assert made.notes == (
        "every step does the same: layerdrop is taken as 0.0",
        "every step does the same: apply_spec_augment is taken as False",
    )
    capture(model, (), made.inputs)


def test_a_decoder_begins_with_some_token(tmp_path: Path) -> None:
    """Where the config does not say with which, which changes no shape: with a note."""
    entries = CONFIGS["T5ForConditionalGeneration"]
    _, made = load_hf_config(written(tmp_path, entries, "T5ForConditionalGeneration"), 4, 16)
    assert made.notes == ("the config has no decoder_start_token_id: 0 is taken",)
    named = {**entries, "decoder_start_token_id": 3}
    _, made = load_hf_config(written(tmp_path, named, "T5ForConditionalGeneration"), 4, 16)
    assert not made.notes


def test_infinity_is_a_number(tmp_path: Path) -> None:
    """A config as transformers writes it, for instance of Mamba 2."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_heads": 4, "head_dim": 8, "n_groups": 1, "state_size": 8}
    config = transformers.Mamba2Config(vocab_size=96, num_hidden_layers=2, **small)
    config.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    model, _ = load_hf_config(tmp_path, 4, 16)
    assert list(model.config.time_step_limit) == [0.0, float("inf")]


def test_what_has_no_loss_is_refused(tmp_path: Path) -> None:
    """With what to do instead."""
    path = written(tmp_path, {"model_type": "sam"}, "SamModel")
    with pytest.raises(UsageError, match="no model with a loss is known for the model type 'sam'") as caught:
        load_hf_config(path, 4, 16)
    assert "FILE.py:FUNCTION" in (caught.value.hint or "")
