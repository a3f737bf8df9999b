"""Steps of optimizers that torch's DTensor has no way to run: on plain tensors instead.

Those that treat every element by itself run on a rank's parts. Adafactor, which takes means over rows and
columns, runs on full parameters, one at a time; its states are those of full parameters, alike on all ranks.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autoshard.errors import UsageError
from autoshard.runtime.optim.optimizer_hooks import local
from autoshard.torch_adapters.dtensor import dtensor_like

if TYPE_CHECKING:
    from autoshard.ir.joint import Port
    from autoshard.runtime.runner import Runner

    #: parameters of a model, with what knows their parts
    Ports = Mapping[nn.Parameter, tuple[Runner, Port]]

_FULL = (torch.optim.Adafactor,)
#: where transformers has its own
_TRANSFORMERS = ("transformers.optimization", "Adafactor")
_PARTS = (torch.optim.Rprop,)
#: of which the fused form alone has no way
_FUSED = (torch.optim.SGD, torch.optim.Adagrad)


def _kind(optimizer: Optimizer) -> Literal["", "parts", "full"]:
    cls = type(optimizer)
    if cls in _FULL or (cls.__module__, cls.__qualname__) == _TRANSFORMERS:
        return "full"
    fused = cls in _FUSED and any(group.get("fused") for group in optimizer.param_groups)
    return "parts" if cls in _PARTS or fused else ""


def run_plain_steps(model: nn.Module, ports: Callable[[nn.Module], Ports]) -> None:
    """From now on, for steps of any such optimizer on parameters of the model.

    Uses torch's hooks around optimizer steps, which go away with the model: the step is made before, and the
    optimizer's own finds no gradients. ports: of the model's parameters now.
    """
    taken: WeakKeyDictionary[Optimizer, list[tuple[torch.Tensor, torch.Tensor]]] = WeakKeyDictionary()
    owner = ref(model)

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        kind, module = _kind(optimizer), owner()
        if not kind or module is None:
            return
        known = ports(module)
        mine = [p for g in optimizer.param_groups for p in g["params"] if p in known and p.grad is not None]
        if not mine:
            return
        # args[0] is the optimizer
        if len(args) > 1 or kwargs.get("closure") is not None:
            raise UsageError(
                f"{type(optimizer).__name__} steps with a closure on sharded parameters",
                why="its step is made on plain tensors, before it is called",
                hint="call backward, then step()",
            )
        with torch.no_grad():
            if kind == "parts":
                _step_parts(optimizer, mine)
            else:
                for p in mine:
                    _step_full(optimizer, p, *known[p])
        taken[optimizer] = [(p, p.grad) for p in mine]
        for p in mine:
            p.grad = None

    def after(optimizer: Optimizer, *_: Any) -> None:
        for p, grad in taken.pop(optimizer, ()):
            p.grad = grad

    for hook in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)):
        finalize(model, hook.remove)


def _step_parts(optimizer: Optimizer, mine: list[nn.Parameter]) -> None:
    plain = {p: nn.Parameter(local(p)) for p in mine}
    for p, q in plain.items():
        assert p.grad is not None
        q.grad = local(p.grad)
    states: dict[torch.Tensor, Any] = {
        q: {key: local(x) if isinstance(x, DTensor) else x for key, x in optimizer.state[p].items()}
        for p, q in plain.items()
    }
    found = _stepped(optimizer, plain, states)
    for p, q in plain.items():
        for key, x in found[q].items():
            of_elements = isinstance(x, torch.Tensor) and x.dim() and x.shape == q.shape
            if not of_elements or key not in optimizer.state[p]:
                optimizer.state[p][key] = dtensor_like(p, x) if of_elements else x  # type: ignore[arg-type]


def _step_full(optimizer: Optimizer, p: nn.Parameter, runner: Runner, port: Port) -> None:
    assert isinstance(p, DTensor) and isinstance(p.grad, DTensor)
    q = nn.Parameter(p.full_tensor().detach().clone())
    q.grad = p.grad.full_tensor()
    optimizer.state[p] = _stepped(optimizer, {p: q}, {q: optimizer.state[p]})[q]
    local(p).copy_(runner.part_of(q, port))


def _stepped(
    optimizer: Optimizer, plain: Mapping[nn.Parameter, nn.Parameter], states: Mapping[torch.Tensor, Any]
) -> Any:
    """The states after a step of an optimizer of the same kind. plain: in place of its parameters."""
    other = copy.copy(optimizer)  # without hooks, and without what schedulers put on the instance
    other.state = defaultdict(dict, dict(states))
    other.param_groups = [
        {**group, "params": [plain[p] for p in group["params"] if p in plain]}
        for group in optimizer.param_groups
    ]
    for name in ("grad_scale", "found_inf"):  # of torch's GradScaler
        if hasattr(optimizer, name):
            setattr(other, name, getattr(optimizer, name))
    other.step()
    return other.state
