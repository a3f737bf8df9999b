"""Tokens of experts in chunks: one is exchanged while another is computed."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from architecture_runner import errors_of
from architectures import ARCHITECTURES
from lockstep_check import RTOL
from slow_links import without_latency
from torch import nn

import autoshard
from autoshard.api import compile_analysed, plan_length_range
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh
from autoshard.errors import UsageError
from autoshard.ir import Node
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.length_range import LengthRange
from autoshard.planner.planned import Planned
from autoshard.planner.planning import plan_analysed
from autoshard.program.program import Program
from autoshard.search.plan.plan import Recompute
from autoshard.search.plan.plan_json import plan_from_json, plan_to_json
from autoshard.validate.models import Architecture, Experts, on_meta
from autoshard.verify.static import verify_static

pytest.importorskip("transformers")
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=16, num_experts_per_tok=2))


def _gpt_oss() -> nn.Module:
    """Biases, and gate and up in turns."""
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {**SIZES, "intermediate_size": 32, "head_dim": 4}
    return GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=8, num_experts_per_tok=2))


def _deepseek() -> nn.Module:
    """A dense layer first, shared experts, and routing by groups."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    more = {"moe_intermediate_size": 64, "first_k_dense_replace": 1, "v_head_dim": 4}
    sizes = {**SIZES, "num_hidden_layers": 3, "num_key_value_heads": 4}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **experts, **latent, **more))


MODELS = {"mixtral": _mixtral, "gpt-oss": _gpt_oss, "deepseek": _deepseek}


def _small(name: str, batch: int = 4, length: int = 8) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = MODELS[name]()
    ids = torch.randint(0, 32, (batch, length))
    return model, {"input_ids": ids, "labels": ids}


def _program(analysis: Analysis, mesh: str, **more: Any) -> Program:
    planned = plan_analysed(analysis, [Mesh.parse(mesh)], without_latency(), reasons=False)
    return compile_analysed(replace(planned, plan=replace(planned.plan, **more)))


def _nodes(program: Program, op: str) -> list[Node]:
    return [n for s in program.lowered.segments.values() for n in s.graph.nodes if n.op.startswith(op)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("mesh", "chunks"),
    [("ep=4", 2), ("ep=2,tp=2", 4), ("fsdp=2,ep=2", 2), ("dp=4", 2), ("cp=2,ep=2", 2), ("tp=2", 2)],
)
def test_equal_to_eager(name: str, mesh: str, chunks: int) -> None:
    model, inputs = _small(name)
    program = _program(analyse(capture(model, (), inputs), expert_chunks=chunks), mesh)
    # forward and backward of one text of the layer; gradients of the matrices are sums of all chunks
    if mesh in ("ep=4", "fsdp=2,ep=2"):
        assert len(_nodes(program, "comm.expert_dispatch.")) == 2 * chunks
        assert len(_nodes(program, "comm.expert_combine.")) == 2 * chunks
    assert verify_static(program).ok
    assert max(errors_of(model, inputs, program).values()) < RTOL


@pytest.mark.parametrize("mesh", ["ep=4", "fsdp=2,ep=2"])
def test_one_expert_gets_all_tokens_and_layers_are_recomputed(mesh: str) -> None:
    """Most experts and ranks have no token in any chunk; what is recomputed is exchanged in chunks, too."""
    model, inputs = _small("mixtral")
    analysis = analyse(capture(model, (), inputs), expert_chunks=2)
    with torch.no_grad():
        for parameter in (p for n, p in model.named_parameters() if n.endswith("gate.weight")):
            parameter.copy_(torch.linspace(-1, 1, len(parameter))[:, None] * parameter[:1])
    name = next(c.segment for c in analysis.folded.calls if c.label)
    program = _program(analysis, mesh, recompute={name: Recompute("full", 2)})
    assert len(_nodes(program, "comm.expert_dispatch.")) > 4
    assert verify_static(program).ok
    assert max(errors_of(model, inputs, program).values()) < RTOL


def test_gradients_of_experts_are_reduced_once() -> None:
    """The chunks' terms are added up before anything is sent."""
    model, inputs = _small("mixtral")
    joint = capture(model, (), inputs)
    sums = []
    for chunks in (1, 2):
        program = _program(analyse(joint, expert_chunks=chunks), "fsdp=2,ep=2")
        reduced = [n for n in _nodes(program, "comm.") if "reduce" in n.op or "all_to_all" in n.op]
        sums.append([t.shape for n in reduced for t in n.types if t is not None and len(t.shape) == 3])
    assert sums[0] == sums[1]


#: experts whose exchange takes less long than their products, and not much less
SHAPE = Architecture(
    *("qwen3_moe", 3, 4096, 64, 4, 12288, 32000, 4096), head_dim=128, experts=Experts(128, 8, 1536)
)


@functools.cache
def _planned(chunks: int | None) -> Planned:
    model, inputs = on_meta(SHAPE, 64, 4096)
    options: dict[str, Any] = {"memory": 60 * 2**30, "baselines": False, "expert_chunks": chunks}
    return autoshard.plan(model, "fsdp=8,ep=8", example_inputs=inputs, cluster="mi250x-frontier", **options)


def test_planned_where_the_program_is_faster() -> None:
    free, whole = _planned(None), _planned(1)
    assert (free.plan.expert_chunks, whole.plan.expert_chunks) == (2, 1)
    assert free.peak is not None and whole.peak is not None
    assert free.peak.step is not None and whole.peak.step is not None
    assert free.peak.step < whole.peak.step
    # the search thinks so as well, and about as much
    assert free.plan.optimality.seconds < whole.plan.optimality.seconds
    assert free.plan.optimality.seconds == pytest.approx(free.peak.step, rel=0.05)
    assert plan_from_json(plan_to_json(free.plan)).expert_chunks == 2


def test_a_chunk_is_computed_while_the_next_is_on_its_way() -> None:
    program = compile_analysed(_planned(None))
    forward = next(
        s.graph.nodes
        for name, s in program.lowered.segments.items()
        if name.startswith("layers_fwd") and any("expert_combine" in n.op for n in s.graph.nodes)
    )
    kinds = ("comm.expert_dispatch.", "autoshard.expert_mm.", "comm.expert_combine.")
    order = [n.op.split(".")[1] for n in forward if n.op.startswith(kinds)]
    there, product, back = "expert_dispatch", "expert_mm", "expert_combine"
    assert order == [there, there, product, product, back, product, product, back]


def test_other_lengths_in_as_many_chunks_as_they_have() -> None:
    """A plan for a range of lengths, of which odd ones cannot be cut."""
    model, inputs = on_meta(replace(SHAPE, layers=1), 64, 2048)
    options: dict[str, Any] = {"expert_chunks": 2, "baselines": False, "cluster": "h100-dgx"}
    lengths = LengthRange(512, 2048)
    found = plan_length_range(model, "fsdp=2,ep=32", example_inputs=inputs, lengths=lengths, **options)
    assert found.planned.plan.expert_chunks == 2
    assert {peak.length: peak.own for peak in found.peaks} == {
        2048: False,
        2047: True,
        1025: True,
        512: False,
    }


def test_refused() -> None:
    chosen = {a.name: a for a in ARCHITECTURES}
    for name in ("LlamaForCausalLM", "NllbMoeForConditionalGeneration"):
        model, inputs = chosen[name].make()
        with pytest.raises(UsageError, match="cannot be exchanged in 2 chunks"):
            analyse(capture(model, (), inputs), expert_chunks=2)
    model, inputs = _small("mixtral", length=7)
    with pytest.raises(UsageError, match="28 tokens are not 4 sequences of a multiple of 2"):
        analyse(capture(model, (), inputs), expert_chunks=2)
