"""Started by `ranks`: the ways of using the API on four processes; any failed assertion ends it."""

from __future__ import annotations

import copy
import os
import pickle
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from families import dropout_gpt2, family
from leaving import leave
from lockstep_check import relative_error
from sampling import unlike
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import autoshard
from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster
from autoshard.planner.analysis import analyse
from autoshard.planner.planning import plan_analysed
from autoshard.program.store import save_program
from autoshard.runtime.transport.network import Network
from autoshard.runtime.transport.shared_memory.collectives import SharedMemory
from autoshard.runtime.transport.shared_memory.handshake import meet
from autoshard.runtime.transport.transport import Transport
from autoshard.runtime.transport.transport_choice import transport_of


class Tower(nn.Module):
    """Two layers and a head, called positionally, giving a tuple: no Hugging Face, no loss inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(2)])
        self.head = nn.Linear(12, 6)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, dict[str, Any]]:
        for layer in self.layers:
            x = torch.relu(layer(x)) * scale
        return self.head(x), {"features": x, "none": None}


def check(condition: object, message: str) -> None:
    if not condition:
        raise AssertionError(f"rank {dist.get_rank()}: {message}")


def raises(kind: type[Exception], call: Any, words: str) -> None:
    try:
        call()
    except kind as error:
        check(words in str(error), f"{words!r} is not in {error}")
        return
    raise AssertionError(f"{kind.__name__} about {words!r} was not raised")


def outputs_and_their_gradients() -> None:
    """A model without a loss: any function of its outputs can be differentiated."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    plain = Tower()
    parallel = autoshard.parallelize(Tower(), mesh, example_inputs=(x, 0.5))
    check(isinstance(parallel, Tower), "the class is kept")
    check(list(parallel.state_dict()) == list(plain.state_dict()), "the names are kept")
    head, rest = parallel(x, 0.5)
    wanted, wanted_rest = plain(x, 0.5)
    check(isinstance(head, DTensor) and rest["none"] is None, "structure")
    check(relative_error(head.full_tensor().detach(), wanted.detach()) < 1e-5, "head")
    check(
        relative_error(rest["features"].full_tensor().detach(), wanted_rest["features"].detach()) < 1e-5,
        "features",
    )
    (head.full_tensor().pow(2).mean() + rest["features"].full_tensor().sum()).backward()
    (wanted.pow(2).mean() + wanted_rest["features"].sum()).backward()
    for (name, found), reference in zip(parallel.named_parameters(), plain.parameters(), strict=True):
        check(relative_error(found.grad.full_tensor(), reference.grad) < 1e-5, name)
    for scale in (0.25, 0.125, 2):
        check(relative_error(parallel(x, scale)[0].detach(), plain(x, scale)[0].detach()) < 1e-5, f"{scale}")
    raises(autoshard.CaptureError, lambda: parallel(x[:, :5], 0.5), "reduction dim")
    raises(autoshard.CaptureError, lambda: parallel(x, 0.5, x), "positional arguments")
    check(torch.equal(parallel(scale=0.5, x=x)[0].full_tensor(), head.full_tensor()), "by keyword")


def ways_to_give_inputs() -> None:
    """Global tensors, the rank's own part, and DTensors are the same batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, inputs = family("llama").make()
    parallel = autoshard.parallelize(model, mesh, example_inputs=inputs)
    whole = float(parallel(**inputs).loss.detach())
    dp = mesh.get_local_rank("dp")
    own = {k: v.chunk(2)[dp] for k, v in inputs.items()}
    check(float(parallel(**own).loss.detach()) == whole, "local part")
    laid = {k: distribute_tensor(v, mesh, [Shard(0), Replicate()]) for k, v in inputs.items()}
    check(float(parallel(**laid).loss.detach()) == whole, "DTensor")
    replicated = {k: distribute_tensor(v, mesh, [Replicate(), Replicate()]) for k, v in inputs.items()}
    check(float(parallel(**replicated).loss.detach()) == whole, "replicated DTensor")


class Loss(nn.Module):
    """Called by keyword, with running statistics that the loss reads too."""

    def __init__(self, seed: int = 3, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(12, width), nn.Linear(width, 12)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("average", torch.ones(width))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.up(x))
        loss = (self.down(torch.relu(h * self.average)) - y).square().mean()
        self.average = 0.5 * self.average + h.detach().mean(0)
        return loss


def loss_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 12, generator=generator), torch.randn(8, 12, generator=generator)


def same_gradients(found: nn.Module, wanted: nn.Module, what: str) -> None:
    for (name, p), q in zip(found.named_parameters(), wanted.parameters(), strict=True):
        check(relative_error(p.grad.full_tensor(), q.grad) < 1e-4, f"{what}: {name}")


def buffers_and_accumulation() -> None:
    """Buffers are whole on every rank; two forwards before two backwards add up as in eager mode."""
    x, y = loss_inputs()
    for mesh in unlike(("dp=4", "tp=4", "dp=2,tp=2", "fsdp=4"), 2):
        plain, parallel = Loss(), autoshard.parallelize(Loss(), mesh, example_inputs={"x": x, "y": y})
        for model in (plain, parallel):
            first, second = model(x=x, y=y), model(y=y, x=2 * x)
            first.backward()
            (3 * second).backward()
        same_gradients(parallel, plain, mesh)
        for (name, found), wanted in zip(parallel.named_buffers(), plain.buffers(), strict=True):
            check(relative_error(found.double(), wanted.double()) < 1e-5, f"{mesh}: {name}")


def gradients_of_inputs() -> None:
    """They come in the form in which the input was given."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, y = loss_inputs()
    parallel = autoshard.parallelize(Loss(), mesh, example_inputs=(x.clone().requires_grad_(), y))
    reference = x.clone().requires_grad_()
    Loss()(reference, y).backward()
    wanted, dp = reference.grad, mesh.get_local_rank("dp")
    assert wanted is not None
    own, whole = x.chunk(2)[dp].clone().requires_grad_(), x.clone().requires_grad_()
    laid = distribute_tensor(x, mesh, [Shard(0), Shard(1)]).requires_grad_()
    for given, part in ((whole, wanted), (own, wanted.chunk(2)[dp]), (laid, wanted)):
        parallel.average.fill_(1.0)
        parallel(given, y).backward()
        found = given.grad
        assert found is not None
        found = found.full_tensor() if isinstance(found, DTensor) else found
        check(relative_error(found, part) < 1e-4, "gradient of an input")
    blind = autoshard.parallelize(Loss(), mesh, example_inputs=(x, y))
    blind.average.fill_(1.0)
    wanted, whole.grad = whole.grad, None
    blind(whole, y).backward()
    check(relative_error(whole.grad, reference.grad) < 1e-4, "an input that is differentiated later")


def misuse() -> None:
    """What would give wrong numbers or an error from deep inside is refused in words."""
    x, y = loss_inputs()
    parallel = autoshard.parallelize(Loss(), "dp=4", example_inputs={"x": x, "y": y})
    raises(autoshard.CaptureError, lambda: parallel(x=x.double(), y=y), "another type")
    raises(autoshard.CaptureError, lambda: parallel(x=x, y=None), "NoneType")
    check(
        relative_error(parallel(x=x, y=y.long()).detach(), Loss()(x, y.long()).detach()) < 1e-5,
        "an int target",
    )
    raises(autoshard.UsageError, lambda: pickle.dumps(parallel), "pickled")
    raises(autoshard.UsageError, lambda: autoshard.parallelize(parallel, "tp=4"), "already")
    loss = parallel(x=x, y=y)
    loss.backward(retain_graph=True)
    raises(autoshard.UsageError, loss.backward, "second time")
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    loss = parallel(x=x, y=y)
    optimizer.step()
    raises(autoshard.UsageError, loss.backward, "changed in place")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, reference = autoshard.parallelize(Loss(), "dp=4", example_inputs={"x": x, "y": y}), Loss()
        check(relative_error(found(x=x, y=y).detach(), reference(x, y).detach()) < 1e-2, "autocast")
    parallel.double()
    raises(autoshard.UsageError, lambda: parallel(x=x, y=y), "torch.float64 on cpu")


def copies_and_whole_weights() -> None:
    """A deep copy is a model of its own, and whole weights can be loaded, also from within a wrapper."""
    x, y = loss_inputs()
    parallel = autoshard.parallelize(Loss(), "fsdp=2,tp=2", example_inputs={"x": x, "y": y})
    twin = copy.deepcopy(parallel)
    twin.load_state_dict(Loss(seed=5).state_dict())
    for model, seed in ((parallel, 3), (twin, 5)):
        wanted = float(Loss(seed)(x, y).detach())
        check(abs(float(model(x=x, y=y).detach()) - wanted) < 1e-5, f"copy with seed {seed}")
    outer = nn.ModuleDict({"inner": parallel})
    outer.load_state_dict({f"inner.{k}": v for k, v in Loss(seed=7).state_dict().items()})
    wanted = float(Loss(7)(x, y).detach())
    check(abs(float(parallel(x=x, y=y).detach()) - wanted) < 1e-5, "loaded through a wrapper")


def lazily_in_inference_mode() -> None:
    """A first call for inference does not keep the model from being trained."""
    x, y = loss_inputs()
    lazy, plain = autoshard.parallelize(Loss(), "dp=2,tp=2"), Loss()
    with torch.inference_mode():
        lazy(x=x, y=y)
    plain(x, y)
    lazy(x=x, y=y).backward()
    plain(x, y).backward()
    same_gradients(lazy, plain, "after inference")


def lazily_and_decorated() -> None:
    """Without example inputs the first call decides; a class and a factory can be decorated."""
    model, inputs = family("gpt2").make()
    plain, _ = family("gpt2").make()
    wanted = float(plain(**inputs).loss.detach())
    lazy = autoshard.parallelize(model, "fsdp=4")
    check(abs(float(lazy(**inputs).loss.detach()) - wanted) < 1e-5, "lazy")

    @autoshard.parallelize(mesh="dp=2,tp=2")
    class Decorated(Tower):
        pass

    @autoshard.parallelize(mesh="tp=4")
    def factory() -> nn.Module:
        return Tower()

    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    reference = Tower()(x)[0].detach()
    for made in (Decorated(), factory()):
        check(relative_error(made(x)[0].full_tensor().detach(), reference) < 1e-5, "decorated")


def dropout(folder: Path) -> None:
    """Masks are the same on replicas, differ between shards and steps, and repeat with the seed."""
    losses = {}
    stored = ("dp=4", "tp=4")
    if dist.get_rank() == 0:
        # captured once, by one rank
        model, inputs = dropout_gpt2()
        analysis = analyse(capture(model, (), inputs))
        for mesh in stored:
            found = plan_analysed(analysis, [Mesh.parse(mesh)], load_cluster("cpu-gloo"), reasons=False)
            save_program(compile_analysed(found), folder / mesh)
    dist.barrier()
    for mesh in (*stored, "dp=2,tp=2"):
        model, inputs = dropout_gpt2()
        if mesh in stored:
            parallel = autoshard.load(folder / mesh, model, seed=7)
        else:
            parallel = autoshard.parallelize(model, mesh, example_inputs=inputs, seed=7)
        losses[mesh] = [float(parallel(**inputs).loss.detach()) for _ in range(2)]
        wanted = float(model_like(parallel).eval()(**inputs).loss.detach())
        check(abs(float(parallel.eval()(**inputs).loss.detach()) - wanted) < 1e-5, "in evaluation")
    first = losses["dp=4"]
    check(abs(first[0] - first[1]) > 1e-4, "two steps have different masks")
    for mesh, found in losses.items():
        check(max(abs(a - b) for a, b in zip(found, first, strict=True)) < 1e-5, f"{mesh}: {losses}")


def model_like(parallel: nn.Module) -> nn.Module:
    """The plain model, with the weights that a parallel one has."""
    model, _ = dropout_gpt2()
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in parallel.state_dict().items()}
    model.load_state_dict(state)
    return model


def checkpoint(folder: Path) -> None:
    """Model and optimizer through torch's own distributed checkpoint, and on with the same losses."""
    x, y = loss_inputs()
    parallel = autoshard.parallelize(Loss(), "fsdp=2,tp=2", example_inputs=(x, y))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)

    def step(module: nn.Module, opt: torch.optim.Optimizer) -> float:
        loss = module(x, y)
        loss.backward()
        autoshard.clip_grad_norm_(module.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return float(loss.detach())

    step(parallel, optimizer)
    dcp.save({"model": parallel.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    wanted = [step(parallel, optimizer) for _ in range(2)]
    other = autoshard.parallelize(Loss(seed=5), "fsdp=2,tp=2", example_inputs=(x, y))
    fresh = torch.optim.AdamW(other.parameters(), lr=1e-2)
    step(other, fresh)
    state = {"model": other.state_dict(), "optimizer": fresh.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    fresh.load_state_dict(state["optimizer"])
    found = [step(other, fresh) for _ in range(2)]
    check(found == wanted, f"{found} after loading, {wanted} before")


def wrong_worlds(folder: Path) -> None:
    model, inputs = Loss(), loss_inputs()
    raises(
        autoshard.UsageError,
        lambda: autoshard.parallelize(model, "dp=2", example_inputs=inputs),
        "world has 4 ranks",
    )
    planned = autoshard.plan(Loss(), "tp=4", example_inputs=inputs)
    program = folder / f"program{dist.get_rank()}"
    autoshard.compile(Loss(), planned).save(program)
    raises(autoshard.UsageError, lambda: autoshard.load(program, Tower()), "another model")
    raises(autoshard.UsageError, lambda: autoshard.load(program, model.to("meta"))(*inputs), "no values")


def large_and_small_messages() -> None:
    """They go different ways over gloo, and may be on their way together."""
    rank, name = dist.get_rank(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    network, memory = Network(name), transport_of(name, torch.device("cpu"))
    check(isinstance(memory, SharedMemory), "the ranks are of one machine")
    for over in (network, memory):
        for rows in (3, 1 << 15):  # 384 bytes, 4 MiB of each rank
            messages_over(over, rows, rank)
        for dtype in (torch.bfloat16, torch.int64):
            types_over(over, dtype, rank)
        uneven_over(over, rank)


def messages_over(over: Transport, rows: int, rank: int) -> None:
    kind = f"{type(over).__name__}, {rows} rows"
    parts = [torch.arange(rows * 32.0).view(rows, 32) + 7 * k for k in range(4)]
    gathered = [over.gather(parts[rank] + n) for n in range(3)]
    whole = torch.cat(parts)
    arriving, part_of = over.scatter(whole * (rank + 1))
    total, finish = over.all_reduce(parts[rank], "sum")
    largest, kept = over.all_reduce(parts[rank], "max")
    swapped = over.all_to_all(torch.cat([(p + rank).view(-1) for p in parts]))
    check(torch.equal(part_of(arriving()), parts[rank] * 10), f"scatter of {kind}")
    for n in (2, 0, 1):  # in any order
        check(torch.equal(gathered[n](), whole + n), f"gather {n} of {kind}")
    check(torch.equal(finish(total()), sum(parts)), f"sum of {kind}")  # type: ignore[arg-type]
    check(torch.equal(kept(largest()), parts[3]), f"largest of {kind}")
    expected = torch.cat([(parts[rank] + k).view(-1) for k in range(4)])
    check(torch.equal(swapped(), expected), f"all-to-all of {kind}")
    # put together where it is sent from, in memory that is used again
    for n in range(3):
        room = over.room(whole.numel(), whole)
        flat = whole.view(-1) + n if room is None else torch.add(whole.view(-1), n, out=room)
        first, second = over.gather(flat), over.all_reduce(whole + n, "sum")
        check(torch.equal(first(), torch.cat([whole.view(-1) + n] * 4)), f"gather of a room of {kind}")
        check(torch.equal(second[1](second[0]()), 4 * (whole + n)), f"sum after it of {kind}")


def types_over(over: Transport, dtype: torch.dtype, rank: int) -> None:
    for count in (5, 1 << 16):
        values = (torch.arange(count) % 7 + rank).to(dtype)
        arriving, finish = over.all_reduce(values, "sum")
        check(torch.equal(finish(arriving()), (torch.arange(count) % 7 * 4 + 6).to(dtype)), f"{dtype}")


def uneven_over(over: Transport, rank: int) -> None:
    """Rank r sends k rows of r to rank k, and none to itself; and passes a row on."""
    sent = [k if k != rank else 0 for k in range(4)]
    received = [rank if k != rank else 0 for k in range(4)]
    got = over.exchange(torch.full((sum(sent), 3), float(rank)), sent, received)()
    expected = torch.tensor([float(k) for k in range(4) for _ in range(received[k])])
    check(torch.equal(got, expected[:, None].expand(-1, 3)), "rows to each")
    out = torch.empty(2, 3)
    over.pass_on(torch.full((2, 3), float(rank)), out, (rank + 1) % 4, (rank - 1) % 4)()
    check(torch.equal(out, torch.full((2, 3), float((rank - 1) % 4))), "from the rank before")


def memory_that_cannot_be_shared() -> None:
    """One rank that cannot is enough, and nobody keeps a file open for it."""
    group = dist.group.WORLD
    assert group is not None
    before = len(os.listdir("/proc/self/fd"))
    near = meet(group)
    check(near is not None and len(os.listdir("/proc/self/fd")) > before, "the ranks have met")
    del near
    check(len(os.listdir("/proc/self/fd")) == before, "what was opened is closed")
    check(meet(group, willing=dist.get_rank() != 1) is None, "a rank is not willing")
    with patch.object(os, "pipe", side_effect=OSError if dist.get_rank() == 2 else os.pipe):
        check(meet(group) is None, "a rank has no files left")
    check(len(os.listdir("/proc/self/fd")) == before, "what was opened in vain is closed")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    outputs_and_their_gradients()
    ways_to_give_inputs()
    buffers_and_accumulation()
    gradients_of_inputs()
    misuse()
    copies_and_whole_weights()
    lazily_in_inference_mode()
    lazily_and_decorated()
    dropout(folder)
    checkpoint(folder / "checkpoint")
    wrong_worlds(folder)
    large_and_small_messages()
    memory_that_cannot_be_shared()
    dist.barrier()
    if dist.get_rank() == 0:
        print("all ways work")
    leave()


if __name__ == "__main__":
    main()
