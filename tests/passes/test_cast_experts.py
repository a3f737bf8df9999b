"""Products of experts with 8-bit operands against experts that make the casts by hand."""

from __future__ import annotations

from typing import Any

import expert_modules
import pytest
import torch
from calls_worker import batch
from faults.edits import replaced
from lockstep_check import compare_step
from scaled_layers import E4, FORMATS, by_hand, wide_mixtral
from slow_links import without_latency
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM

import autoshard
from autoshard.cluster import load_cluster
from autoshard.ir import Node, Ref, refs_of, substitute
from autoshard.ir.scaled import AMAX_BY_EXPERT, CAST_BY_EXPERT, SCALED_EXPERT_MM, SCALED_EXPERT_OUTER
from autoshard.ops import scaled_experts
from autoshard.ops.experts import group_ends
from autoshard.ops.scaled import amax_scale, cast_scaled
from autoshard.program.program import Program
from autoshard.simulate.step import estimate_step
from autoshard.verify.lockstep import verify
from autoshard.verify.static import verify_static

#: a value between two codes may be rounded to either where sums are added up in another order
RTOL = 2e-3


def compiled(model: nn.Module, mesh: str, products: str, **options: Any) -> Program:
    given = {"cluster": without_latency(), **options}
    planned = autoshard.plan(model, mesh, example_inputs=batch(8, 32), products=products, **given)
    return autoshard.compile(model, planned, example_inputs=batch(8, 32)).program


def nodes_of(program: Program, *ops: str) -> list[Node]:
    return [n for s in program.lowered.segments.values() for n in s.graph.nodes if n.op.startswith(ops)]


@pytest.mark.parametrize("products", [name for name in FORMATS if name != "nvfp4"])
@pytest.mark.parametrize(
    ("mesh", "chunks"), [("dp=1", 1), ("ep=4", 1), ("ep=4", 2), ("fsdp=2,ep=2", 1), ("fsdp=2,tp=2", 1)]
)
def test_a_step_is_that_of_experts_by_hand(products: str, mesh: str, chunks: int) -> None:
    """Also where rows of an expert come from several ranks and in chunks: scales are those of all of them."""
    model = wide_mixtral()
    program = compiled(model, mesh, products, expert_chunks=chunks)
    assert verify_static(program).ok
    assert verify(program, model, (), batch(8, 32), steps=1).worst().error < 1e-5
    errors = compare_step(program, by_hand(model, products, lambda name: name != "lm_head"), batch(8, 32))
    assert max(errors.values()) < RTOL, errors
    outside = by_hand(model, products, lambda name: name != "lm_head" and "experts" not in name)
    assert max(compare_step(program, outside, batch(8, 32)).values()) > 2 * RTOL


@pytest.mark.parametrize(
    ("products", "outer", "rows"),
    [
        ("float8-tensorwise", SCALED_EXPERT_OUTER, ["f8e4m3", "f8e5m2"]),
        ("float8-rowwise", SCALED_EXPERT_OUTER, ["f32", "f32"]),
        ("float8-rowwise-gw-hp", "autoshard.expert_outer.default", ["f32", "f32"]),
        ("mxfp8", "autoshard.expert_outer.default", ["f32", "f32"]),
    ],
)
def test_which_products_are_cast_and_what_travels(products: str, outer: str, rows: list[str]) -> None:
    """Tokens travel as casts where nothing but casts with one scale is made of them."""
    program = compiled(wide_mixtral(), "ep=4", products)
    assert len(nodes_of(program, SCALED_EXPERT_MM)) == 4 and not nodes_of(program, "autoshard.expert_mm")
    assert {n.op for n in nodes_of(program, "autoshard.expert_outer", SCALED_EXPERT_OUTER)} == {outer}
    sent = nodes_of(program, "comm.expert_dispatch.")
    assert [n.types[0].dtype for n in sent if n.types[0]] == rows


def test_tokens_travel_as_casts_with_the_scales_of_their_rows() -> None:
    """Where matrices are frozen: their gradients would be sums over rows with all bits."""
    model = wide_mixtral(experts=16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    for products, scale in (("float8-rowwise", "f32[4096*2/16, 1]"), ("mxfp8", "f8e8m0[4096*2/16, 2]")):
        program = compiled(model, "ep=4", products, memory=8_000_000)
        sent = [str(n.types[0]) for n in nodes_of(program, "comm.expert_dispatch.")]
        assert sorted(sent) == sorted([scale, "f8e4m3[4096*2/16, 64]"] * 2)
        assert verify_static(program).ok
        assert verify(program, model, (), batch(8, 32), steps=1).worst().error < 1e-5


@pytest.mark.parametrize("products", ["float8-rowwise", "mxfp8"])
def test_matrices_of_experts_are_gathered_as_casts(products: str) -> None:
    """In forward and again in backward, with so little memory."""
    model = wide_mixtral(experts=16)
    program = compiled(model, "fsdp=4", products, cluster="h100-dgx", memory=8 << 20)
    for matrices in ("f8e4m3[16, 256, 64]", "f8e4m3[16, 64, 128]"):
        gathers = [n for n in nodes_of(program, "comm.all_gather") if matrices in map(str, n.types)]
        assert [n.backward for n in gathers] == [False, True]
    assert verify(program, model, (), batch(8, 32), steps=1).worst().error < 1e-5


def test_experts_that_are_modules_are_cast() -> None:
    """Their matrices are stacked first."""
    model, inputs = expert_modules.ExpertModules(), batch(4, 16)
    planned = autoshard.plan(model, "ep=2", example_inputs=inputs, products="float8-rowwise")
    program = autoshard.compile(model, planned, example_inputs=inputs).program
    assert nodes_of(program, SCALED_EXPERT_MM) and nodes_of(program, SCALED_EXPERT_OUTER)
    assert verify_static(program).ok and verify(program, model, (), inputs, steps=1).ok


def test_biases_of_experts_are_added_to_their_products() -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2))
    program = compiled(model, "ep=2", "float8-rowwise")
    assert len(nodes_of(program, SCALED_EXPERT_MM)) == 4
    assert verify(program, model, (), batch(8, 32), steps=1).worst().error < 1e-5


def test_a_scale_of_one_rank_s_rows_alone_is_noticed() -> None:
    """Of an expert whose rows lie on two ranks."""
    model, inputs = wide_mixtral(), batch(8, 32)
    program = compiled(model, "dp=2", "float8-rowwise", cluster="h100-dgx")
    name, segment = next(
        (n, s)
        for n, s in program.lowered.segments.items()
        if any(k.op == AMAX_BY_EXPERT for k in s.graph.nodes)
    )
    nodes = list(segment.graph.nodes)
    at = next(k for k, n in enumerate(nodes) if n.op == CAST_BY_EXPERT)
    reduced = next(n for n in nodes if n.name == nodes[at].args[1].name)
    assert reduced.kwarg("op") == "max"
    own = Ref(next(refs_of(reduced)))
    wrong = substitute(nodes[at], lambda v: own if v == reduced.name else Ref(v))
    faulty = replaced(program, name, at, wrong)
    assert verify(program, model, (), inputs, steps=0).ok
    assert not verify_static(faulty).ok
    assert not verify(faulty, model, (), inputs, steps=0).ok


def test_an_estimate_knows_the_rate_of_8_bits() -> None:
    with torch.device("meta"):
        model = wide_mixtral(layers=2, experts=8, hidden=4096, inside=14336)
        ids = torch.zeros((8, 4096), dtype=torch.int64)
    seconds = {}
    for products in ("", "float8-rowwise:*experts*", "mxfp8:*experts*"):
        planned = autoshard.plan(
            model,
            "ep=8",
            example_inputs={"input_ids": ids, "labels": ids},
            cluster="h100-dgx",
            precision="bf16",
            products=products,
        )
        simulated = estimate_step(autoshard.compile(model, planned).program, load_cluster("h100-dgx"))
        seconds[products.partition(":")[0]] = planned.plan.optimality.seconds, simulated.seconds
    for k in range(2):
        assert seconds["float8-rowwise"][k] < 0.9 * seconds[""][k] < seconds["mxfp8"][k]


def _as_torch_s_kernel(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    _: Any,
    scale_b: torch.Tensor,
    __: Any,
    **more: Any,
) -> torch.Tensor:
    """What `torch.nn.functional.scaled_grouped_mm` asks for and does on Hopper."""
    ends, dtype = more["offs"].tolist(), more["output_dtype"]
    assert more["offs"].dtype == torch.int32 and dtype == torch.bfloat16
    assert a.dtype == b.dtype == E4 and scale_a.dtype == scale_b.dtype == torch.float32
    assert a.is_contiguous() and b.mT.is_contiguous() and a.shape[1] % 16 == b.shape[-1] % 16 == 0
    begin, result = 0, []
    for number, end in enumerate(ends):
        if b.dim() == 3:
            assert scale_a.shape == a.shape[:1] and scale_b.shape == (len(ends), b.shape[2])
            rows = a[begin:end].float() * scale_a[begin:end, None]
            result.append(rows @ (b[number].float() * scale_b[number]))
        else:
            assert end % 16 == 0 and scale_a.shape == (len(ends) * len(a),)
            down, across = scale_a.view(len(ends), -1)[number], scale_b.view(len(ends), -1)[number]
            result.append((a[:, begin:end].float() * down[:, None]) @ (b[begin:end].float() * across))
        begin = end
    return (torch.cat(result) if b.dim() == 3 else torch.stack(result)).to(dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_library_s_products_are_the_reference_s(
    device: str, dtype: torch.dtype, whole: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs on GPUs, of sizes that matrix units take and of others, with an expert that has no rows."""
    if device == "cpu":
        monkeypatch.setattr(scaled_experts, "scaled_grouped_mm", _as_torch_s_kernel)
        monkeypatch.setattr(scaled_experts, "_grouped", lambda kind, *codes: kind == torch.bfloat16)
    source = torch.Generator().manual_seed(0)
    for depth, columns in ((32, 64), (24, 40)):
        experts = torch.tensor([0] * 21 + [1] * 3 + [3] * 16)
        slots = (experts << 32) | torch.arange(40)
        x, grad = torch.randn(40, depth, generator=source), torch.randn(40, columns, generator=source)
        weight = torch.randn(4, columns, depth, generator=source)
        weight = weight if transposed else weight.mT.contiguous()
        dim = None if whole else 1
        down = (2 if transposed else 1) if dim else None
        sx, sw = (amax_scale(v, d, 0, E4, torch.float32) for v, d in ((x, dim), (weight, down)))
        mm = (sx, sw, cast_scaled(x, sx, E4), slots, cast_scaled(weight, sw, E4), transposed, dtype)
        if whole:
            sg, qx = amax_scale(grad, None, 0, E4, torch.float32), mm[2]
            qg = cast_scaled(grad, sg, E4)
        else:
            sx, sg = (scaled_experts.amax_by_expert(v, slots, 4, E4, torch.float32) for v in (x, grad))
            qx, qg = (scaled_experts.cast_by_expert(v, s, E4, slots) for v, s in ((x, sx), (grad, sg)))
        outer = sx, sg, qx, qg, slots, 4, transposed, dtype
        pairs = (
            (scaled_experts.mm_on_matrix_units, scaled_experts.scaled_expert_mm, mm),
            (scaled_experts.outer_on_matrix_units, scaled_experts.scaled_expert_outer, outer),
        )
        for ours, reference, args in pairs:
            given = [v.to(device) if isinstance(v, torch.Tensor) else v for v in args]
            found, wanted = ours(*given).cpu(), reference(*args)  # type: ignore[operator]
            assert found.is_contiguous() and found.dtype == dtype
            torch.testing.assert_close(found, wanted, rtol=1e-2, atol=2e-2 if device == "cuda" else 1e-4)


def test_rows_of_each_expert_begin_at_a_whole_word() -> None:
    slots = (torch.tensor([0] * 17 + [2] * 16 + [3]) << 32) | torch.arange(34)
    place, ends, room = scaled_experts.words_of_groups(slots, 5)
    assert ends.tolist() == [32, 32, 48, 64, 64] and room % 16 == 0 and room >= 64
    assert place.tolist() == [*range(17), *range(32, 48), 48]
    assert group_ends(slots, 5).tolist() == [17, 17, 33, 34, 34]
