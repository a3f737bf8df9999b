"""DTensors with quick elementwise methods: the numbers, placements and versions of plain ones."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.torch_adapters.dtensor import spec_of
from autoshard.torch_adapters.local_ops import LocalDTensor, quick_of

PLACED: tuple[tuple[tuple[int, ...], list[Placement]], ...] = (
    ((8, 3), [Shard(0), Replicate()]),
    ((7, 6), [Replicate(), Shard(1)]),
    ((5,), [Replicate(), Replicate()]),
    ((2, 4), [Shard(0), Shard(1)]),
)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """The first of four ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    dist.destroy_process_group()


def _made(mesh: DeviceMesh, seed: int) -> list[DTensor]:
    """What the rank has of some tensors, as plain DTensors."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape, placements in PLACED:
        whole = torch.randn(shape, generator=generator)
        for ways, placed in zip((2, 2), placements, strict=True):
            if isinstance(placed, Shard):
                whole = whole.chunk(ways, placed.dim)[0].contiguous()
        size = torch.Size(shape)
        stride = torch.empty(size, device="meta").stride()
        found.append(DTensor.from_local(whole, mesh, placements, run_check=False, shape=size, stride=stride))
    return found


def _quick(x: DTensor) -> DTensor:
    return quick_of(x.to_local(), spec_of(x))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_make_the_numbers_that_they_make_of_shards(mesh: DeviceMesh, name: str) -> None:
    quick = [nn.Parameter(_quick(x)) for x in _made(mesh, 0)]
    plain = [nn.Parameter(x.to_local().clone()) for x in _made(mesh, 0)]
    one, two = OPTIMIZERS[name](quick), OPTIMIZERS[name](plain)
    assert all(type(p) is LocalDTensor and isinstance(p, nn.Parameter) for p in quick)
    for step in range(3):
        versions = [p._version for p in quick]
        for p, q, grad in zip(quick, plain, _made(mesh, 1 + step), strict=True):
            p.grad, q.grad = _quick(grad), grad.to_local().clone()
        one.step()
        two.step()
        for p, q, version in zip(quick, plain, versions, strict=True):
            assert isinstance(p, DTensor)
            assert torch.equal(p.to_local(), q)
            # torch counts no changes of many DTensors at once
            assert p._version > version or name == "foreach"
            for key, value in two.state[q].items():
                mine = one.state[p][key]
                assert torch.equal(mine.to_local() if isinstance(mine, DTensor) else mine, value), key


def test_a_result_lies_as_its_operands(mesh: DeviceMesh) -> None:
    with torch.no_grad():
        for x, y in zip(_made(mesh, 0), _made(mesh, 1), strict=True):
            a, b = _quick(x), _quick(y)
            for found, wanted in (
                (a * b + 2, x * y + 2),
                (a.addcdiv(b, b * b + 1, value=-0.5), x.addcdiv(y, y * y + 1, value=-0.5)),
                (a.abs().sqrt() / 3, x.abs().sqrt() / 3),
                (-a.sign(), -x.sign()),
                (a.lerp(b, 0.25), x.lerp(y, 0.25)),
            ):
                assert type(found) is LocalDTensor
                assert found.placements == wanted.placements and found.shape == wanted.shape
                assert torch.equal(found.to_local(), wanted.to_local())


def test_what_does_not_lie_alike_is_left_to_dtensor(mesh: DeviceMesh) -> None:
    rows, columns = (
        DTensor.from_local(torch.ones(local), mesh, placements, run_check=False)
        for local, placements in (((2, 4), [Shard(0), Replicate()]), ((4, 2), [Replicate(), Shard(1)]))
    )
    a, scale = _quick(rows), torch.tensor(2.0)
    with torch.no_grad():
        assert (a * columns).shape == (4, 4)  # whichever way it goes
        assert torch.equal((a + rows).to_local(), torch.full((2, 4), 2.0))
        a.add_(rows, alpha=3)
        assert torch.equal(a.to_local(), torch.full((2, 4), 4.0))
        assert a.add(1.5).dtype == torch.float32
        with pytest.raises(RuntimeError, match="mixed torch"):
            a.mul_(scale.expand(4, 4))


def test_gradients_are_recorded_as_of_any_dtensor(mesh: DeviceMesh) -> None:
    (x, *_), (y, *_) = _made(mesh, 0), _made(mesh, 1)
    p = nn.Parameter(_quick(x))
    loss = (p * _quick(y) + 1).to_local().sum()
    loss.backward()
    assert isinstance(p.grad, DTensor) and torch.equal(p.grad.to_local(), y.to_local())


def test_copies_are_plain_dtensors_elsewhere(mesh: DeviceMesh) -> None:
    x = _quick(_made(mesh, 0)[0])
    file = io.BytesIO()
    torch.save({"x": x, "p": nn.Parameter(x)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for back in (*loaded.values(), pickle.loads(pickle.dumps(x))):
        assert type(back) is DTensor and back.placements == x.placements
        assert torch.equal(back.to_local(), x.to_local())
    twin = copy.deepcopy(nn.Parameter(x))
    assert isinstance(twin, DTensor) and isinstance(twin, nn.Parameter) and twin.requires_grad
    assert torch.equal(twin.to_local(), x.to_local())
    with torch.no_grad():
        twin.add_(1)
    assert not torch.equal(twin.to_local(), x.to_local())
