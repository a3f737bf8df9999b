"""States of optimizers as one process has them, of parallel models and their pipeline stages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from autoshard.errors import UsageError
from autoshard.runtime.optim.layer_wise import LayerWiseOptimizer
from autoshard.runtime.optim.optimizer_hooks import local, parameters_in
from autoshard.runtime.optim.plain_steps import has_full_states
from autoshard.runtime.saving import full_here, of_all_stages, pipe_of
from autoshard.runtime.weights import ports_of
from autoshard.torch_adapters.dtensor import dtensor_like


@torch.no_grad()
def full_optimizer_state(module: Any, optimizer: Optimizer) -> dict[str, Any]:
    """The state dict of full tensors in host memory, by parameters' names, on the first rank; empty on the
    others. Collective.

    A plain model's optimizer of the same groups loads it, too. Raises UsageError, on all ranks, if the stages
    of a pipeline have unlike groups, a parameter is none of the model, or states are
    at the owners of parameters.
    """
    _check_full(optimizer)
    runner = module._autoshard
    names, state = list(_names(module, optimizer)), optimizer.state_dict()
    groups = _groups(module, optimizer)
    # of a pipeline, the first rank of each stage has its part of the state
    first_of_stage = not any(runner.coords)
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, Any] = {}
    for number, values in state["state"].items():
        for key, x in values.items():
            where = json.dumps([names[number], key])
            if not isinstance(x, torch.Tensor):
                others[where] = x
            else:
                tensors[where] = full_here(x, first_of_stage)
    if module.is_pipeline and first_of_stage:
        pipe = pipe_of(module)
        tensors = of_all_stages(tensors, pipe, runner.device)
        others = {where: x for each in _from_all(others, pipe) for where, x in each.items()}
    if not runner.is_first:
        return {}
    result: dict[str, dict[str, Any]] = {}
    for where, x in (tensors | others).items():
        name, key = json.loads(where)
        result.setdefault(name, {})[key] = x
    order = {name: k for k, name in enumerate(name for group in groups for name in group)}
    return {
        "state": {name: result[name] for name in sorted(result, key=order.__getitem__)},
        "param_groups": [
            {**group, "params": names} for group, names in zip(state["param_groups"], groups, strict=True)
        ],
    }


@torch.no_grad()
def load_full_optimizer_state(module: Any, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Give an optimizer what `full_optimizer_state`, or an optimizer of the plain model, had; the same on all
    ranks. Collective.

    Raises UsageError, on all ranks, if its groups are of other parameters.
    """
    _check_full(optimizer)
    groups = _groups(module, optimizer)
    saved = [group["params"] for group in state["param_groups"]]
    if list(map(len, groups)) != list(map(len, saved)):
        raise UsageError(
            f"the optimizer's groups have {list(map(len, groups))} parameters",
            why=f"those of the checkpoint have {list(map(len, saved))}",
            hint="make the optimizer as the run did that was saved",
        )
    # a plain model's optimizer has numbers, in the order of its groups
    names = dict(zip((k for g in saved for k in g), (n for g in groups for n in g), strict=True))
    values = {k if isinstance(k, str) else names[k]: x for k, x in state["state"].items()}
    ports = ports_of(module)
    taken: dict[int, dict[str, Any]] = {}
    for number, (name, p) in enumerate(zip(_names(module, optimizer), parameters_in(optimizer), strict=True)):
        if name in values:
            sharded = isinstance(p, DTensor) and not has_full_states(optimizer)
            port = ports[p] if sharded else None
            taken[number] = {key: _own(x, p, port) for key, x in values[name].items()}
    numbered = optimizer.state_dict()["param_groups"]
    merged = [
        {**given, "params": own["params"]} for given, own in zip(state["param_groups"], numbered, strict=True)
    ]
    optimizer.load_state_dict({"state": taken, "param_groups": merged})
    module._autoshard.clock.after_load(optimizer)


def _check_full(optimizer: Optimizer) -> None:
    if isinstance(optimizer, LayerWiseOptimizer):
        raise UsageError(
            "the states of a LayerWiseOptimizer are not gathered",
            why="each rank has those of the parameters that it owns",
            hint="save and load with autoshard.Checkpoints, or torch.distributed.checkpoint",
        )


def _own(x: Any, p: Any, port: Any) -> Any:
    """What this rank has of an entry of a state. port: of a parameter whose elements lie as the entry's."""
    if not isinstance(x, torch.Tensor):
        return x
    if port is None or not x.dim() or x.shape != p.shape:
        return x.clone()  # steps are counted in place
    runner, which = port
    return dtensor_like(p, runner.part_of(x, which).to(local(p).device, copy=True))


def _names(module: Any, optimizer: Optimizer) -> Iterator[str]:
    """Of an optimizer's parameters, in order."""
    names = {p: name for name, p in module.named_parameters()}
    for p in parameters_in(optimizer):
        if p not in names:
            raise UsageError(
                f"a parameter of this {type(optimizer).__name__} is none of the model",
                why="states are saved by the names that parameters have in the model",
                hint="make the optimizer of model.parameters(), after parallelize",
            )
        yield names[p]


def _groups(module: Any, optimizer: Optimizer) -> list[list[str]]:
    """Names in each group; of a pipeline, those of all stages, in the model's order. Collective."""
    rest = _names(module, optimizer)
    own = [[next(rest) for _ in group["params"]] for group in optimizer.param_groups]
    if not module.is_pipeline:
        return own
    tables = _from_all(own, pipe_of(module))
    if len({len(table) for table in tables}) > 1:
        raise UsageError(
            f"the stages' optimizers have {', '.join(str(len(table)) for table in tables)} groups",
            why="one process would have the same groups for the parameters of all stages",
            hint="make the same groups on all ranks, also those without parameters there",
        )
    order = {p.target: k for k, p in enumerate(module._autoshard.program.signature.ports)}
    return [
        sorted({name for group in same for name in group}, key=order.__getitem__)
        for same in zip(*tables, strict=True)
    ]


def _from_all(own: Any, group: dist.ProcessGroup) -> list[Any]:
    texts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, json.dumps(own), group=group)
    return [json.loads(text) for text in texts]
