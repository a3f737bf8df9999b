"""Started by `ranks`: checkpoints of optimizers whose states are at owners go on on another mesh."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_worker import done, step
from families import family
from gloo_api_worker import check, raises
from leaving import leave
from preconditioned import Shampoo, Soap
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import autoshard
from autoshard.runtime.optim.full_states import full_optimizer_state

#: eps above what gradients that are zero on paper come to. Bases of what they span are noise: SOAP's are not
#: turned before the last step
MAKES: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "SOAP": lambda groups: Soap(groups, lr=1e-2, eps=1e-3, every=3),
    "Shampoo": lambda groups: Shampoo(groups, lr=1e-2, eps=1e-3),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
}
NAME = "gpt2"


def near(results: list[float], wanted: list[float], what: str) -> None:
    check(
        max(abs(a - b) for a, b in zip(results, wanted, strict=True)) < 1e-5, f"{what}: {results}, {wanted}"
    )


@functools.cache
def model_of(mesh: str) -> nn.Module:
    """In float64 but for the loss: bases of matrices of low rank magnify how sums are rounded."""
    model, inputs = family(NAME).make(1)
    model = model.double()
    return autoshard.parallelize(model, mesh, example_inputs=inputs) if mesh else model


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    inputs = family(NAME).make(0)[1]
    return [step(model, optimizer, inputs) for _ in range(count)]


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, options: StateDictOptions) -> None:
    weights, states = get_state_dict(model, optimizer, options=options)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=options)


def tensors_in(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (dict, list)):
        for each in x.values() if isinstance(x, dict) else x:
            yield from tensors_in(each)


def kept_once(optimizer: Any, plain: torch.optim.Optimizer) -> None:
    """The ranks together have what one process has."""
    mine = sum(x.numel() for x in tensors_in(dict(optimizer.state)))
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, mine)
    wanted = sum(x.numel() for x in tensors_in(dict(plain.state)))
    check(sum(held) == wanted and max(held) < 0.6 * wanted, f"{held} of {wanted}")


def onto_another_mesh(name: str, start: dict[str, Any], folder: Path) -> None:
    """From fsdp=4 to fsdp=2,tp=2, through torch's functions and ours; all equal to one process.

    start: weights.
    """
    make = MAKES[name]
    plain = model_of("")
    plain.load_state_dict(start)
    theirs = make([{"params": list(plain.parameters())}])
    expected = losses(plain, theirs, 2)
    model = model_of("fsdp=4")
    model.load_state_dict(start)
    optimizer = autoshard.LayerWiseOptimizer(model.parameters(), make)
    near(losses(model, optimizer, 2), expected, f"{name} before")
    kept_once(optimizer, theirs)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / "nested")
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    if name != "SOAP":  # which has lists in its states
        states = get_optimizer_state_dict(model, optimizer, options=flat)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / "flat")
    autoshard.Checkpoints(folder / "ours", model, optimizer).save(2)
    everything = copy.deepcopy(get_optimizer_state_dict(plain, theirs))
    values = copy.deepcopy(plain.state_dict())
    expected = losses(plain, theirs, 2)
    going_on = losses(model, optimizer, 2)
    if name != "SOAP":
        near(going_on, expected, f"{name} without a stop")
    for way in ("nested", "flat", "ours", "of one process"):
        other = model_of("fsdp=2,tp=2")
        resumed = autoshard.LayerWiseOptimizer(other.parameters(), make)
        if way == "ours":
            check(autoshard.Checkpoints(folder / way, other, resumed).load() == 2, "the newest")
        elif way == "of one process":
            other.load_state_dict(values)
            set_optimizer_state_dict(other, resumed, copy.deepcopy(everything))
        elif way == "nested" or name != "SOAP":
            load(other, resumed, folder / way, StateDictOptions() if way == "nested" else flat)
        else:
            continue
        wanted = expected if way == "of one process" else going_on
        near(losses(other, resumed, 2), wanted, f"{name}, {way}")
        kept_once(resumed, theirs)
    raises(autoshard.UsageError, lambda: full_optimizer_state(model, optimizer), "not gathered")


def pipelines(start: dict[str, Any], folder: Path) -> None:
    """Ranks of a stage are owners of what the stage has; states go on with other stages' ranks."""
    inputs = family(NAME).make(0)[1]

    def run(model: Any, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            losses.append(float(model.train_step(inputs)))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    plain = model_of("")
    plain.load_state_dict(start)
    make = MAKES["Shampoo"]
    expected = losses(plain, make([{"params": list(plain.parameters())}]), 4)
    saved = False
    for mesh in ("pp=2,tp=2", "pp=2,fsdp=2"):
        model = model_of(mesh)
        model.load_state_dict(start, strict=False)
        optimizer = autoshard.LayerWiseOptimizer(model.parameters(), make)
        checkpoints = autoshard.Checkpoints(folder, model, optimizer)
        if saved:
            check(checkpoints.load() == 2, "the newest")
        else:
            near(run(model, optimizer, 2), expected[:2], f"{mesh} before")
            checkpoints.save(2)
            saved = True
        near(run(model, optimizer, 2), expected[2:], f"{mesh} after")


def experts(folder: Path) -> None:
    """Divided by number, with replicas and without: owners save some of them, and others load those."""
    layouts = {
        "one process": ((), ()),
        "ep=2,dp=2": ((2, 2), (Shard(0), Replicate())),
        "ep=4": ((4,), (Shard(0),)),
        "dp=2,ep=2": ((2, 2), (Replicate(), Shard(0))),
    }

    def train(
        layout: str, count: int, begin: int, saved: Path | None = None
    ) -> tuple[Any, Any, torch.Tensor]:
        sizes, placements = layouts[layout]
        g = torch.Generator().manual_seed(begin)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)]) if sizes else None

        def drawn() -> torch.Tensor:
            x = torch.randn(4, 6, 5, generator=g, dtype=torch.float64)
            return distribute_tensor(x, mesh, placements) if mesh else x

        net = nn.ParameterDict({"experts": nn.Parameter(drawn())})
        params = list(net.parameters())
        make = MAKES["SOAP"]
        if mesh:
            optimizer: Any = autoshard.LayerWiseOptimizer(params, make, batched=True)
        else:
            optimizer = make([{"params": params}])
        if saved is not None:
            load(net, optimizer, saved, StateDictOptions())
        for _ in range(count):
            params[0].grad = drawn()
            optimizer.step()
        value = params[0].detach()
        return net, optimizer, value.full_tensor() if isinstance(value, DTensor) else value

    *_, first = train("one process", 3, 0)
    for number, layout in enumerate(("ep=2,dp=2", "ep=4")):
        net, optimizer, value = train(layout, 3, 0)
        check(torch.allclose(value, first, rtol=0, atol=1e-12), layout)
        weights, states = get_state_dict(net, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / str(number))
        every = [train(other, 2, 1, folder / str(number))[2] for other in layouts]
        check(all(torch.allclose(x, every[0], rtol=0, atol=1e-12) for x in every), f"from {layout}")
        check(not torch.allclose(every[0], train("one process", 2, 1)[2], rtol=0, atol=1e-3), "a new one")


def gradients_of_another_type() -> None:
    """Of half precision in parameters and of single in gradients: both travel as they are."""

    def run(make: Any, place: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(0)
        params = [nn.Parameter(place(torch.randn(5, 3, generator=g).bfloat16())) for _ in range(3)]
        optimizer = make([{"params": params}])
        for _ in range(2):
            for p in params:
                p.grad_dtype = torch.float32
                p.grad = place(torch.randn(5, 3, generator=g))
            optimizer.step()
        return [p.full_tensor() if isinstance(p, DTensor) else p for p in params]

    mesh = init_device_mesh("cpu", (4,))
    for placement in (Shard(0), Shard(1), Replicate()):
        results = run(
            lambda groups: autoshard.LayerWiseOptimizer(groups, MAKES["SOAP"]),
            lambda x, placement=placement: distribute_tensor(x, mesh, [placement]),
        )
        pairs = zip(results, run(MAKES["SOAP"], lambda x: x), strict=True)
        check(all(torch.equal(a, b) for a, b in pairs), f"{placement}")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    start = copy.deepcopy(model_of("").state_dict())
    for name in MAKES:
        onto_another_mesh(name, start, Path(sys.argv[1]) / name)
        done(name)
    experts(Path(sys.argv[1]) / "experts")
    done("experts")
    pipelines(start, Path(sys.argv[1]) / "pipelines")
    done("pipelines")
    gradients_of_another_type()
    done("another type")
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
