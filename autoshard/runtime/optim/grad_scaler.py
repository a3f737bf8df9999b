"""Loss scaling: whether any rank of a model has found an infinity in its gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.errors import UsageError
from autoshard.ir.placement import Shard
from autoshard.runtime.membership import membership_of
from autoshard.runtime.optim.optimizer_hooks import local, parameters_in

if TYPE_CHECKING:
    from autoshard.runtime.runner import Runner


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler for parallel models, pipelines among them; every rank calls every method.

    Of a model that is not a pipeline, torch's own does the same. Of a pipeline, whose `train_step` runs
    backward, `GradScaler.train_step` scales the loss::

        loss = scaler.train_step(model, batch)
        scaler.step(optimizer)
        scaler.update()
    """

    def train_step(self, model: nn.Module, batch: Any = None, /, **kwargs: Any) -> torch.Tensor:
        """``model.train_step`` with gradients of the loss times the scale; returns the loss itself.

        batch, kwargs: as of ``model.train_step``. Raises UsageError for a model that has none.
        """
        runner, step = getattr(model, "_autoshard", None), getattr(model, "train_step", None)
        if runner is None or step is None:
            raise UsageError(
                f"a {type(model).__name__} has no train_step",
                why="it is not a parallel model",
                hint="call scaler.scale(loss).backward()",
            )
        runner.loss_scale = self.scale(torch.ones((), dtype=torch.float32, device=runner.device))
        try:
            loss: torch.Tensor = step(batch, **kwargs)
        finally:
            runner.loss_scale = None
        return loss

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        given = list(parameters_in(optimizer))
        grads = [local(p.grad) for p in given if p.grad is not None]
        if not allow_fp16 and any(g.dtype == torch.float16 for g in grads):
            raise ValueError("Attempting to unscale FP16 gradients.")
        result = found_inf.clone()
        for device, dtype in {(g.device, g.dtype): None for g in grads}:
            alike = [g for g in grads if (g.device, g.dtype) == (device, dtype)]
            inf = torch.zeros_like(result, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(alike, inf, inv_scale.to(device))
            result = torch.maximum(result, inf.to(result.device))
        for mesh in {p.device_mesh: None for p in given if isinstance(p, DTensor)}:
            agree_over(mesh, result)
        pipe = next((m.group for m in map(membership_of, given) if m is not None), None)
        if pipe is not None:
            dist.all_reduce(result, dist.ReduceOp.MAX, group=pipe)
        found_inf.copy_(result)
        return {device: result.to(device) for device in {g.device for g in grads} or {result.device}}


def agree_over(mesh: DeviceMesh, result: torch.Tensor) -> None:
    """Make a number the largest of all ranks of a mesh, in place."""
    there = result if result.device.type == mesh.device_type else result.to(mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(there, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    result.copy_(there)


def agreement_of(runner: Runner) -> Callable[[torch.Tensor], None] | None:
    """What `LocalPart` must know for gradients of a program; None if torch does it right."""
    program = runner.program
    if program.stages is not None:
        return _refuse
    layouts = [program.lowered.values[r.value].layout for r in program.signature.results if r.kind == "grad"]
    split = {tuple(k for k, placed in enumerate(x) if isinstance(placed, Shard)) for x in layouts}
    return partial(agree_over, runner.mesh) if len(split) > 1 else None


def _refuse(result: torch.Tensor) -> None:
    raise UsageError(
        "the gradients of a pipeline are unscaled by torch's GradScaler",
        why="their loss was not scaled, and an infinity in one stage must be known to all of them",
        hint="use autoshard.GradScaler and its train_step",
    )
