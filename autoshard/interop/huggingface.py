"""Hugging Face transformers: how its models are captured, and models built from a config alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autoshard.capture.huggingface import configs_in
from autoshard.errors import UsageError
from autoshard.interop.hf_inputs import ExampleInputs, InputRequest
from autoshard.interop.hf_tasks import task_of
from autoshard.interop.unfilled import Unfilled

#: what makes a model leave out full layers of a step, or hide parts of sounds, by numbers drawn in Python
_CHANCES: Mapping[str, float | bool] = MappingProxyType(
    {
        "layerdrop": 0.0,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "speech_encoder_layerdrop": 0.0,
        "apply_spec_augment": False,
    }
)


def load_hf_config(
    config_path: str | Path,
    batch: int,
    seq: int,
    *,
    device: str = "meta",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    overrides: dict[str, Any] | None = None,
) -> tuple[nn.Module, ExampleInputs]:
    """A model with a loss, and example inputs, from a ``config.json`` (or its folder).

    device: ``"meta"`` allocates nothing; ``"cpu"`` gives random weights and inputs that depend on ``seed``
    only. overrides: config entries to change first. dtype: of the weights, else what the config says.
    Returns (model in training mode, keyword arguments of its forward with notes on them).
    """
    from transformers.models import auto as classes

    options = {} if dtype is None else {"dtype": dtype}
    config = _read_config(Path(config_path), overrides or {})
    task, notes = task_of(config), same_every_step(config)
    with torch.random.fork_rng(devices=[]), torch.device(device), Unfilled():
        torch.manual_seed(seed)
        model: nn.Module = getattr(classes, task.auto).from_config(config, **options)
        new = task.inputs(InputRequest(model, config, batch, seq))
    return model.train(), ExampleInputs(new.inputs, (*notes, *new.notes))


def same_every_step(config: Any) -> tuple[str, ...]:
    """Have a model do the same in every step, as a program does, and say so."""
    result: dict[str, None] = {}
    for part in configs_in(config):
        for name, value in _CHANCES.items():
            if getattr(part, name, None):
                setattr(part, name, value)
                result[f"every step does the same: {name} is taken as {value}"] = None
    return tuple(result)


def _read_config(path: Path, overrides: dict[str, Any]) -> Any:
    from transformers.models.auto import AutoConfig

    file = path / "config.json" if path.is_dir() else path
    read = json.loads(file.read_text(), object_hook=_number)
    if not isinstance(read, dict):
        raise UsageError(f"a config is a {type(read).__name__}", where=str(file), hint="give a JSON object")
    entries = {**read, **overrides}
    kind = entries.pop("model_type", None)
    if kind is None:
        raise UsageError("the config has no model_type", where=str(file), hint='add "model_type": "llama"')
    config = AutoConfig.for_model(kind, **entries)
    config.architectures = config.architectures or []  # auto classes with a choice iterate over it
    return config


def _number(entries: dict[str, Any]) -> Any:
    """What transformers writes for infinity and the like, which JSON has no number for."""
    return float(entries["__float__"]) if entries.keys() == {"__float__"} else entries
