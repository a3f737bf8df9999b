"""`autoshard.LayerWiseOptimizer` does on shards what its optimizer does on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from owner_messages import count_sent
from preconditioned import Shampoo, Soap
from ranks import HERE, run_ranks
from runtime.test_muon import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim.lr_scheduler import LambdaLR

import autoshard
from autoshard.ir.placement import Shard as OurShard
from autoshard.runtime.optim import owners
from autoshard.runtime.shard_utils import shard_tensor
from autoshard.torch_adapters.dtensor import as_dtensor

SHAPES = ((8, 12), (12, 8), (7, 5), (16, 16), (3, 5), (7,), (3, 4, 6))
MATRICES = tuple(shape for shape in SHAPES if len(shape) == 2)
MAKES: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "SOAP": lambda groups: Soap(groups, lr=3e-2),
    "Shampoo": lambda groups: Shampoo(groups, lr=3e-2),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=3e-2),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(3e-2)),
    "Muon": lambda groups: torch.optim.Muon(groups, lr=3e-2),
}
#: mesh -> its sizes, its ranks in order, placements
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]] = {
    "dp=4": ((4,), (0, 1, 2, 3), (Replicate(),)),
    "fsdp=4": ((4,), (0, 1, 2, 3), (Shard(0),)),
    "fsdp=2,tp=2": ((2, 2), (0, 1, 2, 3), (Shard(0), Shard(1))),
    "tp=4": ((4,), (0, 1, 2, 3), (Shard(1),)),
    "tp=2,dp=2, with ranks in another order": ((2, 2), (0, 2, 1, 3), (Shard(0), Replicate())),
    "fused, fsdp=2,tp=2": ((2, 2), (0, 1, 2, 3), (_StridedShard(0, split_factor=2), Shard(0))),
}


def values(shapes: tuple[tuple[int, ...], ...], step: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    # of several types: where they lie between one another, bytes have to be moved
    types = [torch.float32 if k == 2 else torch.float64 for k in range(len(shapes))]
    return [torch.randn(shape, generator=g).to(kind) for shape, kind in zip(shapes, types, strict=True)]


def trained(
    place: Callable[[torch.Tensor], torch.Tensor],
    make: Callable[[list[Any]], torch.optim.Optimizer],
    shapes: tuple[tuple[int, ...], ...],
    checked: Callable[[Any], None] = lambda _: None,
) -> list[torch.Tensor]:
    """Parameters after four steps with given gradients, two groups, a schedule and options that change."""
    params = [nn.Parameter(place(x)) for x in values(shapes, 0)]
    idle = nn.Parameter(place(torch.ones(4, 4)))
    groups = [{"params": [*params[:3], idle]}, {"params": params[3:], "lr": 1e-2}]
    optimizer = make(groups)
    schedule = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for step in range(1, 5):
        for p, gradient in zip(params, values(shapes, step), strict=True):
            p.grad = place(gradient)
        optimizer.step()
        schedule.step()
        if step == 2 and "weight_decay" in optimizer.defaults:
            optimizer.param_groups[1]["weight_decay"] = 0.3
        optimizer.zero_grad()
    assert groups[0]["params"][0] is params[0] is optimizer.param_groups[0]["params"][0]
    checked(optimizer)
    return [p.detach() for p in (*params, idle)]


def placing(layout: str) -> Callable[[torch.Tensor], torch.Tensor]:
    sizes, ranks, placements = LAYOUTS[layout]
    mesh = DeviceMesh("cpu", torch.tensor(ranks).view(sizes), mesh_dim_names=("a", "b")[: len(sizes)])

    def place(x: torch.Tensor) -> torch.Tensor:
        here = [Replicate() if getattr(p, "dim", 0) >= x.dim() else p for p in placements]
        if not any(isinstance(p, _StridedShard) for p in placements):
            return distribute_tensor(x, mesh, here) if ranks == (0, 1, 2, 3) else local_part(x, mesh, here)
        if x.shape[0] % 4:
            return distribute_tensor(x, mesh, [Replicate()] * 2)
        ours = (OurShard(0, 2), OurShard(0))
        return as_dtensor(shard_tensor(x, ours, sizes, mesh.get_coordinate() or ()), mesh, ours, x.shape)

    return place


def local_part(x: torch.Tensor, mesh: DeviceMesh, placements: Any) -> torch.Tensor:
    """A DTensor of the parts that coordinates tell."""
    assert isinstance(placements[0], Shard)
    part = x.chunk(mesh.size(0))[(mesh.get_coordinate() or ())[0]].contiguous()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def kept(optimizer: Any) -> list[tuple[bool, ...]]:
    """On every rank, whether it has a state of each parameter."""
    entries = [bool(optimizer.state.get(p)) for g in optimizer.param_groups for p in g["params"]]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, tuple(entries))
    return everywhere


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_one_process(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "_ROUND_BYTES", 1)  # several rounds

    def check(optimizer: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        held = kept(optimizer)
        assert [sum(rank) for rank in zip(*held, strict=True)] == [k != 3 for k in range(len(params))]
        busy = max(held, key=lambda rank: rank[4])
        assert sum(busy) == 1, "the owner of the largest has nothing else"
        for owned in optimizer._owned.values():
            assert owned.full.grad is None and owned.full.untyped_storage().nbytes() <= 8

    def on_rank() -> dict[str, list[torch.Tensor]]:
        place = placing(layout)
        return {
            name: [full(x) for x in trained(place, layer_wise(make), shapes_of(name), check)]
            for name, make in MAKES.items()
        }

    results = on_ranks(4, on_rank)
    for name, make in MAKES.items():
        expected = trained(lambda x: x, make, shapes_of(name))
        for rank in results:
            for one, other in zip(rank[name], expected, strict=True):
                assert torch.equal(one, other), name


def layer_wise(make: Any, **options: Any) -> Callable[[list[Any]], torch.optim.Optimizer]:
    return lambda params: autoshard.LayerWiseOptimizer(params, make, **options)


def shapes_of(name: str) -> tuple[tuple[int, ...], ...]:
    return MATRICES if name == "Muon" else SHAPES


def test_plain_tensors_are_updated_in_place() -> None:
    make = MAKES["SOAP"]
    ours, theirs = (trained(lambda x: x, m, SHAPES) for m in (layer_wise(make), make))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    p = nn.Parameter(torch.ones(3, 3))
    p.grad = torch.ones(3, 3)
    before, version = p.data_ptr(), p._version
    autoshard.LayerWiseOptimizer([p], make).step()
    assert p.data_ptr() == before and p._version > version


def test_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = count_sent(monkeypatch)

    def stepped(shape: tuple[int, ...], placements: tuple[Any, ...], **options: Any) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2,))
        g = torch.Generator().manual_seed(0)
        start = [torch.randn(shape, generator=g) for _ in range(4)]
        params = [nn.Parameter(distribute_tensor(x, mesh, placements)) for x in start]
        optimizer = autoshard.LayerWiseOptimizer(params, MAKES["SOAP"], **options)
        for _ in range(2):
            for p in params:
                p.grad = p.detach().clone()
            optimizer.step()
        return params[0].detach().full_tensor()  # type: ignore[attr-defined]

    apart = on_ranks(2, lambda: stepped((4, 8, 6), (Shard(0),), batched=True))
    assert not sent, "experts that are divided by number need no message"
    together = on_ranks(2, lambda: stepped((4, 8, 6), (Shard(0),)))
    # each of two ranks owns two of four tensors: half of gradient and parameter comes, half a parameter goes
    assert sum(sent) == 2 * 2 * 2 * 3 * 4 * 96
    assert torch.allclose(apart[0], together[0], rtol=0, atol=1e-6)
    sent.clear()
    # replicas: the owner has all of both
    on_ranks(2, lambda: stepped((8, 6), (Replicate(),)))
    assert sum(sent) == 2 * 2 * 2 * 4 * 48


class Counting(torch.optim.SGD):
    """Adds up, in its group, how often it was called; its rate falls with that."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / group["calls"])
                self.state[p]["last"] = p.grad.clone()


def test_counters_of_groups_and_schedules() -> None:
    def run(make: Any, place: Any) -> list[torch.Tensor]:
        params = [nn.Parameter(place(x)) for x in values(MATRICES, 0)]
        optimizer = make(params)
        for step in range(4):
            if step == 2:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = make(params)
                optimizer.load_state_dict(state)
            optimizer.param_groups[0]["lr"] = 0.1 * (step + 1)
            for p, gradient in zip(params, values(MATRICES, step), strict=True):
                p.grad = place(gradient)
            optimizer.step()
        return [full(p.detach()) for p in params]

    make = lambda params: Counting(params, lr=1.0)  # noqa: E731
    expected = run(make, lambda x: x)
    for results in on_ranks(4, lambda: run(layer_wise(make), placing("fsdp=2,tp=2"))):
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_parameters_of_fsdp_and_groups_that_come_later() -> None:
    def run(wrap: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8, bias=False))
        if wrap:
            fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        first, *rest = net.parameters()
        optimizer = layer_wise(MAKES["SOAP"])([first]) if wrap else MAKES["SOAP"]([first])
        for step in range(3):
            net(torch.ones(3, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if not step:
                for p in net.parameters():
                    p.grad = None
                optimizer.add_param_group({"params": rest, "lr": 1e-3})
        return [full(p.detach()) for p in net.parameters()]

    expected = run(False)
    for results in on_ranks(2, lambda: run(True)):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(results, expected, strict=True))


def test_states_that_are_not_there() -> None:
    def on_rank() -> list[str]:
        place, make = placing("fsdp=4"), layer_wise(MAKES["Adafactor"])
        params = [(f"layers.{k}", nn.Parameter(place(x))) for k, x in enumerate(values(MATRICES, 0))]
        optimizer = make(params)
        fresh = optimizer.state_dict()
        for _, p in params:
            p.grad = p.detach().clone()
        optimizer.step()
        states: list[Any] = [None] * 4
        dist.all_gather_object(states, optimizer.state_dict())
        said = []
        for state in (states[0], {**states[0], "state": {k: {} for k in ()}}, fresh):
            try:
                make(params).load_state_dict(state)
            except autoshard.UsageError as error:
                said.append(str(error))
        # as one process has it
        every = {k: x for each in states for k, x in each["state"].items() if "at_owner" not in x}
        make(params).load_state_dict({**states[0], "state": every})
        mine = next(k for k, x in states[dist.get_rank()]["state"].items() if "at_owner" not in x)
        with pytest.raises(autoshard.UsageError, match=f"layers.{mine}"):
            make(params).load_state_dict(
                {**states[0], "state": {k: x for k, x in every.items() if k != mine}}
            )
        return said

    first, *others = on_ranks(4, on_rank)
    assert not first and all(len(said) == 1 and "is not there" in said[0] for said in others)


def test_what_is_refused() -> None:
    p, q = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    with pytest.raises(autoshard.UsageError, match="a list"):
        autoshard.LayerWiseOptimizer([p], lambda groups: groups)  # type: ignore[arg-type, return-value]
    with pytest.raises(autoshard.UsageError, match="SGD of 2 groups"):
        autoshard.LayerWiseOptimizer([p], lambda groups: torch.optim.SGD([*groups, {"params": [q]}], lr=1.0))
    optimizer = autoshard.LayerWiseOptimizer([p], MAKES["SOAP"])
    with pytest.raises(autoshard.UsageError, match="copied"):
        copy.deepcopy(optimizer)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        p = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
        p.grad = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
        with pytest.raises(autoshard.UsageError, match="lies as"):
            autoshard.LayerWiseOptimizer([p], MAKES["SOAP"]).step()

    on_ranks(2, on_rank)


def test_checkpoints_of_parallel_models(tmp_path: Path) -> None:
    output = run_ranks([str(HERE / "layer_wise_worker.py"), str(tmp_path)])
    assert output.count(" works") == 6, output[-4000:]
