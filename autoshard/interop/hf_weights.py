"""How transformers names and converts the weights of its checkpoints. Tried with transformers 5.24.

Not its documented API: `core_model_loading` and `conversion_mapping`, which `from_pretrained` goes by.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class Conversion:
    """Weights of a model from those of a checkpoint. transform: of transformers; None for the same tensor."""

    sources: list[str] = field(default_factory=list)
    transform: Any = None
    #: of transformers, that each source matched
    patterns: list[str] = field(default_factory=list)

    def targets(self, first: str) -> list[str]:
        """Names of the model that are made. first: of them."""
        if self.transform is None:
            return [first]
        ends = self.transform.target_patterns
        return [first, *(first.replace(ends[0], other) for other in ends[1:])]

    def convert(
        self, model: nn.Module, target: str, read: Callable[[str], torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names of the model and their tensors. target: the first of them."""
        if self.transform is None:
            yield target, read(self.sources[0])
            return
        # a copy, as it gathers what it converts
        converted = copy.deepcopy(self.transform)
        for source, pattern in zip(self.sources, self.patterns, strict=True):
            converted.add_tensor(target, source, pattern, lambda name=source: read(name))
        config: Any = getattr(model, "config", None)
        for name, x in converted.convert(target, model=model, config=config).items():
            yield name, x[0] if isinstance(x, list) else x

    def add(self, source: str, pattern: str | None) -> None:
        self.sources.append(source)
        self.patterns.append(pattern or source)


def conversions(model: nn.Module, known: Iterable[str], given: Iterable[str]) -> dict[str, Conversion]:
    """How each weight is made from a checkpoint.

    Args:
        known: names of the model's parameters and buffers.
        given: names in the checkpoint.

    Returns first name of the model -> conversion, also of names that the model does not know.
    """
    import transformers

    there: Mapping[str, bool] = dict.fromkeys(known, True)
    table: dict[str, Conversion] = {}
    if not isinstance(model, transformers.PreTrainedModel):
        for name in given:
            table[name] = Conversion([name])
        return table
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix = model.base_model_prefix
    for name in sorted(given, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, there)
        if target not in there and name in there:
            target, pattern = rename_source_key(name, [], [], prefix, there)
        each = table.setdefault(
            target, Conversion(transform=None if pattern is None else of_pattern[pattern])
        )
        each.add(name, pattern)
    return table


@torch.no_grad()
def fill_buffers(model: nn.Module) -> None:
    """Buffers on meta that no checkpoint has (rotary frequencies, position ids) get their values from what
    transformers initialises weights with."""
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not any(x.is_meta for x in model.buffers()):
        return
    owners = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, transformers.PreTrainedModel)
    }
    for name, module in model.named_modules():
        missing = [
            key
            for key, x in module._buffers.items()
            if x is not None and x.is_meta and key in module._non_persistent_buffers_set
        ]
        owner = next((owners[n] for n in _from_inside(name) if n in owners), None)
        if not missing or owner is None or not all(p.is_meta for p in module.parameters(recurse=False)):
            continue
        before = {key: torch.full_like(module._buffers[key], -1, device="cpu") for key in missing}
        for key, x in before.items():
            module._buffers[key] = x
        versions = {key: x._version for key, x in before.items()}
        owner._init_weights(module)
        for key, x in before.items():
            if module._buffers[key] is x and x._version == versions[key]:
                # it does not know of this one: no values are better than wrong ones
                module._buffers[key] = torch.empty_like(x, device="meta")


def _from_inside(name: str) -> Iterator[str]:
    """A module's name and those that it is in, the root last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
