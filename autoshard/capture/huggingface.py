"""Hugging Face transformers: how its models are captured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard.capture import hf_attention, hf_experts
from autoshard.torch_adapters.replaced import replaced

#: what a capture decides itself in a config
_DECIDED = ("use_cache", "_attn_implementation_internal", "_experts_implementation_internal")


@contextmanager
def prepared(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[list[tuple[Any, str]]]:
    """For the time of a capture of ``model(..., **kwargs)``, change what stands in the way.

    No key/value cache; attention kernels that only run on GPUs replaced by torch's, sinks by what does not
    write scores out (`capture.hf_attention`); experts as products that need no sort over the tokens
    (implementations that the user registered stay); no search for packed sequences, and no mask where none is
    given, where eager mode makes none (without values a model cannot see that, and would build a mask for
    every pair of tokens). Does nothing if transformers was never imported, or the model is not one of its
    models. Gives the (config, attribute) pairs that it decides, whatever they were.
    """
    configs = _configs(model) if "transformers" in sys.modules else []
    with ExitStack() as stack:
        caching = kwargs.get("use_cache", any(getattr(c, "use_cache", False) for c in configs))
        for config in configs:
            stack.callback(_restore, config.__dict__, dict(config.__dict__))
            if getattr(config, "use_cache", False):
                config.use_cache = False
        if configs and hf_attention.choose(model, configs):
            stack.enter_context(hf_attention.registered())
        _lift_experts(configs, stack)
        # the search is made on models without a cache, and positions that a model makes itself never pack
        masking = sys.modules.get("transformers.masking_utils")
        packs = "position_ids" in kwargs and not caching
        if configs and not packs and hasattr(masking, "find_packed_sequence_indices"):
            stack.enter_context(replaced(masking, "find_packed_sequence_indices", _not_packed))
        # before 5.19 a causal mask is written out in every trace, also where no mask was given
        if configs and masking is not None and hasattr(masking, "is_tracing"):
            stack.enter_context(replaced(masking, "is_tracing", partial(_traced_mask, masking.is_tracing)))
        yield [(config, name) for config in configs for name in _DECIDED]


def _lift_experts(configs: list[Any], stack: ExitStack) -> None:
    """Have transformers' experts call our op until the stack is closed."""
    moe = sys.modules.get("transformers.integrations.moe")
    interface = getattr(moe, "ALL_EXPERTS_FUNCTIONS", None)
    if interface is None or not configs:
        return
    stack.enter_context(hf_experts.registered(interface))
    for config in configs:
        # quantised experts look their implementation up in a table of their own
        known = config.__dict__.get("_experts_implementation_internal", "") in hf_experts.KNOWN
        if known and getattr(config, "quantization_config", None) is None:
            config._experts_implementation_internal = hf_experts.NAME


def _not_packed(position_ids: torch.Tensor) -> None:
    return None


def _traced_mask(is_tracing: Callable[..., bool], mask: torch.Tensor | None = None) -> bool:
    return mask is not None and is_tracing(mask)


def _restore(now: dict[str, Any], before: dict[str, Any]) -> None:
    now.clear()
    now.update(before)


def _configs(model: nn.Module) -> list[Any]:
    """All configs of a model, nested ones included, each once."""
    return configs_in(*(module.__dict__.get("config") for module in model.modules()))


def configs_in(*configs: Any) -> list[Any]:
    """Configs and those inside them, each once."""
    from transformers.configuration_utils import PreTrainedConfig

    result: dict[int, Any] = {}

    def add(value: object) -> None:
        if isinstance(value, PreTrainedConfig) and id(value) not in result:
            result[id(value)] = value
            for inner in value.__dict__.values():
                add(inner)

    for config in configs:
        add(config)
    return list(result.values())
