"""Full weights of a parallel model on its first rank, which `save_pretrained` writes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.errors import UsageError
from autoshard.runtime.checks.agreement import any_rank
from autoshard.runtime.runner import Runner


@torch.no_grad()
def full_state(module: Any, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """The state dict with full tensors in host memory, on the first rank; empty on the others. Collective.

    Tied weights are one tensor. names: those alone.
    """
    runner: Runner = module._autoshard
    state: dict[str, torch.Tensor] = {}
    known: dict[int, torch.Tensor] = {}
    # of a pipeline, the first rank of each stage has its part of the model
    first_of_stage = not any(runner.coords)
    for name, x in _values(module):
        if names is not None and name not in names:
            continue
        if id(x) not in known:
            known[id(x)] = full_here(x, first_of_stage)
        state[name] = known[id(x)]
    if module.is_pipeline and first_of_stage:
        state = of_all_stages(state, pipe_of(module), runner.device)
    return state if runner.is_first else {}


def full_here(x: torch.Tensor, kept: bool) -> torch.Tensor:
    """The full tensor in host memory, apart from ``x``; collective. kept: False for an empty one."""
    full = x.full_tensor() if isinstance(x, DTensor) else x
    if not kept:
        return torch.empty(0)
    here = full.detach().cpu()
    return here.clone() if here.data_ptr() == full.data_ptr() else here  # it goes on being trained


def _values(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a state dict has, and parameters themselves, of which tied ones are one object."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, x in module.state_dict().items():
        if isinstance(x, torch.Tensor):
            yield name, parameters.get(name, x)


def pipe_of(module: Any) -> dist.ProcessGroup:
    """Of a pipeline, the ranks that differ from this one only along pp."""
    pipe: dist.ProcessGroup = module._autoshard_family.programs[0].stepper.pipe
    return pipe


def of_all_stages(
    state: dict[str, torch.Tensor], pipe: dist.ProcessGroup, device: torch.device
) -> dict[str, torch.Tensor]:
    """On the first rank along pp, the state of all; tensor by tensor."""
    ranks = dist.get_process_group_ranks(pipe)
    tables: list[Any] = [None] * len(ranks)
    table = [[n, list(x.shape), str(x.dtype).removeprefix("torch.")] for n, x in state.items()]
    dist.all_gather_object(tables, json.dumps(table), group=pipe)
    for source, text in zip(ranks[1:], tables[1:], strict=True):
        for name, shape, dtype in json.loads(text):
            if dist.get_rank() == ranks[0]:
                received = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                dist.recv(received, source, group=pipe)
                state.setdefault(name, received.cpu())
            elif dist.get_rank() == source:
                dist.send(state[name].to(device), ranks[0], group=pipe)
    return state


def saves_full(method: Callable[..., Any]) -> Callable[..., Any]:
    """A ``save_pretrained`` of which the first rank writes the full weights. Collective, unless a state dict
    is given."""

    @functools.wraps(method)
    def save(self: Any, folder: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is not None:
            return method(self, folder, *args, **kwargs)
        runner: Runner = self._autoshard
        with runner.waiting():
            state = full_state(self, _adapter_names(self, kwargs))
            problem: Exception | None = None
            if runner.is_first:
                try:
                    method(self, folder, *args, **{**kwargs, "state_dict": state})
                except Exception as error:  # raised below, when the others know of it
                    problem = error
            failed = any_rank(runner, problem is not None)
        if problem is not None:
            raise problem
        if failed:
            raise UsageError("the first rank could not save the model", hint="its message says why")

    return save


def _adapter_names(module: Any, kwargs: dict[str, Any]) -> Collection[str] | None:
    """What PEFT saves: adapters, without the model that they adapt. None for all, of other models."""
    if not hasattr(module, "peft_config") or not hasattr(module, "base_model"):
        return None
    from peft import get_peft_model_state_dict

    # which it is, it says of tensors without values
    shapes = {n: torch.empty(x.shape, dtype=x.dtype, device="meta") for n, x in _values(module)}
    known = {id(x): n for n, x in shapes.items()}
    embeddings = kwargs.get("save_embedding_layers", "auto")
    adapters = kwargs.get("selected_adapters") or list(module.peft_config)
    names: set[str] = set()
    for adapter in adapters:
        kept = get_peft_model_state_dict(
            module, state_dict=shapes, adapter_name=adapter, save_embedding_layers=embeddings
        )
        names |= {known[id(x)] for x in kept.values() if id(x) in known}
    return names
