"""What it takes to hand the parameters of a model to a call and their gradients back, measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from autoshard.torch_adapters.dtensor import dtensor_of, spec_of

if TYPE_CHECKING:
    from autoshard.runtime.profile.device import CallTimer

#: parameters, and elements of each
_COUNT, _LENGTH = 48, 64


class _Handed(torch.autograd.Function):
    """One autograd node between DTensor parameters and a program on their local parts (`runtime.module`)."""

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> torch.Tensor:
        ctx.specs = [spec_of(p) for p in parameters]
        ctx.parts = [p.to_local() for p in parameters]
        return ctx.parts[0].new_ones(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return tuple(dtensor_of(torch.empty_like(x), s) for x, s in zip(ctx.parts, ctx.specs, strict=True))


def measure_handing(clock: CallTimer) -> float:
    """Seconds per parameter that is a DTensor; 0 without a process group, where there are none."""
    if not dist.is_initialized():
        return 0.0
    mesh = init_device_mesh(clock.device.type, (dist.get_world_size(),))
    spec = spec_of(DTensor.from_local(torch.zeros(_LENGTH), mesh, [Replicate()]))
    parameters = [nn.Parameter(dtensor_of(torch.zeros(_LENGTH), spec)) for _ in range(_COUNT)]

    def step() -> None:
        _Handed.apply(*parameters).backward()
        for parameter in parameters:
            parameter.grad = None

    return clock.seconds(step) / _COUNT
