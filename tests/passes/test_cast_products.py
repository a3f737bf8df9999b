"""Products of 8-bit operands against a model whose linear layers make the casts by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from calls_worker import batch, build
from lockstep_check import compare_step
from scaled_layers import E4, FORMATS, by_hand, wide_llama
from torch import nn

import autoshard
from autoshard.cluster import load_cluster
from autoshard.errors import UsageError
from autoshard.ir import Call, Node, Ref, refs_of, substitute
from autoshard.ir import scaled as ir_scaled
from autoshard.ir.scaled import CAST_SCALED, SCALED_MM
from autoshard.ops import scaled
from autoshard.program.program import Program
from autoshard.simulate.step import estimate_step
from autoshard.verify.lockstep import verify
from autoshard.verify.static import verify_static
from benchmarks.gpu_steps import StepCase

#: a value between two codes may be rounded to either where sums are added up in another order
RTOL = 4e-3


def compiled(model: nn.Module, mesh: str, products: str, **options: Any) -> Program:
    inputs = batch(8, 32)
    planned = autoshard.plan(model, mesh, example_inputs=inputs, products=products, **options)
    assert planned.plan.products == products
    return autoshard.compile(model, planned, example_inputs=inputs).program


def test_every_name_has_a_format() -> None:
    assert tuple(ir_scaled.FORMATS) == FORMATS


@pytest.mark.parametrize("products", [name for name in FORMATS if name != "nvfp4"])
@pytest.mark.parametrize("mesh", ["dp=1", "fsdp=2,tp=2", "dp=2,seq=2"])
def test_a_step_is_that_of_layers_by_hand(products: str, mesh: str) -> None:
    model = build("Llama")
    program = compiled(model, mesh, products)
    hand = by_hand(model, products, lambda name: name != "lm_head")
    errors = compare_step(program, hand, batch(8, 32))
    assert max(errors.values()) < RTOL, errors
    plain = compare_step(program, model, batch(8, 32))
    assert max(plain.values()) > 3 * max(max(errors.values()), 1e-3)


def nodes_of(program: Program) -> list[Node]:
    return [n for s in program.lowered.segments.values() for n in s.graph.nodes]


def test_only_products_of_modules_that_are_named_are_cast() -> None:
    program = compiled(build("Llama"), "tp=2", "float8-rowwise:*.mlp.*,*.o_proj")
    modules = {n.origin.fqn.split(".", 3)[3] for n in nodes_of(program) if n.op == SCALED_MM}
    assert modules == {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"}


def test_layers_differ_where_only_some_are_named() -> None:
    model = wide_llama(layers=5)
    program = compiled(model, "fsdp=2", "float8-rowwise:*.[1-3].mlp.*")
    calls = [i.segment for i in program.lowered.main if isinstance(i, Call) and i.label and not i.backward]
    cast = [any(n.op == SCALED_MM for n in program.lowered.segments[s].graph.nodes) for s in calls]
    assert cast == [False, True, True, True, False]
    hand = by_hand(model, "float8-rowwise", lambda name: ".mlp." in name and name.split(".")[2] in "123")
    errors = compare_step(program, hand, batch(8, 32))
    assert max(errors.values()) < RTOL, errors


def test_a_head_that_is_named_is_cast() -> None:
    model = build("GPT2")
    program = compiled(model, "dp=2", "float8-tensorwise:*lm_head")
    assert {n.origin.fqn for n in nodes_of(program) if n.op == SCALED_MM} == {"lm_head"}
    errors = compare_step(
        program, by_hand(model, "float8-tensorwise", lambda name: name == "lm_head"), batch(8, 32)
    )
    assert max(errors.values()) < RTOL, errors


def test_backward_of_one_scale_gets_what_forward_cast() -> None:
    program = compiled(build("Llama"), "dp=2", "float8-tensorwise")
    forward, backward = (
        next(s for name, s in program.lowered.segments.items() if name == f"layers_{half}")
        for half in ("fwd", "bwd")
    )
    given = [t.dtype for _, t in backward.graph.inputs]
    assert given.count("f8e4m3") == 4  # of q, k and v; of o; of gate and up; of down
    made = {o for n in forward.graph.nodes if n.op == CAST_SCALED for o in n.outs}
    assert len(made & set(forward.graph.outputs)) == 4


def test_biases_are_added_once() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32))
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    planned = autoshard.plan(model, "tp=2", example_inputs=(x,), products="float8-rowwise")
    program = autoshard.compile(model, planned, example_inputs=(x,)).program
    assert sum(n.op == SCALED_MM for n in nodes_of(program)) == 5  # of the input there is no gradient
    assert verify(program, model, (x,), {}, steps=1).ok


def test_no_block_is_cut() -> None:
    """32 tokens are one block of the gradient's sum, on both ranks that hold 16 of them."""
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    x = torch.randn(8, 4, 32, generator=torch.Generator().manual_seed(0))
    planned = autoshard.plan(model, "fsdp=2", example_inputs=(x,), products="mxfp8")
    program = autoshard.compile(model, planned).program
    assert verify_static(program).ok and verify(program, model, (x,), {}, steps=1).ok


@pytest.mark.parametrize(
    ("products", "said"),
    [
        ("float8-rowwise:*.nothing", "no product of the model is cast"),
        ("float9", "products is 'float9'"),
        ("mxfp8", "80 tokens are no blocks of 32"),
    ],
)
def test_what_cannot_be_cast_is_said(products: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        inputs = batch(8, 10)
        autoshard.plan(wide_llama(), "tp=2", example_inputs=inputs, products=products)


def test_gpus_without_8_bit_units_are_refused() -> None:
    with pytest.raises(UsageError, match="multiply no 8-bit floats"):
        compiled(build("Llama"), "tp=2", "float8-rowwise", cluster="a100-selene")


def test_an_estimate_knows_the_rate_of_8_bits() -> None:
    case, meta = StepCase(2, 4096, 32, 8, 14336, 1024, 4, 8192, torch.float32), torch.device("meta")
    model, inputs = case.model(meta), case.inputs(meta)
    steps = {}
    for products in ("", "float8-rowwise", "mxfp8"):
        planned = autoshard.plan(
            model, "dp=1", example_inputs=inputs, cluster="h100-dgx", precision="bf16", products=products
        )
        program = autoshard.compile(model, planned).program
        simulated = estimate_step(program, load_cluster("h100-dgx"))
        steps[products] = planned.plan.optimality.seconds, simulated.seconds
    for k in range(2):
        # no kernel takes scales of blocks: they are multiplied in bf16
        assert steps["float8-rowwise"][k] < 0.9 * steps[""][k] < steps["mxfp8"][k]


@pytest.mark.parametrize(
    ("products", "mesh", "options", "narrow"),
    [
        # with so little memory they are gathered in forward and again in backward
        ("float8-rowwise", "fsdp=2", {"memory": 11 << 20}, {"f8e4m3"}),
        ("mxfp8", "fsdp=2", {"memory": 10 << 20, "offload": "none"}, {"f8e4m3", "f8e8m0"}),
        ("mxfp8", "pp=2,fsdp=2", {"memory": 5 << 20, "microbatches": 2}, {"f8e4m3", "f8e8m0"}),
        ("float8-tensorwise", "fsdp=2,tp=2", {"memory": 10 << 20}, set()),
    ],
)
def test_parameters_are_gathered_as_casts(
    products: str, mesh: str, options: dict[str, Any], narrow: set[str]
) -> None:
    """Where their scales are those of shards; and without rounding a step is the model's."""
    model, inputs = wide_llama(), batch(8, 32)
    planned = autoshard.plan(
        model, mesh, example_inputs=inputs, products=products, cluster="h100-dgx", **options
    )
    program = autoshard.compile(model, planned).program
    types = {t.dtype for n in nodes_of(program) if n.op.startswith("comm.all_gather") for t in n.types if t}
    assert types - {"f32"} == narrow
    assert verify_static(program).ok
    assert verify(program, model, (), inputs, steps=1).worst().error < 1e-5


def test_a_scale_that_is_not_everyones_is_noticed() -> None:
    model, inputs = build("Llama"), batch(8, 32)
    program = compiled(model, "dp=2", "float8-tensorwise")
    name, segment = next((n, s) for n, s in program.lowered.segments.items() if n == "layers_fwd")
    nodes = list(segment.graph.nodes)
    at = next(k for k, n in enumerate(nodes) if n.kwarg("op") == "max")
    gone = Ref(next(refs_of(nodes[at])))
    cast = next(k for k, n in enumerate(nodes) if n.op == CAST_SCALED and n.args[1] == Ref(nodes[at].name))
    nodes[cast] = substitute(nodes[cast], lambda v: gone if v == nodes[at].name else Ref(v))
    wrong = replace(segment, graph=replace(segment.graph, nodes=tuple(nodes)))
    lowered = replace(program.lowered, segments={**program.lowered.segments, name: wrong})
    faulty = replace(program, lowered=lowered)
    assert not verify_static(faulty).ok
    assert verify(program, model, (), inputs, steps=0).ok
    assert not verify(faulty, model, (), inputs, steps=0).ok


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sizes", [(48, 64, 32), (7, 33, 50)])
def test_the_library_s_product_is_the_reference_s(device: str, sizes: tuple[int, int, int]) -> None:
    """What runs on GPUs, of sizes that matrix units take and of others; it has a form for CPUs, too."""
    source = torch.Generator().manual_seed(0)
    rows, depth, columns = sizes
    a, b = torch.randn(rows, depth, generator=source), torch.randn(columns, depth, generator=source).t()
    for along, dtype in product((None, 1), (torch.bfloat16, torch.float32)):
        dims = (None, None) if along is None else (1, 0)
        scales = [
            scaled.amax_scale(x, dim, 0, E4, torch.float32) for x, dim in zip((a, b), dims, strict=True)
        ]
        casts = [scaled.cast_scaled(x, s, E4) for x, s in zip((a, b), scales, strict=True)]
        given = [x.to(device) for x in (*scales, *casts)]
        found = scaled.on_matrix_units(given[0], given[1], given[2], given[3], dtype).cpu()
        wanted = scaled.scaled_mm(scales[0], scales[1], casts[0], casts[1], dtype)
        assert found.is_contiguous()
        # fp8 sums on GPUs keep 14 bits of their terms
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2 if device == "cuda" else 1e-5)
