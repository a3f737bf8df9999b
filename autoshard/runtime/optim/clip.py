"""Gradient clipping by the norm over the full model, however its parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from autoshard.errors import UsageError
from autoshard.runtime.membership import Membership, membership_of
from autoshard.runtime.optim.optimizer_hooks import local

#: gradients that lie alike: their mesh and the mesh axes that split them, and what they are to a pipeline
_Group = tuple["DeviceMesh | None", tuple[int, ...], "Membership | None"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients in place so that their norm, taken over the full model, is at most ``max_norm``.

    Takes a module, one parameter, or any iterable of parameters; DTensors with any placements and plain
    tensors may be mixed. Every rank must call it. The norm is that of the same model on one device: shards
    are summed over the mesh axes that split them, replicas count once; of a pipeline, every stage adds its
    part (each rank must then pass at least one of its parameters). One all-reduce of a few numbers per mesh
    axis that splits anything.

    Returns the norm before clipping, a scalar that is the same on every rank, float64 if all parameters are,
    else float32; 0 if nothing has a gradient. Raises UsageError for a ``norm_type`` that is not positive or a
    gradient that is a partial sum, RuntimeError (only with ``error_if_nonfinite``) if the norm is not finite.
    """
    total, locals_ = grad_norm(parameters, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"the norm of the gradients is {float(total)}, so they cannot be clipped")
    scale = clip_scale(total, max_norm)
    # parameters with the same gradient may hold it in the same memory, which is scaled once
    once = list({(g.data_ptr(), g.shape, g.stride()): g for g in locals_ if g.numel()}.values())
    for device_, dtype in {(g.device, g.dtype): None for g in once}:
        alike = [g for g in once if (g.device, g.dtype) == (device_, dtype)]
        torch._foreach_mul_(alike, scale.to(device=device_, dtype=dtype))
    return total


def clip_scale(total: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients of a norm are multiplied by so that it is at most ``max_norm``."""
    # above 1 the gradients are within the bound; multiplying by 1 saves asking the device which it is
    return (max_norm / (total + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def grad_norm(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(norm over the full model, what this rank holds of the gradients), as `clip_grad_norm_` says."""
    power = float(norm_type)
    if not power > 0:
        raise UsageError(f"norm_type is {norm_type}", why="it must be positive, or inf")
    given = _parameters(parameters)
    groups = _grouped(given)
    locals_ = [g for members in groups.values() for g in members]
    pipe = next((m.group for m in map(membership_of, given) if m is not None), None)
    if not locals_ and pipe is None:
        return torch.zeros((), dtype=_wide(given)), []
    device = _device(given, locals_)
    nothing = [torch.zeros((), dtype=torch.float64, device=device)]
    sums = torch.stack([_accumulated(members, power, device) for members in groups.values()] or nothing)
    _reduce(sums, list(groups), power)
    if pipe is not None:
        sums = _over_pipeline(sums, list(groups), power, pipe)
    total = sums.max() if power == inf else sums.sum().pow(1.0 / power)
    return total.to(_wide(given)), locals_


def _device(given: Sequence[torch.Tensor], locals_: Sequence[torch.Tensor]) -> torch.device:
    """Where ranks talk: that of the mesh, also for gradients in host memory."""
    mesh = next((p.device_mesh for p in given if isinstance(p, DTensor)), None)
    own = locals_[0].device if locals_ else given[0].device
    return own if mesh is None or mesh.device_type == own.type else torch.device(mesh.device_type)


def _parameters(parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters given, a shared one once."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    return list({id(p): p for p in parameters}.values())


def _grouped(parameters: Sequence[torch.Tensor]) -> dict[_Group, list[torch.Tensor]]:
    """What this rank holds of each gradient, by the mesh axes that split it."""
    groups: dict[_Group, list[torch.Tensor]] = {}
    for parameter in parameters:
        grad, member = parameter.grad, membership_of(parameter)
        if grad is None:
            continue
        if not isinstance(grad, DTensor):
            groups.setdefault((None, (), member), []).append(grad)
            continue
        if any(isinstance(p, Partial) for p in grad.placements):
            raise UsageError(
                f"a gradient of shape {list(grad.shape)} is a partial sum",
                where=f"placements {grad.placements}",
                hint="redistribute it before clipping",
            )
        # every placement that is neither is some form of shard, whatever torch calls it
        axes = tuple(axis for axis, p in enumerate(grad.placements) if not isinstance(p, Replicate))
        groups.setdefault((grad.device_mesh, axes, member), []).append(local(grad))
    return groups


def _over_pipeline(
    sums: torch.Tensor, keys: Sequence[_Group], power: float, pipe: dist.ProcessGroup
) -> torch.Tensor:
    """The sums of all stages; a parameter that several stages hold is counted by one of them. [2]"""
    op = dist.ReduceOp.MAX if power == inf else dist.ReduceOp.SUM
    nothing = torch.zeros((), dtype=torch.float64, device=sums.device)
    own, others = [nothing], [nothing]
    for total, (_, _, member) in zip(sums, keys, strict=False):
        if member is None:
            others.append(total)
        elif member.counts:
            own.append(total)
    staged = torch.stack(own).max() if power == inf else torch.stack(own).sum()
    dist.all_reduce(staged, op, group=pipe)
    rest = torch.stack(others).max() if power == inf else torch.stack(others).sum()
    return torch.stack([staged, rest])


def _accumulated(members: Sequence[torch.Tensor], power: float, device: torch.device) -> torch.Tensor:
    """Sum of ``|x| ** power`` over local tensors, or their largest ``|x|`` if power is infinite."""
    held = [m for m in members if m.numel()]
    if not held:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack([n.double().to(device) for n in torch._foreach_norm(held, power, dtype=_wide(held))])
    return norms.max() if power == inf else norms.pow(power).sum()


def _wide(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The type to sum in: squares of half-precision gradients leave the range of their type."""
    return torch.float64 if all(t.dtype == torch.float64 for t in tensors) else torch.float32


def _reduce(sums: torch.Tensor, keys: Sequence[_Group], power: float) -> None:
    """Complete each group's sum over the axes that split it; ``sums`` [groups] is changed in place."""
    op = dist.ReduceOp.MAX if power == inf else dist.ReduceOp.SUM
    pairs = {(mesh, axis): None for mesh, axes, _ in keys if mesh is not None for axis in axes}
    # every rank sees the same parameters in the same order, hence the same pairs in the same order
    for mesh, axis in pairs:
        # torch hands on equal meshes of other models: one group, whichever object says so
        rows = [k for k, (other, axes, _) in enumerate(keys) if other == mesh and axis in axes]
        part = sums[rows]
        dist.all_reduce(part, op, group=mesh.get_group(axis))
        sums[rows] = part
