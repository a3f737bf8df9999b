"""LayerNorms that quantise their rows: where, the same numbers as apart, and the proof.

`test_quantised_activations` has RMSNorms, and what does not depend on the norm.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sequence_gpt2
import torch
from lockstep_check import compare_step, lockstep_step, results_of
from ranks import HERE, run_ranks
from sequence_gpt2 import program

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster
from autoshard.ir import Call, Node, Ref, refs_of
from autoshard.ir.collectives import ALL_GATHER_Q, ALL_GATHER_WIRE
from autoshard.passes import pipeline
from autoshard.passes.pipeline import NUMBERED
from autoshard.planner.analysis import analyse
from autoshard.planner.planning import plan_analysed
from autoshard.program.program import Program
from autoshard.program.store import load_program, save_program
from autoshard.program.text import program_text
from autoshard.rules.quantized_gather import NORMS
from autoshard.verify.static import verify_static

ALONE, ADDED = "autoshard.layer_norm_quantise.default", "autoshard.add_layer_norm_quantise.default"
BIASES = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
AGAIN = pytest.mark.parametrize("again", ["", "full", "selective"])
#: the second norm of each of two layers, and what is computed again of them
MADE = {"": {ADDED: 2}, "full": {ADDED: 4}, "selective": {ADDED: 2, ALONE: 2}}


def ops_of(made: Program) -> Counter[str]:
    """How often a step calls each op."""
    calls = [i for i in made.lowered.main if isinstance(i, Call)]
    return Counter(n.op for c in calls for n in made.lowered.segments[c.segment].graph.nodes)


def apart(bias: bool, again: str, dtype: torch.dtype = torch.float32) -> Program:
    """The program in which gathers quantise the rows that norms write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "quantise_norms", lambda lowered, mesh: lowered)
        made = program.__wrapped__(bias, again, True, dtype)
    ops = ops_of(made)
    assert ops[ALL_GATHER_Q.op] and not ops[ALL_GATHER_WIRE.op] and not any(ops[n] for n in NORMS)
    return made


@BIASES
@AGAIN
def test_norms_give_wires(again: str, bias: bool) -> None:
    made = program(bias, again)
    ops = ops_of(made)
    assert {op: n for op, n in ops.items() if op in NORMS} == MADE[again]
    assert ops[ALL_GATHER_WIRE.op] == sum(MADE[again].values()) and not ops[ALL_GATHER_Q.op]
    assert "its rows leave as int8" in made.dumps[NUMBERED["quantize_norms"]]
    for segment in made.lowered.segments.values():
        for node in segment.graph.nodes:
            if node.op in NORMS:
                assert isinstance(node.args[-3], Ref) if bias else node.args[-3] is None
                readers = [n.op for n in segment.graph.nodes if node.outs[NORMS[node.op][0]] in refs_of(n)]
                assert readers == [ALL_GATHER_WIRE.op]


def test_without_kernels_gathers_quantise() -> None:
    ops = ops_of(program(kernels=False))
    assert ops[ALL_GATHER_Q.op] == 2 and not ops[ALL_GATHER_WIRE.op] and not any(ops[n] for n in NORMS)


@BIASES
@AGAIN
def test_numbers_are_the_same_with_and_without_the_kernel(again: str, bias: bool) -> None:
    model, inputs = sequence_gpt2.make(bias)
    errors = compare_step(program(bias, again), model, inputs)
    assert errors.pop("loss") < 1e-4
    assert 1e-5 < max(errors.values()) < 1e-2
    values = []
    for made in (program(bias, again), apart(bias, again)):
        results, lost = results_of(made, model, inputs)
        assert lost and all(1e-3 < error < 0.01 for error in lost)
        values.append((results, lost))
    (fused, one), (plain, two) = values
    assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))
    assert one == pytest.approx(two, rel=1e-6)


@BIASES
def test_bfloat16_rows_are_the_same_with_and_without_the_kernel(bias: bool) -> None:
    model, inputs = sequence_gpt2.make(bias, torch.bfloat16)
    fused = program(bias, dtype=torch.bfloat16)
    assert ops_of(fused)[ADDED] == ops_of(fused)[ALL_GATHER_WIRE.op] == 2
    ends = [results_of(made, model, inputs)[0] for made in (fused, apart(bias, "", torch.bfloat16))]
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_statistics_in_half_precision_stay_with_their_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A LayerNorm that is no kernel yet becomes one only if its statistics are what the kernel gives."""
    monkeypatch.setattr(pipeline, "fuse_kernels", lambda lowered, *_: lowered)
    assert ops_of(program.__wrapped__())[ALONE] == 2
    half = ops_of(program.__wrapped__(dtype=torch.bfloat16))
    assert half[ALL_GATHER_Q.op] == 2 and not half[ALONE] and not half[ALL_GATHER_WIRE.op]


@BIASES
@AGAIN
def test_the_proof_holds(again: str, bias: bool) -> None:
    report = verify_static(program(bias, again))
    assert report.ok, report.findings[0]


def test_the_proof_holds_of_norms_without_a_sum() -> None:
    """In half precision, where every LayerNorm is a kernel."""
    model, inputs = sequence_gpt2.make(dtype=torch.bfloat16)
    analysis = analyse(capture(model, (), inputs))
    found = plan_analysed(analysis, [Mesh.parse("dp=4")], load_cluster("cpu-gloo"))
    made = compile_analysed(found, kernels=True)
    assert ops_of(made)["autoshard.layer_norm.default"] == 3
    report = verify_static(made)
    assert report.ok, report.findings[0]


def test_a_stored_program_sends_the_same(tmp_path: Path) -> None:
    for bias in (True, False):
        save_program(program(bias), tmp_path / str(bias))
        read = load_program(tmp_path / str(bias))
        assert program_text(read) == program_text(program(bias))


def test_ranks_of_gloo_send_wires(tmp_path: Path) -> None:
    """Four processes train with and without the kernel, and as lockstep does."""
    model, inputs = sequence_gpt2.make()
    for name, made in (("fused", program()), ("apart", apart(True, ""))):
        save_program(made, tmp_path / name)
    run_ranks([str(HERE / "wires_worker.py"), str(tmp_path), "gpt2"])
    rows = json.loads((tmp_path / "losses.json").read_text())
    lockstep, env = lockstep_step(program(), model, inputs)
    loss = next(r.value for r in program().signature.results if r.kind == "output" and r.target == "0")
    assert rows["fused"][0] == pytest.approx(float(lockstep.whole(env[loss], loss)), rel=1e-6)
    assert rows["fused"] == rows["apart"]
    assert rows["fused"][-1] < rows["fused"][0]


def _last(value: Any) -> Callable[[Node], Node]:
    return lambda node: replace(node, args=(*node.args[:-1], value))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_last(64), "the wire of f32[4, 64, 128] is"),
        (_last(256), "does not lie in whole rows of groups of 256"),
        (_last("128"), "not those of a norm that gives a wire"),
        (lambda n: replace(n, args=n.args[:-1]), "not those of a norm that gives a wire"),
    ],
)
@pytest.mark.parametrize("op", [ADDED, ALONE])
def test_a_wrong_norm_is_refused(op: str, change: Callable[[Node], Node], why: str) -> None:
    made = program(again="selective")
    segments = made.lowered.segments
    name, node = next((k, n) for k, s in segments.items() for n in s.graph.nodes if n.op == op)
    graph = segments[name].graph
    nodes = tuple(change(n) if n is node else n for n in graph.nodes)
    broken = replace(segments[name], graph=replace(graph, nodes=nodes))
    report = verify_static(replace(made, lowered=replace(made.lowered, segments={**segments, name: broken})))
    assert not report.ok
    assert any(why in f"{f.finding.what} {f.finding.why}" for f in report.findings), report.findings
