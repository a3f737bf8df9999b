"""Parameters stored in float32 that a program takes in 16 bits."""

from __future__ import annotations

import re

import pytest
import torch
from calls_worker import batch, build
from torch import nn

import autoshard
from autoshard.errors import UsageError
from autoshard.program.program import Program
from autoshard.program.text import program_text


class Autocast(nn.Module):
    """Computes products in bfloat16 and norms in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = self.model(**kwargs).loss
        return loss


def compiled(model: nn.Module, mesh: str, **options: str) -> tuple[autoshard.Plan, Program]:
    inputs = batch(8, 16)
    planned = autoshard.plan(model, mesh, example_inputs=inputs, cluster="h100-dgx", **options)
    return planned.plan, autoshard.compile(model, planned).program


def messages(program: Program, kind: str) -> list[str]:
    """Types of what collectives of a kind give, one by one."""
    values = {
        out: type_
        for segment in program.lowered.segments.values()
        for node in segment.graph.nodes
        for out, type_ in zip(node.outs, node.types, strict=True)
        if node.op.startswith(f"comm.{kind}") and type_ is not None
    }
    return [t.dtype for t in values.values()]


def test_another_type_of_16_bits() -> None:
    """As FSDP2's policies do, parameters of one are cast to the other."""
    _, program = compiled(build("Llama").bfloat16(), "fsdp=4", precision="fp16")
    graphs = [segment.graph for segment in program.lowered.segments.values()]
    products = [t for g in graphs for n in g.nodes if n.op == "aten.mm.default" for t in n.types if t]
    assert products and {t.dtype for t in products} == {"f16"}
    kinds = {r.value for r in program.signature.results if r.kind == "grad"}
    assert {program.lowered.values[g].type.dtype for g in kinds} == {"bf16"}


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Mixtral"])
def test_gathers_have_16_bits_and_reductions_32(name: str) -> None:
    plan, program = compiled(build(name), "fsdp=4", precision="bf16")
    assert plan.precision == "bf16"
    params = [p for p in program.signature.ports if p.kind == "param"]
    assert {(p.type.dtype, p.stored) for p in params} == {("bf16", "f32")}
    assert set(messages(program, "all_gather")) == {"bf16"}
    grads = {r.value for r in program.signature.results if r.kind == "grad"}
    assert {program.lowered.values[g].type.dtype for g in grads} == {"f32"}
    assert "bf16" not in messages(program, "reduce_scatter")


def test_captured_autocast_gathers_what_it_computes_with() -> None:
    _, program = compiled(Autocast(build("Llama")), "fsdp=4")
    stored = {p.target: p.stored for p in program.signature.ports if p.kind == "param"}
    assert stored["model.model.layers.0.mlp.up_proj.weight"] == "f32"
    assert stored["model.model.layers.1.self_attn.q_proj.weight"] == "f32"
    assert stored["model.model.norm.weight"] == ""


def test_sums_over_tensor_ranks_of_activations_stay_in_16_bits() -> None:
    _, program = compiled(build("Llama"), "tp=4", precision="bf16")
    kinds = messages(program, "all_reduce") + messages(program, "reduce_scatter")
    assert "bf16" in kinds


def test_the_text_says_in_which_type_a_parameter_is_stored() -> None:
    _, program = compiled(build("Llama"), "fsdp=2", precision="fp16")
    lines = [x for x in program_text(program).splitlines() if "= param(" in x]
    assert lines and all(re.search(r'"f16\[.*\] .*" = param\(\'.*\', \'f32\'\)$', x) for x in lines)


def test_memory_is_that_of_a_master_copy() -> None:
    model = build("Llama")
    count = sum(p.numel() for p in model.parameters())
    by_precision = {}
    for precision in ("", "bf16"):
        planned = autoshard.plan(
            model, "dp=2", example_inputs=batch(8, 16), cluster="h100-dgx", precision=precision
        )
        assert planned.solution is not None
        by_precision[precision] = planned.solution.placements.bytes
    # parameter and its cast, gradient and two moments, beside activations of half the size
    assert by_precision["bf16"] < by_precision[""] + 2 * count


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(UsageError, match="precision is 'int8'"):
        compiled(build("Llama"), "dp=2", precision="int8")
