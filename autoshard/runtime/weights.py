"""Values of a parallel model's parameters and buffers: each rank keeps its part of what it is given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.errors import UsageError
from autoshard.ir.joint import Port
from autoshard.ir.placement import local_shape
from autoshard.runtime.checks.agreement import any_rank, hash_of
from autoshard.runtime.fingerprint import fingerprint
from autoshard.runtime.groups import all_equal
from autoshard.runtime.optim.follow_parameters import follow_parameters
from autoshard.runtime.optim.optimizer_hooks import keep_blocks, local
from autoshard.runtime.runner import Runner
from autoshard.torch_adapters.dtypes import torch_dtype
from autoshard.torch_adapters.hooks import carry_tensor_hooks

if TYPE_CHECKING:
    from autoshard.runtime.module import ParallelModule


def fill(module: ParallelModule, values: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Give parameters and buffers their values.

    Args:
        values: name, global tensor, one after the other. Names that are tied to others count for all of them;
            those of other pipeline ranks are left.
    """
    table = _Table(module)
    for name, full in values:
        table.set(name, full)
    table.follow()


def to_empty(module: ParallelModule) -> None:
    """Give all that is on the meta device memory, of which a call is refused until it is written."""
    table = _Table(module)
    for name, tensor in table.tensors.items():
        if tensor.is_meta:
            table.set(name, None)
    table.follow()
    fresh = {n: x for n, x in _Table(module).tensors.items() if table.tensors[n].is_meta}
    module._autoshard_family.unwritten = {n: _writes(x) for n, x in fresh.items()}


def ports_of(module: nn.Module) -> dict[torch.Tensor, tuple[Runner, Port]]:
    """Of each parameter that this rank has a part of, a program that it is in, and where."""
    table = _Table(module)
    return {
        x: table.ports[table.tied.get(name, name)]
        for name, x in table.tensors.items()
        if isinstance(x, DTensor)
    }


def check_written(module: nn.Module) -> None:
    """UsageError if a parameter or a buffer has no values yet."""
    before: Mapping[str, object] = module._autoshard_family.unwritten  # type: ignore[union-attr, assignment]
    for name, x in _Table(module).tensors.items():
        if x.is_meta or (name in before and before[name] == _writes(x)):
            raise UsageError(
                f"{name} has no values",
                why="the model was built on the meta device, and nothing was loaded into it",
                hint='autoshard.load_weights(model, "FOLDER"); of a buffer that no checkpoint has: '
                "accelerate.init_empty_weights() leaves buffers their values",
            )


def check_replicas(module: nn.Module) -> None:
    """UsageError, on all ranks, if ranks that have the same parts of weights have other values; collective.

    Of weights that a model on the meta device was given: ranks may have read other files, or drawn other
    numbers.
    """
    table = _Table(module)
    runner = table.runners[0]
    differ = []
    for axis in range(runner.mesh.ndim):
        alike = [
            local(x)
            for _, x in sorted(table.tensors.items())
            if isinstance(x, DTensor) and x.placements[axis].is_replicate()
        ]
        if not all_equal([runner.mesh.get_group(axis)], hash_of(*alike), runner.device):
            differ.append(runner.shape.names[axis])
    if any_rank(runner, bool(differ)):
        raise UsageError(
            f"ranks have different weights{' along ' + ', '.join(differ) if differ else ''}",
            why="what was loaded or drawn into the model is not the same on all ranks",
            hint="load the same files on all ranks, or set one seed before weights are drawn",
        )


def _writes(x: torch.Tensor) -> tuple[int, int]:
    """Another pair after whatever is written."""
    version = x._version + local(x)._version if isinstance(x, DTensor) else x._version
    return version, int(fingerprint(local(x)))


def _empty_part(runner: Runner, port: Port) -> torch.Tensor:
    shape = local_shape(port.type.shape, runner.layout(port), runner.shape.sizes, runner.coords)
    return torch.empty(shape, dtype=torch_dtype(port.stored_dtype), device=runner.device)


class _Table:
    """The tensors of a module by name, and what stands in their place."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.runners: list[Runner] = [bound.runner for bound in module._autoshard_family.programs]
        self.device = self.runners[0].device
        self.ports = {p.target: (r, p) for r in reversed(self.runners) for p in r.params}
        self.tied = {alias: owner for r in self.runners for alias, owner in r.program.signature.tied}
        self.tensors: dict[str, torch.Tensor] = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        self._names: dict[int, list[str]] = defaultdict(list)
        for name, x in self.tensors.items():
            self._names[id(x)].append(name)
        self._new: dict[nn.Parameter, nn.Parameter] = {}

    @torch.no_grad()
    def set(self, name: str, full: torch.Tensor | None) -> None:
        """Values of a tensor, in place where it has some; None for memory without values."""
        old = self.tensors.get(name)
        if old is None or old in self._new:
            return
        if isinstance(old, DTensor):
            runner, port = self.ports[self.tied.get(name, name)]
            part = _empty_part(runner, port) if full is None else runner.part_of(full, port)
            new: torch.Tensor = runner.parameter_as(part, runner.layout(port), port.type.shape)
        else:
            like = torch.empty_like(old, device=self.device)
            new = like if full is None else like.copy_(full)
        if not old.is_meta:
            old.copy_(new)
            return
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
            carry_tensor_hooks(old, new)
            self._new[old] = new
        for each in self._names[id(old)]:
            owner, _, key = each.rpartition(".")
            setattr(self.module.get_submodule(owner), key, new)

    def follow(self) -> None:
        """Optimizers and pipeline stages go on with the parameters that the module has now."""
        if not self._new:
            return
        self.module._autoshard_family.filled = True
        follow_parameters(self.module, self._new)
        keep_blocks(self.module)
        self.runners[0].clock.follow(self._new.values())
        for bound in self.module._autoshard_family.programs:
            members = bound.stepper.members
            members[:] = [(self._new.get(p, p), membership) for p, membership in members]
