"""The parallel training that people write by hand with torch, for comparison on the same model."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def by_fsdp2(model: Any, mesh: DeviceMesh) -> nn.Module:
    """``fully_shard`` per layer and on the whole, as its documentation shows."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def by_tensor_parallel(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Megatron's column and row parallel layers through ``parallelize_module``."""
    plan: dict[str, Any] = {
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def by_ddp(model: Any, mesh: DeviceMesh) -> nn.Module:
    """DistributedDataParallel with its default buckets."""
    return DistributedDataParallel(model, process_group=mesh.get_group())
