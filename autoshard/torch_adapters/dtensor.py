"""Everything of torch's DTensor that is not public. Tried on torch 2.11 and 2.13; 2.12 read from sources.

``_StridedShard(dim, split_factor=k)`` is `Shard(dim, outer=k)` here: the dim seen as (k, rest), the
rest split.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from autoshard.ir.placement import Layout
from autoshard.ir.placement import Shard as OurShard
from autoshard.torch_adapters.blocks import described, refusing

#: how a DTensor lies: mesh, placements, global shape, strides and type
Spec: TypeAlias = DTensorSpec


def without_torch_function() -> AbstractContextManager[None]:
    """Inside, subclasses of tensors are not asked what torch's functions do with them."""
    return torch._C.DisableTorchFunctionSubclass()


def op_handlers() -> dict[Any, Any]:
    """What runs ops on DTensors in another way, for a process: where `loss_parallel` adds its own."""
    result: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return result


def torch_placements(layout: Layout) -> list[TorchPlacement]:
    """The layout as DTensor placements; only layouts that programs store or return."""
    result: list[TorchPlacement] = []
    for placed in layout:
        if isinstance(placed, OurShard):
            assert placed.inner == 1 and placed.outer > 0  # a DTensor has no zigzag
            fused = placed.outer > 1
            result.append(
                _StridedShard(placed.dim, split_factor=placed.outer) if fused else Shard(placed.dim)
            )
        else:
            result.append(Replicate())
    return result


def allow_nan_checks() -> None:
    """Let ``torch.autograd.detect_anomaly()`` look at gradients that are DTensors, each rank at its part.

    It calls an op on them for which torch 2.13 has no sharding.
    """
    op = torch.ops.aten._is_any_true.default
    if op not in DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs:

        @register_sharding(op)
        def any_true(x: Spec) -> list[tuple[list[TorchPlacement], list[TorchPlacement]]]:
            result: list[tuple[list[TorchPlacement], list[TorchPlacement]]] = [([Replicate()], [Replicate()])]
            parts = (p for p in x.placements if not p.is_replicate() and not p.is_partial())
            return result + [([Partial()], [part]) for part in parts]


def as_dtensor(local: torch.Tensor, mesh: DeviceMesh, layout: Layout, shape: Sequence[int]) -> DTensor:
    """A rank's shard as a DTensor of the global shape; no communication."""
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    placements = refusing(size, mesh, torch_placements(layout))
    new = DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)
    if any(isinstance(p, _StridedShard) for p in placements):
        new._spec = _spec(mesh, placements, new._spec.tensor_meta)
    return described(new)


def host_dtensor(local: torch.Tensor, mesh: DeviceMesh, layout: Layout, shape: Sequence[int]) -> DTensor:
    """The same of a shard in host memory, which stays there though the mesh is of devices: `from_local` would
    move it (torch's FSDP2 makes its offloaded parameters in the same way)."""
    if local.device.type == mesh.device_type:
        return as_dtensor(local, mesh, layout, shape)
    size = torch.Size(shape)
    meta = TensorMeta(size, torch.empty(size, device="meta").stride(), local.dtype)
    return dtensor_of(local, _spec(mesh, refusing(size, mesh, torch_placements(layout)), meta))


def _spec(mesh: DeviceMesh, placements: Sequence[TorchPlacement], meta: TensorMeta | None) -> Spec:
    """Of a strided shard for what it is: otherwise torch 2.11 takes it for an order of axes, or raises."""
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta, use_strided_shard_as_shard_order=False)


def spec_of(x: DTensor) -> Spec:
    """How a DTensor lies."""
    return x._spec


def dtensor_of(local: torch.Tensor, spec: Spec) -> DTensor:
    """A rank's shard as a DTensor that lies as another one of its type: takes a tenth of the time."""
    return described(DTensor(local.view_as(local), spec, requires_grad=False))


def dtensor_like(other: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor that lies as another one, of a local part in any memory and of any type."""
    meta = TensorMeta(other.shape, other.stride(), local.dtype)
    return dtensor_of(local, _spec(other.device_mesh, other.placements, meta))


def batch_like(other: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor whose first dim, the only one that is sharded, lies as that of another one."""
    size = torch.Size((other.shape[0], *local.shape[1:]))
    meta = TensorMeta(size, torch.empty(size, device="meta").stride(), local.dtype)
    return dtensor_of(
        local, _spec(other.device_mesh, refusing(size, other.device_mesh, other.placements), meta)
    )


def dtensor_as(other: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A rank's part of something that lies as another tensor, which may be a plain one."""
    return dtensor_like(other, local) if isinstance(other, DTensor) else local
