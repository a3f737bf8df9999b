"""Collectives with fewer bits: what is chosen, what it does to numbers, and that training survives it."""

from __future__ import annotations

import functools
from math import prod
from typing import Any

import pytest
import torch
from families import family
from lockstep_check import compare_step, lockstep_step
from slow_links import slow_cluster
from torch import nn

from autoshard import UsageError
from autoshard.api import compile_analysed, plan
from autoshard.ir import Node, refs_of
from autoshard.ir.quantized import packed_bytes
from autoshard.passes.partition.quantize_collectives import Precision
from autoshard.passes.pipeline import NUMBERED
from autoshard.planner.planned import Planned
from autoshard.program.program import Program
from autoshard.program.store import load_program, save_program
from autoshard.runtime.transport.quantized_buffers import Packing, joined, pack, sums, unpack
from autoshard.verify.lockstep import QUANTISED, Batch, Eager, Ranks, tolerance_of, verify

GATHER, SCATTER = "comm.all_gather_q_bucket.default", "comm.reduce_scatter_q_bucket.default"


# -- buffers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_buffer_holds_matrices_rounded_and_the_rest_as_it_is(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(5, 70), (7,), (3, 256)]
    rows = [[torch.randn(s).to(dtype) * 10.0**-k for k, s in enumerate(shapes)] for _ in range(3)]
    how = Packing.of([prod(s) for s in shapes], (bits, 0, bits), 64, dtype)
    wires = pack(rows, how)
    assert wires.shape == (3, how.nbytes) and wires.dtype == torch.uint8
    assert how.nbytes == packed_bytes(how.numels, (bits, 0, bits), 64, dtype.itemsize)
    found = unpack(wires, how)
    limit = 2 ** (bits - 1) - 1
    for t, shape in enumerate(shapes):
        wanted = torch.stack([row[t].reshape(-1) for row in rows])
        if t == 1:
            assert torch.equal(found[t], wanted)
            continue
        # half a step of the scale, and the rounding of the result
        most = wanted.abs().max() * (0.5 / limit + 2 * torch.finfo(dtype).eps)
        assert (found[t].float() - wanted.float()).abs().max() <= most
        assert not torch.equal(found[t], wanted)
        whole = joined(found[t], [shape] * 3, 0, 1)
        assert torch.equal(whole, torch.cat([row.view(shape) for row in found[t]]))


def test_sums_round_each_part_once() -> None:
    torch.manual_seed(0)
    rows = [[torch.randn(300), torch.randn(9)] for _ in range(4)]
    how = Packing.of([300, 9], (8, 0), 64, torch.float32)
    got = sums(torch.cat([pack([row], how) for row in rows]), how)
    apart = [unpack(pack([row], how), how)[0][0] for row in rows]
    assert torch.allclose(got[0], torch.stack(apart).sum(0), atol=1e-6)
    assert torch.allclose(got[1], torch.stack([row[1] for row in rows]).sum(0), atol=1e-6)


def test_no_group_holds_elements_of_two_tensors() -> None:
    """A large value in one tensor must not take the digits of the next away."""
    large, small = torch.full((10,), 1000.0), torch.full((2, 11), 1e-3)
    how = Packing.of([10, 22], (8, 8), 256, torch.float32)
    _, found = unpack(pack([[large, small]], how), how)
    assert torch.allclose(found.view(2, 11), small, rtol=1e-5)


# -- the pass ------------------------------------------------------------------------------------------


@functools.cache
def planned(mesh: str = "fsdp=4", name: str = "llama") -> Planned:
    model, inputs = family(name).make()
    return plan(model, mesh, example_inputs=inputs, cluster=slow_cluster())


@functools.cache
def program(allow: str, mesh: str = "fsdp=4", name: str = "llama") -> Program:
    return compile_analysed(planned(mesh, name), allow=allow)


def nodes_of(made: Program) -> list[Node]:
    inside = [n for s in made.lowered.segments.values() for n in s.graph.nodes]
    return inside + [i for i in made.lowered.main if isinstance(i, Node)]


def test_nothing_is_rounded_unless_allowed() -> None:
    assert not [n for n in nodes_of(program("")) if "_q_" in n.op]
    assert NUMBERED["quantize_collectives"] not in program("").dumps


@pytest.mark.parametrize(("allow", "ops"), [("int8-weights", {GATHER}), ("int4-gradients", {SCATTER})])
def test_only_what_is_allowed_is_rounded(allow: str, ops: set[str]) -> None:
    made = program(allow)
    assert {n.op for n in nodes_of(made) if "_q_" in n.op} == ops
    assert (
        allow.partition("-")[0] + " " in made.dumps[NUMBERED["quantize_collectives"]]
    )  # int8 weights: 12 us, ...


def test_matrices_are_rounded_and_vectors_are_not() -> None:
    bits = [
        (len(t.shape), b)
        for n in nodes_of(program("int8-weights,int8-gradients"))
        if "_q_" in n.op
        for t, b in zip(n.types, n.args[3], strict=True)
        if t is not None
    ]
    assert {b for dims, b in bits if dims > 1} == {8} and {b for dims, b in bits if dims < 2} == {0}


def test_fast_links_keep_all_bits() -> None:
    model, inputs = family("llama").make()
    fast = plan(model, "fsdp=4", example_inputs=inputs, cluster=slow_cluster(bandwidth=1e15))
    assert not [
        n for n in nodes_of(compile_analysed(fast, allow="int8-weights,int8-gradients")) if "_q_" in n.op
    ]


def test_activations_keep_all_bits() -> None:
    """With tp alone there are gathers of activations and none of parameters or gradients."""
    made = program("int4-weights,int4-gradients", "tp=4")
    params = {p.name for p in made.signature.ports if p.kind == "param"}
    gathered = {r for i in made.lowered.main if isinstance(i, Node) and "_q_" in i.op for r in refs_of(i)}
    assert gathered <= params
    for segment in made.lowered.segments.values():
        inputs = {n for n, _ in segment.graph.inputs}
        assert all(set(refs_of(n)) <= inputs for n in segment.graph.nodes if n.op == GATHER)


@pytest.mark.parametrize("text", ["int2-weights", "int8", "int8-weights,int4-weights", "int4-activations"])
def test_precisions_that_do_not_exist(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be allowed"):
        Precision.parse(text)


def test_precision_prints_as_it_is_written() -> None:
    assert str(Precision.parse("int4-gradients, int8-weights")) == "int8-weights,int4-gradients"
    assert str(Precision.parse("int8-activations,int4-weights")) == "int4-weights,int8-activations"
    assert Precision.parse("") == Precision()


def test_a_stored_program_sends_the_same(tmp_path: Any) -> None:
    made = program("int8-weights,int4-gradients")
    save_program(made, tmp_path / "p")
    again = load_program(tmp_path / "p")
    assert again.lowered.segments.keys() == made.lowered.segments.keys()
    assert [(n.op, n.args) for n in nodes_of(again)] == [(n.op, n.args) for n in nodes_of(made)]


# -- numbers -------------------------------------------------------------------------------------------

#: (allowed, mesh, family) -> the largest relative error of the loss and of a gradient that is expected
CASES = [
    ("int8-weights", "fsdp=4", "llama", 1e-3, 0.02),
    ("int8-gradients", "fsdp=4", "llama", 1e-5, 0.02),
    ("int4-weights,int4-gradients", "fsdp=4", "llama", 1e-2, 0.25),
    ("int8-weights,int8-gradients", "fsdp=2,tp=2", "gpt2", 1e-3, 0.03),
    ("int8-weights,int8-gradients", "dp=2,fsdp=2", "t5", 1e-3, 0.05),
]


@pytest.mark.parametrize(("allow", "mesh", "name", "loss", "gradient"), CASES)
def test_numbers_are_close_and_not_equal(
    allow: str, mesh: str, name: str, loss: float, gradient: float
) -> None:
    model, inputs = family(name).make()
    made = program(allow, mesh, name)
    errors = compare_step(made, model, inputs)
    assert errors.pop("loss") < loss
    worst = max(errors, key=lambda k: errors[k])
    assert 1e-5 < errors[worst] < gradient, f"{worst}: {errors[worst]:.2e}"
    lockstep, _ = lockstep_step(made, model, inputs)
    assert lockstep.rounding
    most = {8: 0.02, 4: 0.35}
    assert all(1e-4 < r.error < most[r.bits] for r in lockstep.rounding if r.kind == "all_gather")


def test_verify_measures_what_is_lost() -> None:
    model, inputs = family("llama").make()
    made = program("int8-weights,int4-gradients")
    assert tolerance_of(made) == QUANTISED[4]
    assert tolerance_of(program("int8-weights")) == QUANTISED[8]
    outcome = verify(made, model, (), inputs, steps=1)
    assert outcome.ok
    rows = {(r.kind, r.bits): r for r in outcome.rounded}
    assert set(rows) == {("all_gather", 8), ("reduce_scatter", 4)}
    assert 1e-3 < rows["all_gather", 8].mean <= rows["all_gather", 8].worst < 0.02
    assert 0.02 < rows["reduce_scatter", 4].worst < 0.5
    assert not verify(program(""), model, (), inputs, steps=0).rounded


# -- training ------------------------------------------------------------------------------------------

STEPS = 60


def _model() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 96}
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, use_cache=False, **sizes
        )
    )
    ids = torch.randint(0, 96, (8, 16))
    return model, {"input_ids": ids, "labels": ids}


def _losses(subject: Eager | Ranks, names: list[str]) -> list[float]:
    losses = []
    for _ in range(STEPS):
        losses.append(float(subject.step().outputs["0"]))
        subject.update(1e-6, names)
    return losses


def test_training_with_fewer_bits_keeps_up() -> None:
    """60 steps of AdamW: the loss falls as it does with all bits, though not to the same digits."""
    model, inputs = _model()
    wish = plan(model, "fsdp=4", example_inputs=inputs, cluster=slow_cluster())
    start = {n: x.detach().clone() for n, x in (*model.named_parameters(), *model.named_buffers())}
    exact = compile_analysed(wish)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    batch = Batch(exact, (), inputs)
    wanted = _losses(Ranks(exact, start, batch, 0), names)
    fewer = compile_analysed(wish, allow="int8-weights,int4-gradients")
    found = _losses(Ranks(fewer, start, batch, 0), names)
    assert wanted[-1] < 0.5 * wanted[0]
    apart = [abs(a - b) / b for a, b in zip(found, wanted, strict=True)]
    assert 1e-6 < max(apart) < 0.08
