"""Hugging Face transformers: how its models are captured, and models built from a config alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from autoshard.errors import UsageError
from autoshard.interop import experts
from autoshard.interop.late_imports import late_imports
from autoshard.interop.unfilled import Unfilled
from autoshard.torch_adapters.late import defer_unused


@contextmanager
def prepared(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """For the time of a capture of ``model(..., **kwargs)``, change what stands in the way.

    No key/value cache; attention kernels that only run on GPUs replaced by torch's; experts as products that
    need no sort over the tokens (implementations that the user registered stay); no search for packed
    sequences where eager mode makes none or finds none (without values a model cannot see that, and would
    build a mask for every pair of tokens). Does nothing if transformers was never imported, or the model
    is not one of its models.
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
            stack.enter_context(patch.object(masking, "find_packed_sequence_indices", _not_packed))
        yield


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
    from transformers.configuration_utils import PreTrainedConfig

    found: dict[int, Any] = {}

    def add(value: object) -> None:
        if isinstance(value, PreTrainedConfig) and id(value) not in found:
            found[id(value)] = value
            for inner in value.__dict__.values():
                add(inner)

    for module in model.modules():
        add(module.__dict__.get("config"))
    return list(found.values())


def load_hf_config_model(
    config_path: str | Path,
    batch: int,
    seq: int,
    *,
    device: str = "meta",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    overrides: dict[str, Any] | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """A model with a loss, and example inputs, from a ``config.json`` (or its folder).

    device: ``"meta"`` allocates nothing; ``"cpu"`` gives random weights and inputs that depend on ``seed``
    only. overrides: config entries to change first. dtype: of the weights, else what the config says.
    Returns (model in training mode, keyword arguments of its forward, labels included).
    """
    defer_unused()
    options = {} if dtype is None else {"dtype": dtype}
    with late_imports():
        config = _read_config(Path(config_path), overrides or {})
        auto = _auto_class(config)
        with torch.random.fork_rng(devices=[]), torch.device(device), Unfilled():
            torch.manual_seed(seed)
            model: nn.Module = auto.from_config(config, **options)
            inputs = _example_inputs(auto.__name__, config, batch, seq, next(model.parameters()).dtype)
    return model.train(), inputs


def _read_config(path: Path, overrides: dict[str, Any]) -> Any:
    from transformers.models.auto import AutoConfig

    file = path / "config.json" if path.is_dir() else path
    entries = {**json.loads(file.read_text()), **overrides}
    kind = entries.pop("model_type", None)
    if kind is None:
        raise UsageError("the config has no model_type", where=str(file), hint='add "model_type": "llama"')
    config = AutoConfig.for_model(kind, **entries)
    config.architectures = config.architectures or []  # auto classes with a choice iterate over it
    return config


#: end of an architecture's name -> the auto class that builds it
_BY_SUFFIX = (
    ("ForMaskedLM", "AutoModelForMaskedLM"),
    ("ForImageClassification", "AutoModelForImageClassification"),
    ("ForConditionalGeneration", "AutoModelForSeq2SeqLM"),
    ("ForCausalLM", "AutoModelForCausalLM"),
    ("LMHeadModel", "AutoModelForCausalLM"),
)


def _auto_class(config: Any) -> Any:
    from transformers.models import auto as classes

    for name in [n for end, n in _BY_SUFFIX for a in config.architectures or () if a.endswith(end)]:
        auto = getattr(classes, name)
        if type(config) in auto._model_mapping:
            return auto
    order = ["AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageClassification"]
    if getattr(config, "is_encoder_decoder", False):
        order.insert(0, "AutoModelForSeq2SeqLM")
    elif "masked" in str(config.architectures).lower() or not _is_decoder(config):
        order[:2] = reversed(order[:2])
    for name in order:
        auto = getattr(classes, name)
        if type(config) in auto._model_mapping:
            return auto
    raise UsageError(
        f"no model with a loss is known for the model type {config.model_type!r}",
        why="neither a causal, masked or sequence-to-sequence language model nor an image classifier",
        hint="build the model yourself and call capture",
    )


def _is_decoder(config: Any) -> bool:
    from transformers.models.auto import AutoModelForMaskedLM

    return type(config) not in AutoModelForMaskedLM._model_mapping


def _example_inputs(auto: str, config: Any, batch: int, seq: int, dtype: torch.dtype) -> dict[str, Any]:
    if auto == "AutoModelForImageClassification":
        size = getattr(config, "image_size", None) or 224  # some models take images of any size
        height, width = (size, size) if isinstance(size, int) else size
        pixels = torch.rand((batch, config.num_channels, height, width), dtype=dtype)
        return {"pixel_values": pixels, "labels": torch.randint(0, config.num_labels, (batch,))}
    vocabulary = config.get_text_config().vocab_size
    tokens = torch.randint(0, vocabulary, (batch, seq))
    if auto == "AutoModelForSeq2SeqLM":
        return {"input_ids": tokens, "labels": torch.randint(0, vocabulary, (batch, seq))}
    return {"input_ids": tokens, "labels": tokens.clone()}
