"""Calls and steps as CUDA graphs, but for CUDA's part: a recording here calls its function at every replay,
and puts what that gives where the first one gave it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from codegen_worker import X, net
from families import family
from faulty import good
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

import autoshard
from autoshard.cluster import Mesh
from autoshard.errors import UsageError
from autoshard.program.store import save_program
from autoshard.runtime import graphs
from autoshard.runtime.transport.network import Network
from autoshard.torch_adapters.cuda_graphs import CudaGraphRecorder
from benchmarks.gpu_steps import process_group
from benchmarks.local_copies import LocalCopies

STEPS = 5


class CallingRecorder:
    """Records on the CPU."""

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        results = call()
        first = [True]

        def replay() -> None:
            if first.pop() if first else False:
                return
            leaves = zip(pytree.tree_leaves(results), pytree.tree_leaves(call()), strict=True)
            for fixed, made in leaves:
                if isinstance(fixed, torch.Tensor):
                    fixed.copy_(made)

        return replay, results


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(graphs, "recorder_on", lambda device: CallingRecorder)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parallel(model: nn.Module, inputs: Any = (X,), **options: Any) -> Any:
    return autoshard.parallelize(model, "dp=1", example_inputs=inputs, cluster="cpu-gloo", **options)


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(step))


def both(dropout: float = 0.0, **options: Any) -> tuple[Any, Any]:
    """(op by op, with graphs)."""
    plain, graphed = (parallel(net(2, dropout), cuda_graphs=on, **options) for on in (False, True))
    return plain, graphed


def graphs_in(model: Any) -> Any:
    return model._autoshard.graphs


def equal(one: nn.Module, other: nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.detach().to_local(), q.detach().to_local())  # type: ignore[attr-defined]


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_training_is_the_same(dropout: float, to_none: bool) -> None:
    """Every step has its own batch and its own masks."""
    models = both(dropout)
    losses: list[list[torch.Tensor]] = [[], []]
    for model, kept in zip(models, losses, strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            loss = model(batch(step))
            kept.append(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    assert graphs_in(models[1])._calls
    # also those that the user kept while the memory of the graph was written anew
    assert list(map(torch.Tensor.item, losses[0])) == list(map(torch.Tensor.item, losses[1]))
    equal(*models)


def test_gradients_of_several_calls_are_added_up() -> None:
    models = both()
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            for part in range(3):
                model(batch(3 * step + part)).backward()
            optimizer.step()
            optimizer.zero_grad()
    equal(*models)


def test_two_calls_before_their_backward(capfd: pytest.CaptureFixture[str]) -> None:
    models = both()
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            (model(batch(step)) * model(batch(step + 9))).backward()
            optimizer.step()
            with torch.no_grad():
                model(batch(7))
            model(batch(8))  # dropped
    equal(*models)
    assert capfd.readouterr().err.count("runs without its CUDA graph") == 1


def test_what_is_released_is_recorded_anew() -> None:
    models = both()
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2 * STEPS):
            model(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == STEPS:
                model.release_graphs()
    equal(*models)
    graphs_in(models[1]).release()
    assert not graphs_in(models[1])._calls


def test_a_model_with_graphs_is_freed() -> None:
    model = both()[1]
    for step in range(STEPS):
        model(batch(step)).backward()
        model.zero_grad()
    known = weakref.ref(graphs_in(model))
    assert known()._calls
    del model
    gc.collect()
    assert known() is None


def test_a_gradient_that_someone_keeps_is_told() -> None:
    model = both()[1]
    kept = []
    with pytest.raises(UsageError, match=r"gradient of layers\.\d.* of an earlier step is still in use"):
        for step in range(STEPS):
            model(batch(step)).backward()
            kept.append(next(iter(model.parameters())).grad)
            model.zero_grad()
    assert len(kept) == graphs.WARM + 1


def test_parameters_that_move_are_recorded_anew() -> None:
    models = both()
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2 * STEPS):
            if step == STEPS:
                state = {k: v.clone() for k, v in model.state_dict().items()}
                model.load_state_dict(state, assign=True)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    equal(*models)


class Normed(nn.Module):
    """With running statistics, and an output beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(16, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(self.inner(x.flatten(0, 1)))
        return y.square().mean() + y.tanh().mean(), y


def test_buffers_and_other_outputs() -> None:
    found = []
    for on in (False, True):
        torch.manual_seed(0)
        model = parallel(Normed(), cuda_graphs=on)
        outs = []
        for step in range(STEPS):
            loss, y = model(batch(step))
            outs.append(y)
            loss.backward()
            model.zero_grad()
        found.append((outs, dict(model.named_buffers())))
    for a, b in zip(*(outs for outs, _ in found), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())
    for name, buffer in found[0][1].items():
        assert torch.equal(buffer, found[1][1][name]), name


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_step_of_microbatches(dropout: float) -> None:
    models = both(dropout, microbatches=2)
    losses: list[list[torch.Tensor]] = [[], []]
    for model, kept in zip(models, losses, strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            big = torch.cat([batch(step), batch(step + 50)])
            for _ in range(2):
                kept.append(model.train_step((big,)))
            optimizer.step()
            optimizer.zero_grad()
    assert graphs_in(models[1])._steps
    assert list(map(torch.Tensor.item, losses[0])) == list(map(torch.Tensor.item, losses[1]))
    equal(*models)


def test_what_is_frozen_for_a_while() -> None:
    models = both(microbatches=2)
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3 * STEPS):
            model.layers[0].requires_grad_(step // STEPS != 1)
            model.train_step((torch.cat([batch(step), batch(step + 50)]),))
            assert (model.layers[0].inner.weight.grad is None) is (step // STEPS == 1)
            optimizer.step()
            optimizer.zero_grad()
    equal(*models)


@pytest.mark.parametrize("name", ["llama", "t5", "bert"])
def test_families(name: str) -> None:
    found = []
    for on in (False, True):
        model, inputs = family(name).make()
        made = parallel(model, inputs, cuda_graphs=on)
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
        for _ in range(STEPS):
            loss = made(**inputs).loss if isinstance(inputs, dict) else made(*inputs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(made)
    equal(*found)


def test_what_changes_from_call_to_call_is_refused() -> None:
    model, inputs = family("mixtral").make()
    with pytest.raises(UsageError, match="waits for the device"):
        parallel(model, inputs, cuda_graphs=True)
    model, inputs = family("llama-packed").make()
    with pytest.raises(UsageError, match="attention by documents"):
        parallel(model, inputs, cuda_graphs=True)
    ring: Any = SimpleNamespace(program=replace(good("ring-documents"), cuda_graphs=True))
    with pytest.raises(UsageError, match="attention by documents"):
        graphs.graphs_of(ring)
    with pytest.raises(UsageError, match="host memory"):
        parallel(net(2), cuda_graphs=True, offload="optimizer,parameters")


def test_the_folder_says_it_and_a_call_of_load_overrides_it(tmp_path: Path) -> None:
    planned = autoshard.plan(net(1), "dp=1", cluster="cpu-gloo", example_inputs=(X,))
    save_program(autoshard.compile(net(1), planned, cuda_graphs=True).program, tmp_path / "program")
    for given, wanted in ((None, True), (False, False)):
        model = autoshard.load(tmp_path / "program", net(1), cuda_graphs=given)
        assert (graphs_in(model) is not None) is wanted


def test_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(UsageError, match="cuda_graphs=True on cpu"):
        parallel(net(2), cuda_graphs=True)


@pytest.mark.gpu
def test_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's own recordings: of one rank with NCCL, and of eight whose messages are copies."""
    monkeypatch.undo()
    dist.destroy_process_group()
    device = torch.device("cuda", 0)
    for codegen, mesh, dropout in (
        ("inductor", "dp=1", 0.5),
        ("interpreter", "dp=1", 0.5),
        ("inductor", "fsdp=8", 0.0),
        ("interpreter", "fsdp=2,tp=4", 0.0),
    ):
        shape = Mesh.parse(mesh)
        with process_group(shape.world_size):
            monkeypatch.setattr("autoshard.runtime.runner.transport_of", lambda name, _: LocalCopies(name))
            devices = init_device_mesh("cuda", shape.sizes, mesh_dim_names=shape.names)
            found = []
            for on in (False, True):
                model = autoshard.parallelize(
                    net(2, dropout).to(device),
                    devices,
                    example_inputs=(batch(0).repeat(2, 1, 1).to(device),),
                    cluster="h100-dgx",
                    codegen=codegen,
                    cuda_graphs=on,
                )
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                losses = []
                for step in range(2 * STEPS):
                    loss = model(batch(step).repeat(2, 1, 1))  # from the host
                    losses.append(loss.detach())
                    loss.backward()
                    if step % 2:
                        optimizer.step()
                        optimizer.zero_grad()
                found.append((model, torch.stack(losses)))
            assert graphs_in(found[1][0])._calls
            # Inductor chooses by timing, so that two models may add up in another order
            exact = {"rtol": 0.0, "atol": 0.0} if codegen == "interpreter" else {"rtol": 1e-5, "atol": 1e-7}
            torch.testing.assert_close(found[1][1], found[0][1], **exact)
            for p, q in zip(*(model.parameters() for model, _ in found), strict=True):
                torch.testing.assert_close(q.to_local(), p.to_local(), **exact)
            found[1][0].release_graphs()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)


@pytest.mark.gpu
def test_messages_are_recorded() -> None:
    dist.destroy_process_group()
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    over = Network(mesh.get_group("dp").group_name)
    x = torch.arange(12.0, device="cuda").view(4, 3)

    def run() -> list[torch.Tensor]:
        arriving, finish = over.scatter(x * 2)
        added, finish_sum = over.all_reduce(x + 1, "sum")
        return [over.gather(x * 3)(), finish(arriving()), finish_sum(added()), over.all_to_all(x.view(-1))()]

    run()
    replay, made = CudaGraphRecorder().record(run)
    for factor in (1.0, 5.0):
        x.mul_(factor)
        replay()
        for found, wanted in zip(made, (x * 3, x * 2, x + 1, x.view(-1)), strict=True):
            assert torch.equal(found, wanted)
    del replay, made, found
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
