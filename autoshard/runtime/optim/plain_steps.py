"""Steps of torch's optimizers on plain tensors.

Those that treat every element by itself run on a rank's parts, without what DTensor takes for each op; some
have no other way. Adafactor, which takes means over rows and columns, runs on full parameters, one at a time;
its states are those of full parameters, alike on all ranks.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from autoshard.errors import UsageError
from autoshard.runtime.optim.dropout_clock import is_followed
from autoshard.runtime.optim.optimizer_hooks import local, parameters_in
from autoshard.torch_adapters.dtensor import dtensor_like
from autoshard.torch_adapters.step_hooks import after_steps, before_steps

if TYPE_CHECKING:
    from autoshard.ir.joint import Port
    from autoshard.runtime.runner import Runner

    #: parameters of a model, with what knows their parts
    Ports = Mapping[torch.Tensor, tuple[Runner, Port]]

_FULL = (torch.optim.Adafactor,)
#: where transformers has its own
_TRANSFORMERS = ("transformers.optimization", "Adafactor")
#: that treat every element by itself
_BY_ELEMENT = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def _kind(optimizer: Optimizer) -> Literal["", "parts", "full"]:
    cls = type(optimizer)
    if cls in _FULL or (cls.__module__, cls.__qualname__) == _TRANSFORMERS:
        return "full"
    return "parts" if cls in _BY_ELEMENT else ""


def has_full_states(optimizer: Optimizer) -> bool:
    """Whether its states are those of full parameters, alike on all ranks."""
    return _kind(optimizer) == "full"


def _has_no_other_way(optimizer: Optimizer) -> bool:
    """Whether DTensor stops it."""
    cls = type(optimizer)
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return (
        cls not in _BY_ELEMENT
        or cls is torch.optim.Rprop
        or (fused and cls in (torch.optim.SGD, torch.optim.Adagrad))
    )


def _why_not(optimizer: Optimizer, args: Any, kwargs: Any) -> str:
    """What needs the optimizer's own step, "" for nothing."""
    # args[0] is the optimizer
    if len(args) > 1 or kwargs.get("closure") is not None:
        return "a closure"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "hooks around its step"
    return "differentiable=True" if any(g.get("differentiable") for g in optimizer.param_groups) else ""


def run_plain_steps(model: nn.Module, ports: Callable[[nn.Module], Ports]) -> None:
    """From now on, for steps of any such optimizer on parameters of the model.

    Uses torch's hooks around optimizer steps, which go away with the model: the step is made before, and the
    optimizer's own finds no gradients. ports: of the model's parameters now.
    """
    taken: WeakKeyDictionary[Optimizer, list[tuple[DTensor, torch.Tensor]]] = WeakKeyDictionary()
    owner = ref(model)

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        kind, module = _kind(optimizer), owner()
        if not kind or module is None:
            return
        # of any parallel model: whose hook comes first leaves no gradients to the others
        mine = [
            (p, p.grad)
            for p in parameters_in(optimizer)
            if isinstance(p, DTensor) and p.grad is not None and is_followed(p)
        ]
        if mine and kind == "full":
            known = ports(module)
            mine = [(p, grad) for p, grad in mine if p in known]
        if not mine:
            return
        why_not = _why_not(optimizer, args, kwargs)
        if why_not and not _has_no_other_way(optimizer):
            return
        if why_not:
            raise UsageError(
                f"{type(optimizer).__name__} has {why_not}",
                why="on sharded parameters its step is made on plain tensors, before it is called",
                hint="do what that does before or after step()",
            )
        with torch.no_grad():
            if kind == "parts":
                _step_parts(optimizer, mine)
            else:
                for p, _ in mine:
                    _step_full(optimizer, p, *known[p])
        taken[optimizer] = mine
        for p, _ in mine:
            p.grad = None
            increment_version(p)  # a call whose backward is yet to come sees that it was changed

    def after(optimizer: Optimizer, *_: Any) -> None:
        for p, grad in taken.pop(optimizer, ()):
            p.grad = grad

    before_steps(model, before)
    after_steps(model, after)


def _step_parts(optimizer: Optimizer, mine: list[tuple[DTensor, torch.Tensor]]) -> None:
    plain: dict[DTensor, nn.Parameter] = {}
    for p, grad in mine:
        plain[p] = nn.Parameter(local(p))
        plain[p].grad = local(grad)
    given = {
        q: {key: local(x) if isinstance(x, DTensor) else x for key, x in optimizer.state[p].items()}
        for p, q in plain.items()
    }
    states = _stepped(optimizer, plain, {q: dict(state) for q, state in given.items()})
    for p, q in plain.items():
        for key, x in states[q].items():
            if x is not given[q].get(key):  # others were changed in place
                of_elements = isinstance(x, torch.Tensor) and x.dim() and x.shape == q.shape
                optimizer.state[p][key] = dtensor_like(p, x) if of_elements else x


def _step_full(optimizer: Optimizer, p: DTensor, runner: Runner, port: Port) -> None:
    assert isinstance(p.grad, DTensor)
    q = nn.Parameter(p.full_tensor().detach().clone())
    q.grad = p.grad.full_tensor()
    optimizer.state[p] = _stepped(optimizer, {p: q}, {q: optimizer.state[p]})[q]
    local(p).copy_(runner.part_of(q, port))


def _stepped(
    optimizer: Optimizer, plain: Mapping[DTensor, nn.Parameter], states: Mapping[torch.Tensor, Any]
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
