"""Started by torchrun: ways of training a pipeline on four processes; any failed check ends it."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo_api_worker import check, raises
from leaving import leave
from lockstep_check import relative_error
from pipelines import cuts_of, model_and_batch, pipeline
from sampling import all_cases, sampled
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autoshard
from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.planning import plan_analysed
from autoshard.program.program import Program
from autoshard.program.store import load_program, save_program
from autoshard.runtime.groups import device_mesh_for
from autoshard.runtime.module import bind
from autoshard.search.plan.plan import Cut, Pipeline

ADAM = {"lr": 1e-2, "eps": 1e-4}
COUNT = 4


class Small(nn.Module):
    """Norms with running statistics between layers, and a weight that the first and the last layer share."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 3, norms: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])
        self.layers[5].weight = self.layers[0].weight
        self.norms = nn.ModuleList([nn.BatchNorm1d(16) if norms else nn.Identity() for _ in range(6)])
        self.to(dtype)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.tanh(norm(layer(x)))
        return {"loss": (x - y).square().mean(), "x": x.detach()}


def small_batch(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {k: torch.randn(8 * COUNT, 16, generator=generator).to(dtype) for k in ("x", "y")}


@functools.cache
def analysed(dtype: torch.dtype, norms: bool) -> Analysis:
    piece = {k: v[: len(v) // COUNT] for k, v in small_batch(dtype).items()}
    return analyse(capture(Small(dtype, norms=norms), (), piece))


@functools.cache
def made(
    ranks: int,
    mesh: str,
    schedule: str,
    chunks: int = 1,
    dtype: torch.dtype = torch.float32,
    norms: bool = True,
) -> Program:
    """A pipeline of `Small`; position: pp is the first axis."""

    def make() -> Program:
        wanted = [Mesh.parse(mesh)]
        found = plan_analysed(analysed(dtype, norms), wanted, load_cluster("cpu-gloo"), reasons=False)
        plan = replace(found.plan, microbatches=COUNT)
        if ranks > 1:
            cuts: tuple[Cut, ...] = cuts_of(found.analysis.folded, ranks * chunks)
            plan = replace(plan, pipeline=Pipeline(ranks, 0, schedule, chunks, cuts))
        return compile_analysed(replace(found, plan=plan))

    return shared(make, f"{ranks}-{mesh}-{schedule}-{chunks}-{dtype}-{norms}")


def shared(make: Callable[[], Program], name: str) -> Program:
    """A program that the first rank makes and all ranks load."""
    folder = Path(sys.argv[1]) / name
    if dist.get_rank() == 0 and not folder.exists():
        save_program(make(), folder)
    dist.barrier()
    return load_program(folder)


def bound(program: Program, model: nn.Module, mesh: DeviceMesh | None = None, seed: int = 0) -> nn.Module:
    return bind(program, model, device_mesh_for(program.full_mesh, mesh), seed=seed)


def eager_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Forward and backward of all microbatches: the mean of their losses, whose gradients are added up."""
    total = 0.0
    for k in range(COUNT):
        out = model(**{n: x.chunk(COUNT)[k] for n, x in batch.items()})
        loss = out["loss"] / COUNT
        loss.backward()
        total += float(loss.detach())
    return total


def same(found: nn.Module, wanted: nn.Module, what: str, limit: float = 1e-4) -> None:
    """Parameters, gradients and buffers of this rank are those of the model on one device."""
    reference = dict(wanted.named_parameters(remove_duplicate=False))
    for name, p in found.named_parameters():
        q = reference[name]
        check(relative_error(p.detach().full_tensor(), q.detach()) < limit, f"{what}: {name}")
        if q.grad is not None and p.grad is not None:
            check(relative_error(p.grad.full_tensor(), q.grad) < limit, f"{what}: gradient of {name}")
        else:
            check(p.grad is None and q.grad is None, f"{what}: {name} has a gradient on one side")
    buffers = dict(wanted.named_buffers())
    for name, b in found.named_buffers():
        error = relative_error(b.double(), buffers[name].double())
        check(error < limit, f"{what}: buffer {name} is off by {error:.1e}")


def accumulation_and_running_statistics() -> None:
    """Two steps without zero_grad; buffers are those of the last microbatch, in every schedule."""
    batch = small_batch()
    for ranks, mesh, schedule, chunks in (
        (4, "dp=1", "1f1b", 1),
        (2, "dp=2", "interleaved", 2),
        (2, "tp=2", "zb-v", 2),
        (2, "fsdp=2", "breadth-first", 2),
        (2, "dp=2", "zb-h1", 1),
        (1, "dp=2,tp=2", "", 1),
    ):
        plain, model = Small(), Small()
        parallel = bound(made(ranks, mesh, schedule, chunks), model)
        for _ in range(2):
            wanted, found = eager_step(plain, batch), float(parallel.train_step(batch))
            check(abs(wanted - found) < 1e-5 * abs(wanted), f"{schedule}: loss {found}, not {wanted}")
        same(parallel, plain, f"{schedule} {mesh}")


def clipping() -> None:
    """By any norm, the same for all ranks, and for a deep copy as well."""
    batch = small_batch()
    for norm in (2.0, float("inf"), 1.0):
        for ranks, mesh in ((4, "dp=1"), (2, "fsdp=2"), (2, "tp=2")):
            plain, model = Small(), Small()
            parallel = bound(made(ranks, mesh, "1f1b"), model)
            twin = copy.deepcopy(parallel)
            parallel.layers.to("cpu")  # puts other tensors in the place of parameters
            eager_step(plain, batch)
            wanted = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm))
            for subject in (parallel, twin):
                subject.train_step(batch)
                found = float(autoshard.clip_grad_norm_(subject, 0.01, norm))
                check(abs(found - wanted) < 1e-4 * wanted, f"norm {norm}, {mesh}: {found}, not {wanted}")
                same(subject, plain, f"clipped by {norm}, {mesh}")


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> float:
    loss = model.train_step(batch)
    autoshard.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def checkpoints(folder: Path) -> None:
    """Model and optimizer, saved and loaded by name, and training goes on as if nothing had happened."""
    batch = small_batch()
    model = Small()
    program = made(2, "fsdp=2", "interleaved", 2)
    parallel = bound(program, model)
    optimizer = torch.optim.AdamW(parallel.parameters(), **ADAM)
    trained(parallel, optimizer, batch)
    state = {
        "model": parallel.state_dict(),
        "optimizer": get_optimizer_state_dict(parallel, optimizer),
    }
    dcp.save(state, checkpoint_id=folder)
    wanted = [trained(parallel, optimizer, batch) for _ in range(2)]
    other = bound(program, Small(seed=9))
    fresh = torch.optim.AdamW(other.parameters(), **ADAM)
    trained(other, fresh, batch)
    state = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, fresh)}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    set_optimizer_state_dict(other, fresh, state["optimizer"])
    found = [trained(other, fresh, batch) for _ in range(2)]
    check(found == wanted, f"{found} after loading, {wanted} before")
    # whole weights of the model on one device, of which each rank takes its own
    other.load_state_dict(Small(seed=5).state_dict())
    loss = float(other.train_step(batch))
    wanted_loss = eager_step(Small(seed=5), batch)
    check(abs(loss - wanted_loss) < 1e-5 * wanted_loss, "whole weights loaded")


def misuse() -> None:
    """Refused on every rank in words, and the next step is as good as ever."""
    batch = small_batch()
    for ranks, mesh, schedule in ((4, "dp=1", "gpipe"), (2, "dp=2", "1f1b")):
        plain, model = Small(), Small()
        parallel = bound(made(ranks, mesh, schedule), model)
        raises(autoshard.UsageError, lambda: parallel(**batch), "train_step")  # noqa: B023
        for wrong in (
            {k: v[:5] for k, v in batch.items()},
            {k: v[:4] for k, v in batch.items()},
            {k: torch.cat([v, v]) for k, v in batch.items()},
            {k: v[:0] for k, v in batch.items()},
            {**batch, "y": batch["y"][:8]},
            {**batch, "y": batch["y"][:, :8]},
            {k: v.double() for k, v in batch.items()},
        ):
            raises(autoshard.UsageError, lambda: parallel.train_step(wrong), "input")  # noqa: B023
        raises(autoshard.UsageError, lambda: parallel.train_step({"x": batch["x"]}), "y")  # noqa: B023
        parallel.eval()
        raises(autoshard.UsageError, lambda: parallel.train_step(batch), "eval")  # noqa: B023
        parallel.train()
        wanted, found = eager_step(plain, batch), float(parallel.train_step(batch))
        check(abs(wanted - found) < 1e-5 * abs(wanted), f"{found} after misuse, {wanted} wanted")
        same(parallel, plain, f"after misuse, {schedule}")


def other_batches() -> None:
    """Steps of other numbers of sequences, planned once; without gradients, too; pipelines and steps of one
    stage."""

    def some(rows: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(rows)
        return {k: torch.randn(rows, 16, generator=generator) for k in ("x", "y")}

    for mesh, options in (("pp=2,dp=2", {"microbatches": 4}), ("dp=4", {"global_batch": 16})):
        plain, model = Small(norms=False), Small(norms=False)
        example = some(16 if "pp" in mesh else 4)
        parallel = autoshard.parallelize(model, mesh, example_inputs=example, **options)
        for rows in (16, 24, 12, 7, 16):
            batch = some(rows)
            without = float(parallel.eval_step(batch))
            outputs, expected = parallel.eval_outputs(batch), plain(**batch)
            torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-6)
            check(not parallel.eval_outputs(batch, ["x"])["x"].numel(), "an output that is ignored")
            check(all(p.grad is None for p in parallel.parameters()), "gradients of an evaluation")
            found, loss = float(parallel.train_step(batch)), plain(**batch)["loss"]
            loss.backward()
            wanted = float(loss.detach())
            for loss in (without, found):
                check(abs(wanted - loss) < 1e-5 * abs(wanted), f"{mesh}: {loss} of {rows} rows, not {wanted}")
            same(parallel, plain, f"{rows} rows on {mesh}")
            for each in (plain, parallel):
                each.zero_grad()
    alone = autoshard.parallelize(Small(norms=False), "pp=2,dp=2", example_inputs=some(16), microbatches=4)
    alone.train_step(some(16))
    for rows in (1, 7):
        found, wanted = float(alone.train_step(some(rows))), float(Small(norms=False)(**some(rows))["loss"])
        check(abs(wanted - found) < 1e-5 * abs(wanted), f"{rows} rows: {found}, not {wanted}")
    own = autoshard.parallelize(Small(norms=False), "pp=2,dp=2", example_inputs=some(16), microbatches=2)
    number = own._autoshard.place_mesh.get_local_rank("dp")
    for rows in (16, 12, 4, 2):
        part = {k: x.chunk(2)[number] for k, x in some(rows).items()}
        found, wanted = float(own.train_step(part)), float(Small(norms=False)(**some(rows))["loss"])
        check(abs(wanted - found) < 1e-5 * abs(wanted), f"ranks' rows of {rows}: {found}, not {wanted}")


class Asked(nn.Module):
    """Dropout between layers, a weight that two stages share, and arguments that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])
        self.layers[5].weight = self.layers[0].weight
        self.extra = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.2)

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        more: torch.Tensor | None = None,
        scale: float = 1.0,
        hidden: bool = False,
    ) -> dict[str, torch.Tensor]:
        for number, layer in enumerate(self.layers):
            x = self.drop(x + torch.tanh(layer(x)))
            if number == 3 and more is not None:
                x = x + self.extra(more)
        found = {"loss": (x - y).square().mean() * scale}
        return {**found, "x": x} if hidden else found


def other_calls() -> None:
    """Steps in another mode, and with other arguments: every parameter stays on its stage."""

    def some(rows: int, *names: str) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(rows)
        return {k: torch.randn(rows, 16, generator=generator) for k in ("x", "y", *names)}

    for mesh, options in (
        ("pp=2,dp=2", {"microbatches": 4}),
        *([("pp=2,tp=2", {"schedule": "interleaved", "microbatches": 2})] if all_cases() else []),
    ):
        plain, model = Asked(), Asked()
        parallel = autoshard.parallelize(model, mesh, example_inputs=some(16, "more"), **options)
        parallel.train_step(some(16, "more"))
        parallel.train_step(some(16))  # without `more`, nor a gradient of `extra`
        for each in (plain, parallel):
            each.eval().zero_grad()
        for batch in (
            some(16, "more"),
            some(16),
            {**some(16), "scale": 2.0},
            {**some(16), "scale": 3.0},
            {**some(16, "more"), "hidden": True},
            some(12),
        ):
            found, loss = float(parallel.train_step(batch)), plain(**batch)["loss"]
            loss.backward()
            wanted = float(loss.detach())
            check(abs(wanted - found) < 1e-5 * abs(wanted), f"{mesh}: {found}, not {wanted}: {list(batch)}")
            without = float(parallel.eval_step(batch))
            check(abs(wanted - without) < 1e-5 * abs(wanted), f"{mesh}: {without}, not {wanted}")
            same(parallel, plain, f"{list(batch)} on {mesh}")
            for each in (plain, parallel):
                each.zero_grad()


class Twice(nn.Module):
    """A module with two names, and running statistics that evaluation need not count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.middle = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.last = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(self.norm(torch.tanh(self.first(x)))))).square().mean()


def evaluation() -> None:
    """Of what training has changed, with the statistics on one stage and a module on both."""
    plain, x = Twice(), small_batch()["x"]
    parallel = autoshard.parallelize(Twice(), "pp=2,dp=2", example_inputs=(x,), microbatches=1)
    for each in (plain, parallel):
        for training in (True, False):
            each.train(training)
            loss = each.train_step((x,)) if each is parallel else each(x)
            if each is plain:
                loss.backward()
    same(parallel, plain, "training and evaluation")
    with torch.no_grad():
        wanted = float(plain(x))
    for found in (float(parallel.eval_step((x,))), float(parallel.eval_outputs((x,)))):
        check(abs(found - wanted) < 1e-5 * abs(wanted), f"evaluation: {found}, not {wanted}")


def meshes_of_the_user() -> None:
    """Axes in any order: a rank's own part of the batch is where the mesh of the user says."""
    batch = small_batch()
    program = made(2, "dp=2", "1f1b", norms=False)
    given = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")),
        DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("pp", "dp")),
        DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("dp", "pp")),
    )
    for mesh in given:
        plain = Small(norms=False)
        parallel = bound(program, Small(norms=False), mesh)
        own = {k: v.chunk(2)[mesh.get_local_rank("dp")] for k, v in batch.items()}
        wanted = eager_step(plain, batch)
        for given_batch in (batch, own):
            parallel.zero_grad()
            found = float(parallel.train_step(given_batch))
            check(abs(wanted - found) < 1e-5 * abs(wanted), f"{mesh}: {found}, not {wanted}")
            same(parallel, plain, str(mesh))
    turned = DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]]), mesh_dim_names=("pp", "dp"))
    raises(autoshard.UsageError, lambda: bound(program, Small(norms=False), turned), "ascend")
    alone = made(4, "dp=1", "1f1b")
    for names, sizes in ((("pp",), (4,)), (("pp", "dp"), (4, 1)), (("dp", "pp"), (1, 4))):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        parallel = bound(alone, Small(), mesh)
        plain = Small()
        wanted, found = eager_step(plain, batch), float(parallel.train_step(batch))
        check(abs(wanted - found) < 1e-5 * abs(wanted), f"{mesh}: {found}, not {wanted}")
        same(parallel, plain, str(mesh))
    single = made(1, "dp=2,tp=2", "", norms=False)
    mesh = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("tp", "dp"))
    parallel, plain = bound(single, Small(norms=False), mesh), Small(norms=False)
    own = {k: v.chunk(2)[mesh.get_local_rank("dp")] for k, v in batch.items()}
    wanted, found = eager_step(plain, batch), float(parallel.train_step(own))
    check(abs(wanted - found) < 1e-5 * abs(wanted), f"{mesh}: {found}, not {wanted}")
    same(parallel, plain, str(mesh))


def dropout() -> None:
    """The same masks however the model is cut; other ones in the next step."""
    _, batch = model_and_batch("gpt2-dropout", COUNT)
    losses: dict[str, list[float]] = {}
    for ranks, mesh, schedule, chunks in (
        (4, "dp=1", "1f1b", 1),
        (2, "dp=2", "interleaved", 2),
        (2, "tp=2", "zb-h1", 1),
    ):
        model, _ = model_and_batch("gpt2-dropout", 1)
        make = functools.partial(pipeline, "gpt2-dropout", ranks, mesh, schedule, COUNT, chunks)
        program = shared(make, f"dropout-{schedule}")
        parallel = bound(program, model, seed=7)
        losses[schedule] = [float(parallel.train_step(batch)) for _ in range(2)]
    first = losses["1f1b"]
    check(abs(first[0] - first[1]) > 1e-4, "two steps have different masks")
    for schedule, found in losses.items():
        check(max(abs(a - b) for a, b in zip(found, first, strict=True)) < 1e-5, f"{schedule}: {losses}")


def half_precision() -> None:
    """Gradients are added up in float32: nearer to the truth than in bfloat16."""
    batch = small_batch(torch.bfloat16)
    model = Small(torch.bfloat16, norms=False)
    exact = copy.deepcopy(model).double()
    halves = copy.deepcopy(model)
    parallel = bound(made(4, "dp=1", "1f1b", dtype=torch.bfloat16, norms=False), model)
    eager_step(exact, {k: v.double() for k, v in batch.items()})
    eager_step(halves, batch)
    parallel.train_step(batch)
    reference = dict(exact.named_parameters(remove_duplicate=False))
    plain = dict(halves.named_parameters(remove_duplicate=False))
    off = torch.zeros(2, dtype=torch.float64)
    for name, p in parallel.named_parameters():
        check(p.grad.dtype == torch.bfloat16, f"{name} has a gradient of {p.grad.dtype}")
        wanted = reference[name].grad
        off[0] += (p.grad.full_tensor().double() - wanted).square().sum()
        off[1] += (plain[name].grad.double() - wanted).square().sum()
    dist.all_reduce(off)
    check(float(off[0]) < float(off[1]), f"squared errors {off.tolist()}: ours, then those of bfloat16")


def main(chosen: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ways: tuple[Callable[..., Any], ...] = (
        accumulation_and_running_statistics,
        clipping,
        checkpoints,
        misuse,
        other_batches,
        other_calls,
        evaluation,
        meshes_of_the_user,
        dropout,
        half_precision,
    )
    for way in ways if chosen else sampled(ways, 2, lambda way: way.__name__):
        if not chosen or way.__name__ in chosen:
            way(*([Path(sys.argv[1]) / "checkpoint"] if way is checkpoints else []))
            dist.barrier()
            if dist.get_rank() == 0:
                print(f"{way.__name__} works", flush=True)
    leave()


if __name__ == "__main__":
    main(sys.argv[2:])
