"""What planning with Muon counts: the products that `autoshard.Muon` makes, and the state that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest
import torch
from planned import analysed
from preconditioned import Shampoo, Soap
from torch.utils.flop_counter import FlopCounterMode

import autoshard
from autoshard.cluster import load_cluster
from autoshard.cost.compute import flop_rate
from autoshard.cost.link import AxisLink
from autoshard.cost.orthogonal import owner_seconds, preconditioning_flop, without_tables
from autoshard.cost.recipe import ADAMW, MUON, SHAMPOO, SOAP, Recipe, hosted
from autoshard.errors import UsageError
from autoshard.ir import TensorType
from autoshard.ir.offload import Offload
from autoshard.report.summary import summarise
from autoshard.runtime.optim.muon import newton_schulz

H100 = load_cluster("h100-dgx")


@pytest.mark.parametrize("shape", [(32, 96), (96, 32), (5, 48, 64)])
def test_products_are_those_of_the_optimizer(shape: tuple[int, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        newton_schulz(torch.randn(shape).bfloat16(), (3.4445, -4.7750, 2.0315), MUON.iterations, 1e-7)
    rate = flop_rate("bf16", H100.device, matmul=True)
    seconds = counter.get_total_flops() / rate
    assert owner_seconds(MUON, TensorType(shape, "f32"), H100.device, []) == pytest.approx(seconds)
    slow, fast = (AxisLink(1e-6, bandwidth, 4) for bandwidth in (1.0, 1e30))
    assert owner_seconds(MUON, TensorType(shape, "f32"), H100.device, [fast]) == pytest.approx(seconds / 4)
    # in bfloat16 to an owner and back, each rank its part
    assert owner_seconds(MUON, TensorType(shape, "f32"), H100.device, [slow]) == pytest.approx(
        4 * prod(shape) / 4
    )


@pytest.mark.parametrize(("recipe", "kind"), [(SOAP, Soap), (SHAMPOO, Shampoo)])
def test_products_of_preconditioners(recipe: Recipe, kind: Callable[..., torch.optim.Optimizer]) -> None:
    per = recipe.preconditioners
    assert per is not None
    rows, columns, every = 24, 40, per.every
    p = torch.nn.Parameter(torch.randn(3, rows, columns))
    optimizer = kind([p], every=every)
    counts = []
    for _ in range(1 + every):
        p.grad = torch.randn_like(p)
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        counts.append(counter.get_total_flops())
    # without decompositions, which are not counted
    products = replace(per, renewed=2.0)
    counted = replace(recipe, preconditioners=products)
    assert sum(counts[1:]) / every == pytest.approx(preconditioning_flop(counted, p.shape))
    seconds = preconditioning_flop(recipe, p.shape) / flop_rate("f32", H100.device, matmul=True)
    type_ = TensorType(tuple(p.shape), "f32")
    updated = (3 + 2 * recipe.moments) * type_.nbytes / H100.device.traffic
    assert owner_seconds(recipe, type_, H100.device, []) == pytest.approx(seconds + updated)
    # gradient and parameter to an owner, and the parameter back
    slow = AxisLink(1e-6, 1.0, 4)
    assert owner_seconds(recipe, type_, H100.device, [slow]) == pytest.approx(3 * type_.nbytes / 4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_lookups_and_heads_are_of_adamw(name: str) -> None:
    folded = analysed(name).folded
    recipe = without_tables(MUON, folded)
    ports = [p for p in folded.joint.ports if p.kind == "param"]
    taken = {p.target for p in ports if recipe.of(p).iterations}
    assert {p.target for p in ports if recipe.of(p).moments == 2} == {p.target for p in ports} - taken
    assert all(len(p.type.shape) in (2, 3) for p in ports if p.target in taken)
    looked_up = ("embed", "wte", "wpe", "lm_head")
    assert recipe.tables and not any(word in target for target in taken for word in looked_up)
    matrices = {p.target for p in ports if len(p.type.shape) in (2, 3)}
    assert matrices - taken == recipe.tables


def test_a_plan_counts_one_moment_of_a_matrix() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64, bias=False)
    )
    x = torch.randn(16, 64)
    plans = {
        name: autoshard.plan(model, "fsdp=4", cluster="cpu-gloo", example_inputs=(x,), optimizer=name)
        for name in ("adamw", "muon")
    }
    found = {n: summarise(p.plan, p.analysis, p.solution) for n, p in plans.items()}
    matrices, vectors = 2 * 64 * 128, 128
    state = 4 * (matrices + 2 * vectors) / 4
    assert found["muon"].optimizer_bytes == pytest.approx(state)
    assert found["adamw"].optimizer_bytes == pytest.approx(2 * 4 * (matrices + vectors) / 4)
    steps = [found[name].step for name in ("muon", "adamw")]
    assert steps[0] is not None and steps[1] is not None and steps[0].optimizer > steps[1].optimizer


@pytest.mark.parametrize("mesh", ["fsdp=4", "dp=4", "tp=4", "pp=2,fsdp=2"])
def test_a_plan_counts_preconditioners_at_owners(mesh: str) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64, bias=False)
    )
    x = torch.randn(16, 64)
    plans = {
        name: autoshard.plan(model, mesh, cluster="cpu-gloo", example_inputs=(x,), optimizer=name)
        for name in ("adamw", "soap", "shampoo")
    }
    found = {n: summarise(p.plan, p.analysis, p.solution) for n, p in plans.items()}
    vectors = found["adamw"].optimizer_bytes - 2 * 4 * 2 * 64 * 128 / (1 if mesh == "dp=4" else 4)
    for name, moments in (("soap", 2), ("shampoo", 1)):
        matrix = 4 * (moments * 64 * 128 + 2 * (64**2 + 128**2))
        assert found[name].optimizer_bytes == pytest.approx(2 * matrix / 4 + vectors)


def test_an_update_moves_what_it_reads_and_writes() -> None:
    # parameter and moments twice, the gradient once; in bfloat16 to the owner and back
    assert ADAMW.update_bytes(4) == (2 + 2 * 2 + 1) * 4
    assert MUON.update_bytes(4) == (2 + 2 * 1 + 1) * 4 + 4 * 2


@pytest.mark.parametrize("recipe", [MUON, SOAP, SHAMPOO])
def test_states_in_host_memory_are_refused(recipe: Recipe) -> None:
    with pytest.raises(UsageError, match=f"states of {recipe.name} cannot live in host memory"):
        hosted(recipe, Offload.parse("optimizer"), H100.device)
