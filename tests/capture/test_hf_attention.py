"""transformers' attention: sinks without written out scores, kernels of GPUs as what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import autoshard
from autoshard.capture.capture import capture
from autoshard.capture.hf_attention import CAPPED, NAME
from autoshard.planner.analysis import analyse
from autoshard.program.program import Program
from autoshard.verify.lockstep import needs_one_rank, verify
from autoshard.verify.single_rank import single_rank_program
from autoshard.verify.static import verify_static

LENGTH = 24
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "sliding_window": 8,
}


def gpt_oss(dropout: float = 0.0) -> GptOssForCausalLM:
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_dropout": dropout}
    model = GptOssForCausalLM(GptOssConfig(**SIZES, **experts)).train()
    for name, param in model.named_parameters():
        if "sinks" in name:
            nn.init.normal_(param)
    return model


def batch(padded: str = "") -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids, labels = (torch.randint(3, 96, (4, LENGTH)) for _ in range(2))
    found = {"input_ids": ids, "labels": labels}
    if padded:
        real = found["attention_mask"] = torch.ones(4, LENGTH, dtype=torch.int64)
        if padded in ("left", "both"):
            real[1, :9] = 0
        if padded in ("right", "both"):
            real[2, -9:] = 0
    return found


def compiled(model: nn.Module, inputs: dict[str, torch.Tensor], mesh: str, **options: Any) -> Program:
    planned = autoshard.plan(model, mesh, example_inputs=inputs, cluster="h100-dgx", **options)
    return autoshard.compile(model, planned).program


def equal(program: Program, model: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    one = single_rank_program(program, model, inputs) if needs_one_rank(program) else None
    found = verify(program, model, (), inputs, steps=1, one_rank=one)
    assert found.ok, found.worst()
    report = verify_static(program)
    assert report.ok and not report.uncovered


@pytest.mark.parametrize(
    ("mesh", "padded", "options"),
    [
        ("dp=2,tp=2", "", {}),
        ("tp=2,ep=2", "left", {}),
        ("fsdp=2,cp=2", "both", {}),
        ("pp=2", "right", {"microbatches": 2, "schedule": "seq1f1b"}),
    ],
    ids=str,
)
def test_sinks_equal_those_written_out(mesh: str, padded: str, options: dict[str, Any]) -> None:
    """The model's own code cats them to the scores of all queries and keys."""
    model, inputs = gpt_oss(), batch(padded)
    folded = analyse(capture(model, (), inputs)).folded
    types = [t for g in folded.segments.values() for t in g.types().values()]
    assert not any(t.shape[-2:] in ((LENGTH, LENGTH), (LENGTH, LENGTH + 1)) for t in types)
    equal(compiled(model, inputs, mesh, **options), model, inputs)


def test_shares_of_a_softmax_with_sinks_may_be_dropped() -> None:
    model, inputs = gpt_oss(dropout=0.3), batch("both")
    equal(compiled(model, inputs, "dp=2,tp=2"), model, inputs)


def gemma2(cap: float = 0.5, dropout: float = 0.0) -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    caps = {"attn_logit_softcapping": cap, "query_pre_attn_scalar": 1, "attention_dropout": dropout}
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, **caps)).train()


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=2,tp=2", {}),
        ("cp=4", {}),
        ("cp=2,tp=2", {}),
        ("pp=2", {"microbatches": 2, "schedule": "seq1f1b"}),
        ("pp=2,cp=2", {"microbatches": 2}),
    ],
    ids=str,
)
def test_soft_caps_equal_those_written_out(mesh: str, options: dict[str, Any]) -> None:
    """With windows in every second layer, and without masks of queries by keys."""
    model, inputs = gemma2(), batch()
    folded = analyse(capture(model, (), inputs)).folded
    told = [n.args[3:] for g in folded.segments.values() for n in g.nodes if n.op == "autoshard.sdpa.default"]
    assert {args[3:] for args in told} == {(0, 0.5), (8, 0.5)} and all(args[0] is None for args in told)
    equal(compiled(model, inputs, mesh, **options), model, inputs)


@pytest.mark.parametrize(("padded", "dropout"), [("both", 0.0), ("", 0.3)])
def test_soft_caps_with_padding_or_dropout_are_written_out(padded: str, dropout: float) -> None:
    """In eager mode gradients flow through scores that padding hides wherever it hides all of a row."""
    model, inputs = gemma2(dropout=dropout), batch(padded)
    equal(compiled(model, inputs, "dp=2,tp=2"), model, inputs)


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flex_attention"])
@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_kernels_of_gpus_become_what_they_compute(name: str, kernel: str) -> None:
    """Not torch's attention, which knows neither sinks nor soft caps."""
    model = gpt_oss() if name == "gpt_oss" else gemma2()
    inputs = batch()
    model.config._attn_implementation_internal = kernel
    program = compiled(model, inputs, "dp=1")
    assert model.config._attn_implementation == kernel
    for ours in (NAME, CAPPED):
        assert ours not in ALL_ATTENTION_FUNCTIONS and ours not in ALL_MASK_ATTENTION_FUNCTIONS
    # the kernel itself needs a GPU: it computes what the model's own code does
    model.config._attn_implementation_internal = "eager"
    equal(program, model, inputs)
