"""Hugging Face transformers: how its models are captured, and models built from a config alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autoshard.errors import UsageError
from autoshard.interop import experts
from autoshard.interop.hf_inputs import Asked, Made
from autoshard.interop.hf_tasks import task_of
from autoshard.interop.unfilled import Unfilled
from autoshard.torch_adapters.replaced import replaced

#: what makes a model leave out whole layers of a step, or hide parts of sounds, by numbers drawn in Python
_CHANCES: Mapping[str, float | bool] = MappingProxyType(
    {
        "layerdrop": 0.0,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "speech_encoder_layerdrop": 0.0,
        "apply_spec_augment": False,
    }
)
#: what a capture decides itself in a config
_DECIDED = ("use_cache", "_attn_implementation_internal", "_experts_implementation_internal")


@contextmanager
def prepared(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[list[tuple[Any, str]]]:
    """For the time of a capture of ``model(..., **kwargs)``, change what stands in the way.

    No key/value cache; attention kernels that only run on GPUs replaced by torch's; experts as products that
    need no sort over the tokens (implementations that the user registered stay); no search for packed
    sequences where eager mode makes none or finds none (without values a model cannot see that, and would
    build a mask for every pair of tokens). Does nothing if transformers was never imported, or the model
    is not one of its models. Gives the (config, attribute) pairs that it decides, whatever they were.
    """
    configs = _configs(model) if "transformers" in sys.modules else []
    with ExitStack() as stack:
        caching = kwargs.get("use_cache", any(getattr(c, "use_cache", False) for c in configs))
        for config in configs:
            stack.callback(_restore, config.__dict__, dict(config.__dict__))
            if getattr(config, "use_cache", False):
                config.use_cache = False
            attention = config.__dict__.get("_attn_implementation_internal")
            if isinstance(attention, str) and "flash" in attention:
                config._attn_implementation_internal = "sdpa"
        _lift_experts(configs, stack)
        # the search is made on models without a cache, and positions that a model makes itself never pack
        masking = sys.modules.get("transformers.masking_utils")
        packs = "position_ids" in kwargs and not caching
        if configs and not packs and hasattr(masking, "find_packed_sequence_indices"):
            stack.enter_context(replaced(masking, "find_packed_sequence_indices", _not_packed))
        yield [(config, name) for config in configs for name in _DECIDED]


def _lift_experts(configs: list[Any], stack: ExitStack) -> None:
    """Have transformers' experts call our op until the stack is closed."""
    moe = sys.modules.get("transformers.integrations.moe")
    interface = getattr(moe, "ALL_EXPERTS_FUNCTIONS", None)
    if interface is None or not configs:
        return
    stack.enter_context(experts.registered(interface))
    for config in configs:
        # quantised experts look their implementation up in a table of their own
        known = config.__dict__.get("_experts_implementation_internal", "") in experts.KNOWN
        if known and getattr(config, "quantization_config", None) is None:
            config._experts_implementation_internal = experts.NAME


def _not_packed(position_ids: torch.Tensor) -> None:
    return None


def _restore(now: dict[str, Any], before: dict[str, Any]) -> None:
    now.clear()
    now.update(before)


def _configs(model: nn.Module) -> list[Any]:
    """All configs of a model, nested ones included, each once."""
    return _parts(*(module.__dict__.get("config") for module in model.modules()))


def _parts(*configs: Any) -> list[Any]:
    """Configs and those inside them, each once."""
    from transformers.configuration_utils import PreTrainedConfig

    found: dict[int, Any] = {}

    def add(value: object) -> None:
        if isinstance(value, PreTrainedConfig) and id(value) not in found:
            found[id(value)] = value
            for inner in value.__dict__.values():
                add(inner)

    for config in configs:
        add(config)
    return list(found.values())


def load_hf_config(
    config_path: str | Path,
    batch: int,
    seq: int,
    *,
    device: str = "meta",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    overrides: dict[str, Any] | None = None,
) -> tuple[nn.Module, Made]:
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
        made = task.inputs(Asked(model, config, batch, seq))
    return model.train(), Made(made.inputs, (*notes, *made.notes))


def same_every_step(config: Any) -> tuple[str, ...]:
    """Have a model do the same in every step, as a program does, and say so."""
    found: dict[str, None] = {}
    for part in _parts(config):
        for name, value in _CHANCES.items():
            if getattr(part, name, None):
                setattr(part, name, value)
                found[f"every step does the same: {name} is taken as {value}"] = None
    return tuple(found)


def _read_config(path: Path, overrides: dict[str, Any]) -> Any:
    from transformers.models.auto import AutoConfig

    file = path / "config.json" if path.is_dir() else path
    entries = {**json.loads(file.read_text(), object_hook=_number), **overrides}
    kind = entries.pop("model_type", None)
    if kind is None:
        raise UsageError("the config has no model_type", where=str(file), hint='add "model_type": "llama"')
    config = AutoConfig.for_model(kind, **entries)
    config.architectures = config.architectures or []  # auto classes with a choice iterate over it
    return config


def _number(entries: dict[str, Any]) -> Any:
    """What transformers writes for infinity and the like, which JSON has no number for."""
    return float(entries["__float__"]) if entries.keys() == {"__float__"} else entries
