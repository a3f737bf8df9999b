"""Models on the meta device, whose weights are read from a checkpoint: see `weights_worker.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from ranks import HERE, run_ranks
from sampling import all_cases
from torch import nn

from autoshard.errors import UsageError
from autoshard.interop.checkpoint_files import tensors_of
from autoshard.interop.hf_weights import fill_buffers
from autoshard.interop.weights import load_weights


def test_ranks_read_their_parts_as_from_pretrained_does(tmp_path: Path) -> None:
    meshes = ["dp=2,tp=2", "fsdp=4", "pp=2,dp=2"] if all_cases() else ["pp=2,dp=2"]
    names = ["Mixtral", "GPT2"] if all_cases() else ["Mixtral"]
    job = [str(HERE / "weights_worker.py"), str(tmp_path), ",".join(names), ";".join(meshes)]
    said = run_ranks(job, AUTOSHARD_CACHE=str(tmp_path / "cache"))  # its cases have the same programs
    lines = [line for line in said.splitlines() if line.startswith("ok")]
    # five cases of the first model, one of the second, first values; memory
    assert len(lines) == (5 + len(names)) * len(meshes) + 1, said


@pytest.mark.parametrize("name", ["Llama", "Bert", "Swin", "ModernBert", "Gemma3TextModel"])
def test_buffers_of_a_meta_model_have_the_values_of_a_built_one(name: str) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    configs = {
        "Swin": transformers.SwinConfig(embed_dim=8, depths=[1, 1], num_heads=[2, 2], image_size=32),
        "Gemma3TextModel": transformers.Gemma3TextConfig(**sizes, num_key_value_heads=2, head_dim=8),
    }
    config = configs.get(name) or getattr(transformers, f"{name}Config")(**sizes)
    cls = getattr(transformers, name if name.endswith("Model") else f"{name}Model")
    built = dict(cls(config).named_buffers())
    with torch.device("meta"):
        model = cls(config)
    fill_buffers(model)
    found = dict(model.named_buffers())
    assert found.keys() == built.keys() and found
    for key, x in built.items():
        assert torch.equal(found[key], x), key


class _Shifted(transformers.PreTrainedModel):
    config_class = transformers.LlamaConfig

    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__(config)
        self.register_buffer("shift", torch.full((2,), 3.0), persistent=False)


def test_a_buffer_that_no_code_fills_stays_without_values() -> None:
    with torch.device("meta"):
        model = _Shifted(transformers.LlamaConfig())
    fill_buffers(model)
    assert model.shift.is_meta


def test_files_that_are_cut_off_are_refused(tmp_path: Path) -> None:
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        )
    ).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    assert list(tensors_of(tmp_path))
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="ends after"):
        tensors_of(tmp_path)
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match="before its header"):
        tensors_of(tmp_path)


def test_what_torch_saved_is_read_too(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(6.0)}, tmp_path / "pytorch_model.bin")
    tensors = tensors_of(tmp_path)
    assert list(tensors) == ["a"] and tensors.shape("a") == (6,)
    assert torch.equal(tensors.read("a"), torch.arange(6.0))


def test_a_model_that_is_not_parallel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not parallel"):
        load_weights(nn.Linear(2, 2), tmp_path)
