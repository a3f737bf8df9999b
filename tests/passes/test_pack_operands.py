"""Products of 4-bit operands against a model whose linear layers make the casts by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from calls_worker import batch
from faults.edits import replaced
from lockstep_check import compare_step
from scaled_layers import E4, by_hand, wide_llama, wide_mixtral
from torch import nn

import autoshard
from autoshard.cluster import load_cluster
from autoshard.errors import UsageError
from autoshard.ir import Node
from autoshard.ir.scaled import CAST_PACKED, PACKED_MM
from autoshard.ops import packed
from autoshard.ops.scaled import amax_scale
from autoshard.program.program import Program
from autoshard.simulate.step import estimate_step
from autoshard.verify.lockstep import verify
from autoshard.verify.static import verify_static
from benchmarks.gpu_steps import StepCase

u8, f32 = torch.uint8, torch.float32


def compiled(model: nn.Module, mesh: str, inputs: dict[str, torch.Tensor], **options: Any) -> Program:
    planned = autoshard.plan(model, mesh, example_inputs=inputs, products="nvfp4", **options)
    return autoshard.compile(model, planned, example_inputs=inputs).program


def nodes_of(program: Program, *ops: str) -> list[Node]:
    return [n for s in program.lowered.segments.values() for n in s.graph.nodes if n.op.startswith(ops)]


def cast(
    x: torch.Tensor, block: tuple[int, int], dim: int, stochastic: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(scale of all, those of blocks, codes)."""
    whole = amax_scale(x, None, 0, u8, f32)
    scale = packed.block_scale(x, whole, E4, block)
    return whole, scale, packed.cast_packed(x, scale, u8, whole, dim, stochastic)


@pytest.mark.parametrize("mesh", ["tp=4", "fsdp=2,tp=2", "pp=2,dp=2"])
def test_many_ranks_are_one(mesh: str) -> None:
    """No block is cut, scales are those of all ranks, and gradients are rounded alike wherever they lie."""
    model, inputs = wide_llama(), batch(8, 32)
    program = compiled(model, mesh, inputs, **({"microbatches": 1} if "pp" in mesh else {}))
    assert verify_static(program).ok
    report = verify(program, model, (), inputs, steps=1)
    assert report.worst().error < 1e-5
    (rounded,) = report.rounded
    assert (rounded.what, rounded.bits) == ("operands", 4) and 0.05 < rounded.mean < rounded.worst < 0.2
    errors = compare_step(program, by_hand(model, "nvfp4", lambda name: name != "lm_head"), inputs)
    assert max(errors.values()) < 1e-5


def test_parameters_are_gathered_in_4_bits() -> None:
    """With the scale of all of them reduced first, those of a layer in one message; in both directions."""
    model, inputs = wide_llama(), batch(8, 32)
    program = compiled(model, "fsdp=2", inputs, cluster="h100-dgx", memory=10_000_000, offload="none")
    gathers = [n for n in nodes_of(program, "comm.all_gather") if "f4e2m1x2[256, 64]" in map(str, n.types)]
    assert [n.backward for n in gathers] == [False, True]
    maxima = [n for n in nodes_of(program, "comm.all_reduce_bucket") if n.kwarg("op") == "max"]
    assert len(maxima) == 2 and all(len(n.outs) > 2 for n in maxima)
    assert verify_static(program).ok
    assert verify(program, model, (), inputs, steps=1).worst().error < 1e-5
    errors = compare_step(program, by_hand(model, "nvfp4", lambda name: name != "lm_head"), inputs)
    assert max(errors.values()) < 1e-5


def test_a_scale_of_one_rank_s_part_is_noticed() -> None:
    """A parameter's codes that are made with the largest element of a shard."""
    model, inputs = wide_llama(), batch(8, 32)
    program = compiled(model, "fsdp=2", inputs, cluster="h100-dgx", memory=10_000_000, offload="none")
    name, segment = next((n, s) for n, s in program.lowered.segments.items() if n == "layers_fwd")
    nodes = list(segment.graph.nodes)
    at = next(k for k, n in enumerate(nodes) if n.op == CAST_PACKED and "shard" in n.name)
    reduced = next(n for n in nodes if nodes[at].args[3].name in n.outs)
    own = reduced.args[0][reduced.outs.index(nodes[at].args[3].name)]
    wrong = replace(nodes[at], args=(*nodes[at].args[:3], own, *nodes[at].args[4:]))
    faulty = replaced(program, name, at, wrong)
    assert verify(program, model, (), inputs, steps=0).ok
    assert not verify_static(faulty).ok
    assert not verify(faulty, model, (), inputs, steps=0).ok


def test_gradients_alone_are_rounded_stochastically() -> None:
    program = compiled(wide_llama(), "dp=1", batch(8, 32))
    said = [(n.backward, n.args[5], n.args[0].name) for n in nodes_of(program, CAST_PACKED)]
    assert {stochastic for backward, stochastic, _ in said if not backward} == {False}
    of_tokens = [stochastic for backward, stochastic, name in said if backward and "rotated" in name]
    assert of_tokens.count(True) == 7 and of_tokens.count(False) == 4
    assert len(nodes_of(program, PACKED_MM)) == 21


def test_experts_keep_their_type() -> None:
    program = compiled(wide_mixtral(), "dp=1", batch(8, 32))
    assert len(nodes_of(program, "autoshard.expert_mm")) == 4 and nodes_of(program, PACKED_MM)


def test_tokens_that_are_no_blocks_are_refused() -> None:
    with pytest.raises(UsageError, match=re.escape("40 tokens are no blocks of 16")):
        compiled(wide_llama(), "dp=1", batch(4, 10))


def test_an_estimate_knows_units_of_4_bits() -> None:
    case, meta = StepCase(2, 4096, 32, 8, 14336, 1024, 4, 8192, torch.float32), torch.device("meta")
    model, inputs = case.model(meta), case.inputs(meta)
    for cluster, faster in (("b200-nvl72", True), ("h100-dgx", False)):
        seconds = []
        for products in ("nvfp4", "float8-rowwise" if faster else ""):
            planned = autoshard.plan(
                model, "dp=1", example_inputs=inputs, cluster=cluster, precision="bf16", products=products
            )
            simulated = estimate_step(autoshard.compile(model, planned).program, load_cluster(cluster))
            seconds.append((planned.plan.optimality.seconds, simulated.seconds))
        for four, other in zip(*seconds, strict=True):
            assert (four < 0.97 * other) is faster and abs(seconds[0][0] / seconds[0][1] - 1) < 0.2


def test_codes_are_those_of_e2m1() -> None:
    """Ties go to the even code, too much to the largest; of two in a byte the first has the low bits."""
    values = [0.0, 0.25, 0.3, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, -0.5, -1.6, -6.0, -0.2, 3.0]
    one = torch.ones(1, 1)
    codes = packed.cast_packed(torch.tensor([values]), one.to(E4), u8, one, 1, False)
    wanted = [0, 0, 0.5, 1, 1, 2, 2, 4, 4, 6, 6, -0.5, -1.5, -6, 0, 3]
    assert packed.quotients(codes, 1).tolist() == [wanted]
    assert int(codes[0, 1]) == 1 | (2 << 4)  # 0.5 and 1.0


def test_stochastic_rounding_is_right_on_average() -> None:
    """A value among others, which is no code: nearest codes are off by as much in every row."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 64, generator=source)
    x[:, 5] = 0.7
    off = {}
    for stochastic in (False, True):
        whole, scale, codes = cast(x, (1, 16), 1, stochastic)
        error = packed.unpacked(codes, scale, whole, 1) - x
        off[stochastic] = float(error[:, 5].mean().abs()), float(error.norm() / x.norm())
    assert off[True][0] < 4 * 0.1 / 64 and off[True][0] < off[False][0]
    assert off[False][1] < off[True][1] < 0.2
    noise = packed.dither(codes.new_empty(4096, 64).random_(0, 16, generator=source), scale, whole)
    assert abs(float(noise.mean()) - 0.5) < 5e-3 and abs(12 * float(noise.var()) - 1) < 2e-2


def test_a_rotation_leaves_sums_as_they_are_and_spreads_outliers() -> None:
    x, y = torch.randn(64, 8), torch.randn(64, 12)
    x[3, 2] = 100.0
    torch.testing.assert_close(
        packed.rotated(x, 0).t() @ packed.rotated(y, 0), x.t() @ y, rtol=1e-4, atol=1e-3
    )
    assert float(packed.rotated(x, 0).abs().max()) < 40


def test_bytes_of_4_bits_are_counted() -> None:
    """An element takes half a byte, and its share of a scale a 16th, or a 256th of a parameter's."""
    program = compiled(wide_llama(), "dp=1", batch(8, 32))
    found = set()
    for segment in program.lowered.segments.values():
        types = segment.graph.types()
        for node in (n for n in segment.graph.nodes if n.op == CAST_PACKED):
            source, scale = (types[node.args[k].name] for k in (0, 1))
            assert 8 * types[node.name].nbytes == source.nbytes  # of f32
            found.add(source.numel / scale.nbytes)
    assert found == {16, 256}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("blocks", [(1, 16), (16, 16)])
@pytest.mark.parametrize("packed_b", [0, 1])
def test_the_library_s_product_is_the_reference_s(
    device: str, blocks: tuple[int, int], packed_b: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs on GPUs, with units of 4 bits and without."""
    source = torch.Generator().manual_seed(0)
    a, b = torch.randn(160, 96, generator=source), torch.randn(96, 64, generator=source)
    of_a = cast(a, (1, 16), 1)
    of_b = cast(b, blocks if packed_b == 1 and blocks[0] == 16 else (16, blocks[0]), packed_b)
    pairs = [x for both in zip(of_a, of_b, strict=True) for x in both]
    given = [x.to(device) for x in pairs]
    wanted = packed.packed_mm(*pairs, 1, packed_b, torch.bfloat16)
    if device == "cpu":
        monkeypatch.setattr(packed, "torch_scaled_mm", _as_torch_s_kernel)
        units = [False, True]
    else:
        units = [torch.cuda.get_device_capability() == (10, 0)]
    for has in units:
        monkeypatch.setattr(packed, "_has_units", lambda device, has=has: has)
        found = packed.on_matrix_units(*given, 1, packed_b, torch.bfloat16).cpu()
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def _as_torch_s_kernel(a: torch.Tensor, b: torch.Tensor, *scales: Any, **more: Any) -> torch.Tensor:
    """What `torch.nn.functional.scaled_mm` asks for and does on Blackwell."""
    (scale_a, whole_a), kinds_a, (scale_b, whole_b), kinds_b = scales
    assert kinds_a == kinds_b and more["swizzle_a"] == more["swizzle_b"]
    assert whole_a.dim() == whole_b.dim() == 0
    assert a.dtype == b.dtype == torch.float4_e2m1fn_x2 and a.is_contiguous() and b.t().is_contiguous()
    sides = []
    for codes, scale in ((a, scale_a), (b.t(), scale_b)):
        values = packed.quotients(codes.view(u8), 1)
        rows, blocks = len(values), values.shape[1] // 16
        plain = torch.empty(rows, blocks)
        for r in range(rows):
            for k in range(blocks):
                tile = (r // 128) * -(-blocks // 4) + k // 4
                plain[r, k] = scale[512 * tile + (r % 32) * 16 + (r % 128) // 32 * 4 + k % 4].float()
        sides.append(values * plain.repeat_interleave(16, 1))
    return ((sides[0] @ sides[1].t()) * whole_a * whole_b).to(more["output_dtype"])
