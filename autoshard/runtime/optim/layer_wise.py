"""Optimizers that need full parameters, as Shampoo and SOAP do, on sharded ones: each runs at one rank.

What Megatron Core's LayerWiseDistributedOptimizer does, for parameters of any placements: gradient and
parameter come to an owner, which has the state and makes the step, and the parameter goes back in parts.

Gupta et al., "Shampoo: Preconditioned Stochastic Tensor Optimization", ICML 2018; Vyas et al., "SOAP:
Improving and Stabilizing Shampoo using Adam", 2409.11321.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.errors import UsageError
from autoshard.runtime.optim.optimizer_hooks import local, loss_of, options_in, parameters_in
from autoshard.runtime.optim.owners import SharedTensors
from autoshard.torch_adapters.blocks import part_at
from autoshard.torch_adapters.dtensor import batch_like

#: of a group, what is no option
#: in the state of a parameter, options that its optimizer changed by itself, as counters
_OPTIONS = "param_group"
#: in a state dict, instead of the state of a parameter that another rank owns; empty, so that checkpoints,
#: which have what is in dicts, know nothing of it
_AT_OWNER: Mapping[str, Any] = MappingProxyType({"at_owner": {}})


@dataclass(frozen=True)
class _Owned:
    """What updates a parameter that this rank owns.

    full: stands for it; has values during a step only. given: the options of the group, as `optimizer` was
    given them. batch: the parameter, if this rank owns some of its matrices, and others the rest.
    """

    full: nn.Parameter
    optimizer: torch.optim.Optimizer
    given: dict[str, Any]
    batch: DTensor | None = None

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Give the optimizer what was changed since; what it changed by itself stays."""
        for key, x in options.items():
            if key not in self.given or not _same(x, self.given[key]):
                self.given[key] = self.optimizer.param_groups[0][key] = x

    def step(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The parameter after a step; x: before, which may be changed in place."""
        stand_in = self.full.data
        self.full.data = x
        if grad.dtype != x.dtype:
            self.full.grad_dtype = grad.dtype
        self.full.grad = grad.view(x.shape)
        self.optimizer.step()
        new, self.full.data, self.full.grad = self.full.data, stand_in, None
        return new

    def state(self) -> dict[str, Any]:
        """Of its optimizer, with the options that this changed. Of some matrices of a batch as DTensors, by
        which checkpoints know which they are."""
        options = options_in(self.optimizer.param_groups[0])
        changed = {k: x for k, x in options.items() if k not in self.given or not _same(x, self.given[k])}
        state: dict[str, Any] = self.optimizer.state.get(self.full, {})
        if self.batch is not None:
            state = pytree.tree_map_only(torch.Tensor, self._as_dtensor, state)
        return {**state, _OPTIONS: changed} if changed else state

    def _as_dtensor(self, x: torch.Tensor) -> torch.Tensor:
        assert self.batch is not None
        return batch_like(self.batch, x) if x.dim() and len(x) == len(self.full) else x

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's of an entry of a state, which may be of all matrices."""
        batch = self.batch
        if batch is None or not x.dim() or isinstance(x, DTensor) or len(x) != len(batch):
            return local(x)
        place = batch.device_mesh.get_coordinate()
        assert place is not None
        return part_at(x.shape, batch.device_mesh.shape, batch.placements, place).read(x)

    def load(self, state: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """What `state` gave, and the options of the group."""
        rest = {
            k: pytree.tree_map_only(torch.Tensor, self._part, x) for k, x in state.items() if k != _OPTIONS
        }
        group = {**options, "params": [0]}
        self.optimizer.load_state_dict({"state": {0: rest} if rest else {}, "param_groups": [group]})
        self.given.clear()
        self.given.update(
            options_in(self.optimizer.param_groups[0])
        )  # with defaults that the loaded ones lack
        self.optimizer.param_groups[0].update(state.get(_OPTIONS, {}))


class LayerWiseOptimizer(torch.optim.Optimizer):
    """Steps any torch optimizer on full parameters, each at the one rank that owns it.

    An owner has the state of its parameters; the others have none. Parameters that a rank has to itself, and
    plain tensors, are updated in place. Options of the groups may change before any step, as schedulers do.

    Every parameter has an optimizer of its own. One that looks at several at once (norms of all gradients,
    optimizers that are distributed themselves) is not for this. `make` is called on all ranks for groups of
    parameters without values, to learn the options.

    Args:
        params: parameters, or groups of them: DTensors of any placements, also FSDP2's, or plain tensors.
            The same ones in the same order on all ranks that share them.
        make: the optimizer, given groups, as ``lambda groups: SOAP(groups, lr=3e-3)``.
        batched: whether it treats [experts, rows, columns] as that many matrices, none of which depends on
            another. Those that are divided by number, and have no replicas, are then not sent.

    Raises:
        UsageError: `make` gives something else than an optimizer of the parameters that it was given.
    """

    def __init__(
        self,
        params: Iterable[Any],
        make: Callable[[list[Any]], torch.optim.Optimizer],
        *,
        batched: bool = False,
    ) -> None:
        self._make = make
        self._tensors = SharedTensors(_cost, batched=batched)
        self._owned: dict[torch.Tensor, _Owned] = {}
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As that of a torch optimizer; the same on all ranks that share its parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        stand_ins = [_stand_in(p, p.shape) for p in group["params"]]
        optimizer = self._create({**options_in(group), "params": stand_ins})
        group.update(options_in(optimizer.param_groups[0]))
        if len(self.param_groups) == 1:
            self.defaults = dict(optimizer.defaults)

    def _create(self, group: dict[str, Any]) -> torch.optim.Optimizer:
        params, optimizer = group["params"], self._make([group])
        is_one = isinstance(optimizer, torch.optim.Optimizer)
        groups = optimizer.param_groups if is_one else []
        if len(groups) != 1 or [id(p) for p in groups[0]["params"]] != [id(p) for p in params]:
            kind = type(optimizer).__name__
            raise UsageError(
                f"make gives a {kind} of {len(groups)} groups" if is_one else f"make gives a {kind}",
                why="it is given a group, and needs an optimizer of that group alone",
                hint="make=lambda groups: SOAP(groups, lr=3e-3)",
            )
        return optimizer

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what the closure does. Collective over the ranks that share parameters.

        Parameters without a gradient stay as they are. Raises UsageError if a gradient lies otherwise than
        its parameter.
        """
        loss = loss_of(closure)
        self._tensors.assign_owners(parameters_in(self))
        given = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        values = [[_gradient(p), local(p)] for p, _ in given]

        def stepped(number: int, full: list[torch.Tensor]) -> torch.Tensor:
            owned = self._owner_of(*given[number])
            owned.update_options(options_in(given[number][1]))
            return owned.step(*full)

        for number, new in self._tensors.computed([p for p, _ in given], values, stepped):
            mine = local(given[number][0])
            if new.data_ptr() != mine.data_ptr():
                mine.copy_(new.view(mine.shape))
            else:  # of which autograd knows nothing
                increment_version(mine)
        for p, _ in given:
            # an entry for all: torch takes an optimizer without any for one that has made no step
            self.state[p] = self._owned[p].state() if p in self._owned else {}
        return loss

    def _is_owner(self, p: torch.Tensor) -> bool:
        tensor = self._tensors.of(p)
        return tensor is None or tensor.owner == tensor.me

    def _owner_of(self, p: torch.Tensor, group: Mapping[str, Any]) -> _Owned:
        if p not in self._owned:
            tensor, options = self._tensors.of(p), options_in(group)
            full = _stand_in(p, local(p).shape if tensor is None else tensor.shape)
            batch = p if isinstance(p, DTensor) and self._tensors.is_divided(p) else None
            optimizer = self._create({**options, "params": [full]})
            self._owned[p] = _Owned(full, optimizer, options, batch)
        return self._owned[p]

    def state_dict(self) -> dict[str, Any]:
        """As that of the optimizer made, with the states of parameters that this rank owns.

        `torch.distributed.checkpoint` saves those of all ranks, and loads those of each.
        """
        result: dict[str, Any] = super().state_dict()
        if result["state"]:
            order = parameters_in(self)
            states = {k: result["state"].get(k, {}) for k, p in enumerate(order) if self._is_owner(p)}
            others = {k: copy.deepcopy(dict(_AT_OWNER)) for k in result["state"] if k not in states}
            result["state"] = dict(sorted((states | others).items()))
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or that of the optimizer made on one process has; not collective.

        States of parameters that other ranks own are left out.

        Raises:
            UsageError: the state of a parameter that this rank owns is not there.
        """
        self._tensors.assign_owners(parameters_in(self))
        states = state_dict["state"]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        mine = {p: key for key, p in zip(keys, parameters_in(self), strict=False) if self._is_owner(p)}
        self._check_there(states, mine)
        super().load_state_dict({**state_dict, "state": {}})
        for group in self.param_groups:
            for p in group["params"]:
                if p in mine:
                    self._owner_of(p, group).load(states.get(mine[p], {}), options_in(group))
                    if mine[p] in states:
                        self.state[p] = self._owned[p].state()
                elif states:
                    self.state[p] = {}

    def _check_there(self, states: Mapping[Any, Any], mine: Mapping[torch.Tensor, Any]) -> None:
        """mine: parameters that this rank owns -> their keys in the states."""
        trained = any(state and state != _AT_OWNER for state in states.values())
        for p, key in mine.items():
            absent = trained and p.requires_grad and key not in states
            if absent or states.get(key) == _AT_OWNER:
                why = "there are states of others" if absent else "the rank that saved did not own it"
                raise UsageError(
                    f"the state of parameter {self._name(p, key)}, shape {list(p.shape)}, is not there",
                    why=f"this rank owns it; {why}",
                    hint="save and load with torch.distributed.checkpoint, or autoshard.Checkpoints",
                )

    def _name(self, p: torch.Tensor, key: Any) -> str:
        names = {
            id(q): name
            for group in self.param_groups
            for q, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }
        return str(names.get(id(p), key))

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(
            "a LayerWiseOptimizer cannot be copied or pickled",
            why="the function that makes its optimizers, and their states, belong to its parameters",
            hint="make another one, and load this one's state_dict()",
        )


def _cost(shape: Sequence[int]) -> int:
    """Of what is computed for a tensor, up to a factor: products with a matrix of each of its last dims."""
    return prod(shape) * (sum(shape[-2:]) if len(shape) > 1 else 1)


def _same(one: Any, other: Any) -> bool:
    """Whether an option is as it was; tensors are changed in place, for all who have them."""
    if one is other:
        return True
    return not isinstance(one, torch.Tensor) and type(one) is type(other) and bool(one == other)


def _stand_in(p: torch.Tensor, shape: Sequence[int]) -> nn.Parameter:
    """A parameter that takes no memory."""
    mine = local(p)
    return nn.Parameter(mine.new_empty(()).expand(tuple(shape)), requires_grad=p.requires_grad)


def _gradient(p: torch.Tensor) -> torch.Tensor:
    """This rank's part of it."""
    grad = p.grad
    assert grad is not None
    where = grad.placements if isinstance(grad, DTensor) else None
    if isinstance(p, DTensor) and where != p.placements:
        raise UsageError(
            f"a gradient lies as {where}, its parameter as {p.placements}",
            why="owners put gradients together as they do parameters",
            hint="p.grad = p.grad.redistribute(placements=p.placements)",
        )
    return local(grad)
