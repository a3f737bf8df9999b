"""First values of weights that a checkpoint does not have, as the model's own code draws them."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoshard.runtime.compile_once import CompilingRanks
from autoshard.runtime.module import ParallelModule
from autoshard.runtime.saving import pipe_of


@torch.no_grad()
def first_values(
    model: ParallelModule, missing: Collection[str], ranks: CompilingRanks
) -> dict[str, torch.Tensor]:
    """Values for what has none yet, whole in host memory, the same on all ranks; collective.

    transformers' ``_init_weights`` draws them in the order of `from_pretrained`, and ``reset_parameters``
    those of other modules, from the random numbers of the first rank. missing: names, the same on all ranks.
    What no such code writes, and adapters of PEFT, are left out.
    """
    here = {name: x for name, *_, x in _places(model)}
    wanted = {n for n in missing if n in here and here[n].is_meta}
    if model.is_pipeline:
        # what other stages have is a shape on meta here, also where they have values
        everywhere: list[Any] = [None] * dist.get_world_size(pipe_of(model))
        dist.all_gather_object(everywhere, json.dumps(sorted(wanted)), group=pipe_of(model))
        wanted.intersection_update(*map(json.loads, everywhere))
    if not wanted:
        return {}
    values = {n: torch.empty(here[n].shape, dtype=here[n].dtype) for n in sorted(wanted)}
    with _numbers_of_first(ranks), _in_place_of_tensors(model, values) as new:
        before = {n: x._version for n, x in new.items()}
        _initialise(model, None, set(new.values()), set())
        return {n: x.detach() for n, x in new.items() if x._version != before[n]}


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Any], str, torch.Tensor]]:
    """Name, module, its table and key of each tensor, and the tensor; a shape of what other stages have."""
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for key, x in table.items():
                result = module.__dict__.get(key) if x is None else x
                if isinstance(result, torch.Tensor):
                    yield f"{prefix}.{key}".lstrip("."), module, table, key, result


@contextmanager
def _numbers_of_first(ranks: CompilingRanks) -> Iterator[None]:
    """Inside, all ranks draw what the first one does; where one would have drawn others, it goes on there."""
    own = torch.get_rng_state()
    first = ranks.tensor_from_first(own.to(ranks.device, copy=True)).cpu()
    torch.set_rng_state(first)
    try:
        yield
    finally:
        if not torch.equal(own, first):
            torch.set_rng_state(own)


@contextmanager
def _in_place_of_tensors(
    model: nn.Module, values: Mapping[str, torch.Tensor]
) -> Iterator[dict[str, torch.Tensor]]:
    """Inside, the model has these tensors, and for all others shapes that pass for initialised."""
    places = list(_places(model))
    held = [(table, key, table[key]) for _, _, table, key, _ in places]
    shapes = [(module.__dict__, key, x) for _, module, table, key, x in places if table[key] is None]
    new: dict[str, torch.Tensor] = {}
    try:
        for attributes, key, _ in shapes:
            del attributes[key]
        for name, module, table, key, x in places:
            taken: Any = values.get(name, torch.empty(x.shape, dtype=x.dtype, device="meta"))
            if table is module._parameters:
                taken = nn.Parameter(taken, requires_grad=False)
            if name in values:
                new[name] = taken
            else:
                taken._is_hf_initialized = True  # what transformers asks
            table[key] = taken
        yield new
    finally:
        for table, key, old in held:
            table[key] = old
        for attributes, key, x in shapes:
            attributes[key] = x


def _initialise(module: nn.Module, owner: Any, wanted: set[torch.Tensor], seen: set[nn.Module]) -> None:
    """Draw what is wanted in a module, the modules inside it first.

    owner: the model of transformers that it is in. Modules without anything wanted draw nothing.
    """
    inside = {*module.parameters(), *module.buffers()}
    if module in seen or inside.isdisjoint(wanted) or _is_adapted(module):
        return
    seen.add(module)
    transformers: Any = sys.modules.get("transformers")
    owner = module if transformers and isinstance(module, transformers.PreTrainedModel) else owner
    for child in module.children():
        _initialise(child, owner, wanted, seen)
    if owner is not None:
        owner._init_weights(module)
        return
    own = {*module.parameters(recurse=False), *module.buffers(recurse=False)}
    draws: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if draws is not None and not own.isdisjoint(wanted):
        draws()


def _is_adapted(module: nn.Module) -> bool:
    """Whether PEFT has put adapters beside a layer: their first values depend on the method."""
    layers: Any = sys.modules.get("peft.tuners.tuners_utils")
    return layers is not None and isinstance(module, layers.BaseTunerLayer)
