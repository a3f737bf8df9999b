"""`autoshard.Muon` on shards does what torch's does on matrices, and sends each to one owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from owner_messages import count_sent
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import autoshard
from autoshard.ir.placement import Shard as OurShard
from autoshard.runtime.optim import owners
from autoshard.runtime.shard_utils import shard_tensor
from autoshard.torch_adapters.dtensor import as_dtensor

SHAPES = ((8, 12), (12, 8), (7, 5), (16, 16), (3, 8, 6))
LAYOUTS: dict[str, tuple[Any, ...]] = {
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "of all": (Replicate(),),
    "both": (Shard(0), Shard(1)),
    "rows twice": (Shard(0), Shard(0)),
    "rows, some of all": (Shard(0), Replicate()),
    "as FSDP over TP": (_StridedShard(0, split_factor=2), Shard(0)),
}


def matrices(step: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=g) for shape in SHAPES]


def trained(place: Callable[[torch.Tensor], torch.Tensor], make: Any, **options: Any) -> list[torch.Tensor]:
    """Matrices after three steps with given gradients."""
    params = [nn.Parameter(place(x)) for x in matrices(0)]
    optimizer = make(params, lr=0.1, **options)
    for step in range(1, 4):
        for p, gradient in zip(params, matrices(step), strict=True):
            p.grad = place(gradient)
        optimizer.step()
    return [p.detach() for p in params]


def one_device(**options: Any) -> list[torch.Tensor]:
    """torch's own on the matrices, each of a batch by itself."""
    out = trained(lambda x: x if x.dim() == 2 else x.new_zeros(1, 1), torch.optim.Muon, **options)
    batches = [k for k, shape in enumerate(SHAPES) if len(shape) == 3]
    for k in batches:
        each = [nn.Parameter(x) for x in matrices(0)[k]]
        optimizer = torch.optim.Muon(each, lr=0.1, **options)
        for step in range(1, 4):
            for p, gradient in zip(each, matrices(step)[k], strict=True):
                p.grad = gradient
            optimizer.step()
        out[k] = torch.stack([p.detach() for p in each])
    return out


def on_ranks(ways: int, function: Callable[[], Any]) -> list[Any]:
    """What a function returns on every rank."""
    results: list[Any] = [None] * ways

    def rank_step() -> None:
        results[dist.get_rank()] = function()

    model = nn.Linear(2, 2)
    with autoshard.audit(model, f"dp={ways}", step=lambda m: m(torch.ones(2)).sum().backward()) as audit:
        torch.set_default_dtype(torch.float32)
        report = audit.rank(rank_step)
    assert all(f.kind != "error" for f in report.findings), report.text()
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_updated_as_matrices(layout: str) -> None:
    placements = LAYOUTS[layout]
    sizes = (4,) if len(placements) == 1 else (2, 2)

    def on_rank() -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])

        def place(x: torch.Tensor) -> torch.Tensor:
            fused = any(isinstance(p, _StridedShard) for p in placements)
            if fused and x.shape[0] % 4:
                return distribute_tensor(x, mesh, [Replicate()] * 2)
            if not fused:
                return distribute_tensor(x, mesh, placements)
            cut = shard_tensor(x, (OurShard(0, 2), OurShard(0)), sizes, mesh.get_coordinate() or ())
            return as_dtensor(cut, mesh, (OurShard(0, 2), OurShard(0)), x.shape)

        return [full(x) for x in trained(place, autoshard.Muon)]

    expected = one_device()
    for found in on_ranks(4, on_rank):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def full(x: torch.Tensor) -> torch.Tensor:
    assert isinstance(x, DTensor)
    return x.full_tensor()


def test_options_are_those_of_torch() -> None:
    options = {"nesterov": False, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}

    def on_rank() -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (2,))
        return [
            full(x)
            for x in trained(lambda x: distribute_tensor(x, mesh, [Shard(0)]), autoshard.Muon, **options)
        ]

    for one, other in zip(on_ranks(2, on_rank)[1], one_device(**options), strict=True):
        assert torch.equal(one, other)


def test_every_matrix_goes_to_one_rank_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "_ROUND_BYTES", 1)
    sent = count_sent(monkeypatch)

    def stepped(shape: tuple[int, ...], placements: tuple[Any, ...], sizes: tuple[int, ...]) -> None:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])
        params = [nn.Parameter(distribute_tensor(torch.ones(shape), mesh, placements)) for _ in range(4)]
        for p in params:
            p.grad = p.detach().clone()
        autoshard.Muon(params).step()

    on_ranks(2, lambda: stepped((4, 8, 6), (Shard(0),), (2,)))
    assert not sent, "experts divided by number need no message"
    # replicas: each of two ranks owns two of four matrices, and sends them to the other one
    on_ranks(2, lambda: stepped((8, 8), (Replicate(),), (2,)))
    assert sum(sent) == 2 * 2 * 2 * 64
    sent.clear()
    # experts divided by number, with replicas: the same, of two experts each
    on_ranks(4, lambda: stepped((4, 8, 8), (Shard(0), Replicate()), (2, 2)))
    assert sum(sent) == 2 * (2 * 2 * 2 * 2 * 64)
    sent.clear()

    on_ranks(2, lambda: stepped((8, 8), (Shard(0),), (2,)))
    # each of two ranks owns two of four matrices, and has half of every one: 64 elements go, 64 come back
    assert sum(sent) == 2 * 2 * 2 * 64 and len(sent) == 8


def test_states_are_those_of_torch() -> None:
    def on_rank() -> bool:
        mesh = init_device_mesh("cpu", (2,))
        net = fully_shard(nn.Linear(8, 6, bias=False), mesh=mesh)
        net(torch.ones(3, 8)).square().sum().backward()
        mine = autoshard.Muon(net.parameters())
        mine.step()
        theirs = torch.optim.Muon(net.parameters())
        theirs.load_state_dict(mine.state_dict())
        buffers = [o.state[net.weight]["momentum_buffer"].full_tensor() for o in (mine, theirs)]
        return torch.equal(*buffers)

    assert on_ranks(2, on_rank) == [True, True]


def test_vectors_and_unknown_scales_are_refused() -> None:
    with pytest.raises(autoshard.UsageError, match="shape \\[4\\]"):
        autoshard.Muon([nn.Parameter(torch.ones(4))])
    with pytest.raises(autoshard.UsageError, match="shape \\[5\\]"):
        matrix = autoshard.Muon([nn.Parameter(torch.ones(4, 4))])
        matrix.add_param_group({"params": nn.Parameter(torch.ones(5))})
    with pytest.raises(autoshard.UsageError, match="match_rms"):
        autoshard.Muon([nn.Parameter(torch.ones(4, 4))], adjust_lr_fn="match_rms")
