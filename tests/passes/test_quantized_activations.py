"""Activations gathered with 8 bits: which gathers, in which groups, by which op, and the numbers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sequence_llama
import torch
from lockstep_check import compare_step, lockstep_step, results_of
from ranks import HERE, run_ranks
from torch import nn

from autoshard.api import compile_analysed, plan
from autoshard.cluster.mesh import Mesh
from autoshard.ir import Call, Dtype, Node, Ref, TensorType, refs_of
from autoshard.ir.collectives import ALL_GATHER_Q, ALL_GATHER_WIRE
from autoshard.ir.lowered import Lowered, LoweredSegment, PlacedValue, StagePart
from autoshard.ir.placement import R, Shard
from autoshard.passes import pipeline
from autoshard.passes.pipeline import NUMBERED
from autoshard.passes.simplify.activations import Activations
from autoshard.program.program import Program
from autoshard.program.store import load_program, save_program
from autoshard.program.text import program_text
from autoshard.rules.local import MeshShape
from autoshard.rules.quantized_gather import NORMS, wire_of
from autoshard.search.plan.plan import Recompute
from autoshard.simulate.behaviour import Behaviour
from autoshard.simulate.op_work import Ops
from autoshard.simulate.work import CollectiveWork
from autoshard.verify.lockstep import QUANTISED, Batch, Ranks, tolerance_of, verify
from autoshard.verify.static import verify_static

ALLOW = "int8-activations"


@functools.cache
def program(kernels: bool = True, again: str = "", allow: str = ALLOW) -> Program:
    """again: what the layers compute again in backward."""
    found = sequence_llama.planned()
    if again:
        chosen = {"layers_fwd": Recompute(again, 2)}  # type: ignore[arg-type]
        found = replace(found, plan=replace(found.plan, recompute=chosen))
    return compile_analysed(found, allow=allow, kernels=kernels)


def apart(again: str = "") -> Program:
    """The program with kernels of norms, and their rows quantised by the gathers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "quantise_norms", lambda lowered, mesh: lowered)
        made = program.__wrapped__(again=again)
    assert count(made, ALL_GATHER_Q.op) and not count(made, ALL_GATHER_WIRE.op, *NORMS)
    assert count(made, "autoshard.add_rms_norm.default")
    return made


def calls_of(made: Program) -> list[tuple[Call, Node]]:
    """Every op that a step runs in a call."""
    calls = [i for i in made.lowered.main if isinstance(i, Call)]
    return [(c, n) for c in calls for n in made.lowered.segments[c.segment].graph.nodes]


def count(made: Program, *ops: str) -> int:
    return sum(n.op in ops for _, n in calls_of(made))


def segment_with(made: Program, op: str) -> tuple[str, LoweredSegment, Node]:
    """The first segment that has such an op, and the op."""
    return next((k, s, n) for k, s in made.lowered.segments.items() for n in s.graph.nodes if n.op == op)


# -- what is quantised -----------------------------------------------------------------------------------


def test_only_where_it_is_allowed() -> None:
    assert not count(program(allow=""), ALL_GATHER_Q.op, ALL_GATHER_WIRE.op)
    assert not count(program(allow="int8-gradients"), ALL_GATHER_Q.op, ALL_GATHER_WIRE.op)
    assert NUMBERED["quantize_norms"] not in program(allow="int8-gradients").dumps


def test_rows_of_norms_are_gathered_with_8_bits_and_gradients_are_not() -> None:
    made = program(kernels=False)
    found = [n for _, n in calls_of(made) if n.op == ALL_GATHER_Q.op]
    assert len(found) == 2  # of the second norm of each layer
    assert all(n.args[3:] == ((8,), 128) and not n.backward for n in found)
    assert [n for c, n in calls_of(made) if c.backward and n.op == "comm.all_gather.default"]
    assert "int8 activations: " in made.dumps[NUMBERED["quantize_collectives"]]


def test_fast_links_keep_all_bits() -> None:
    model, inputs = sequence_llama.make()
    fast = sequence_llama.prompt_cluster(1e13)
    found = plan(model, "tp=4", example_inputs=inputs, cluster=fast, pins=sequence_llama.PINS)
    made = compile_analysed(found, allow=ALLOW, ring=False)
    assert count(made, "comm.all_gather.default") and not count(made, ALL_GATHER_Q.op)


def _lowered(gathered: str, more: tuple[Node, ...] = ()) -> Lowered:
    """A gather of one of: rows that a batch and a weight make, a mask, a cast weight, a gradient."""
    rows, whole = TensorType((8, 64), "f32"), (R,)
    ops = {
        "rows": Node("aten.mul.Tensor", (Ref("x"), Ref("w")), (), ("rows",), (rows,)),
        "mask": Node("aten.neg.default", (Ref("x"),), (), ("mask",), (rows,)),
        "cast": Node("aten.neg.default", (Ref("w"),), (), ("cast",), (rows,)),
        "grad": Node("aten.mul.Tensor", (Ref("rows"), Ref("t")), (), ("grad",), (rows,)),
    }
    gather = Node("comm.all_gather.default", (Ref(gathered), "tp", 0), (), ("g",), (rows,))
    main = (*ops.values(), gather, *more)
    names = ["x", "w", "t", *(o for n in main for o in n.outs)]
    values = {n: PlacedValue(rows, (Shard(0),) if n == gathered else whole) for n in names}
    used = Node("aten.neg.default", (Ref("g"),), (), ("end",), (rows,))
    parts = (StagePart(0, "forward", 0, len(main) + 1),)
    return Lowered({}, (*main, used), {**values, "end": PlacedValue(rows, whole)}, ("end",), parts)


@pytest.mark.parametrize("gathered", ["mask", "cast", "grad"])
def test_masks_weights_and_gradients_are_no_activations(gathered: str) -> None:
    lowered = _lowered(gathered)
    found = Activations(lowered, ["x"], ["w"], ["t"])
    gather = next(i for i in lowered.main if i.outs == ("g",))
    assert isinstance(gather, Node) and not found.are_gathered(gather, "")


def test_what_is_read_without_the_gather_keeps_all_bits() -> None:
    """``rows`` is read by the gradient, too, which would not be that of the rounded rows."""
    rows = TensorType((8, 64), "f32")
    copy = Node("aten.mul.Tensor", (Ref("x"), Ref("w")), (), ("copy",), (rows,))
    for name, wanted in (("rows", False), ("copy", True)):
        gather = Node("comm.all_gather.default", (Ref(name), "tp", 0), (), ("h",), (rows,))
        lowered = _lowered("mask", (copy, gather))
        assert Activations(lowered, ["x"], ["w"], ["t"]).are_gathered(gather, "") is wanted


# -- norms that quantise ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("again", "ops"),
    [
        ("", {"add_rms_norm_quantise": 2}),
        ("full", {"add_rms_norm_quantise": 4}),
        ("selective", {"add_rms_norm_quantise": 2, "rms_norm_quantise": 2}),
    ],
)
def test_norms_give_wires(again: str, ops: dict[str, int]) -> None:
    made = program(again=again)
    for name in ("add_rms_norm_quantise", "rms_norm_quantise"):
        assert count(made, f"autoshard.{name}.default") == ops.get(name, 0)
    assert count(made, ALL_GATHER_WIRE.op) == sum(ops.values()) and not count(made, ALL_GATHER_Q.op)
    assert "its rows leave as int8" in made.dumps[NUMBERED["quantize_norms"]]
    without = program(kernels=False, again=again)
    assert not count(without, ALL_GATHER_WIRE.op, *NORMS)
    assert count(without, ALL_GATHER_Q.op) == count(made, ALL_GATHER_WIRE.op)


def test_rows_that_something_else_reads_are_written() -> None:
    """The rows of the first norm go into products as they are."""
    made = program()
    assert count(made, "autoshard.rms_norm.default", "autoshard.add_rms_norm.default") >= 1
    for _, segment in made.lowered.segments.items():
        wires = {n.outs[NORMS[n.op][0]] for n in segment.graph.nodes if n.op in NORMS}
        readers = [n.op for n in segment.graph.nodes if wires & set(refs_of(n))]
        assert len(readers) == len(wires) and set(readers) <= {ALL_GATHER_WIRE.op}


def test_a_stored_program_sends_the_same(tmp_path: Path) -> None:
    made = program()
    save_program(made, tmp_path / "p")
    again = load_program(tmp_path / "p")
    assert program_text(again) == program_text(made)
    assert [n for _, n in calls_of(again) if n.op == ALL_GATHER_WIRE.op]


def test_the_message_is_priced_as_the_bytes_of_the_wires() -> None:
    prices = {}
    for kernels, op in ((True, ALL_GATHER_WIRE.op), (False, ALL_GATHER_Q.op)):
        made = program(kernels)
        _, segment, node = segment_with(made, op)
        mesh = Mesh.parse(made.mesh)
        works = Ops(mesh, mesh.coords(0), Behaviour()).work(node, segment.placed())
        (prices[kernels],) = [w for w in works if isinstance(w, CollectiveWork)]
    assert prices[True] == prices[False]
    assert prices[True].nbytes == 4 * (64 * 128 + 64 * 4) and prices[True].kind == "all_gather"


def test_a_wire_lies_as_its_rows_do() -> None:
    mesh = MeshShape(("dp", "tp"), (2, 4))
    rows = PlacedValue(TensorType((4, 64, 128), "bf16"), (Shard(0), Shard(1)))
    found = wire_of(rows, 128, mesh)
    assert found == PlacedValue(TensorType((8 * (2 * 16 * 128 + 2 * 16 * 4),), "u8"), (Shard(0), Shard(0)))
    assert wire_of(replace(rows, layout=(R, R)), 128, mesh) is not None
    assert wire_of(rows, 256, mesh) is None  # a group across rows
    assert wire_of(replace(rows, layout=(R, Shard(2))), 32, mesh) is None  # parts of rows
    assert wire_of(replace(rows, type=TensorType((4, 63, 128), "bf16")), 128, mesh) is None  # uneven


# -- numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", ["", "full", "selective"])
def test_numbers_are_close_and_the_same_with_and_without_the_kernel(again: str) -> None:
    model, inputs = sequence_llama.make()
    errors = compare_step(program(again=again), model, inputs)
    assert errors.pop("loss") < 1e-5
    assert 1e-5 < max(errors.values()) < 5e-3
    values = []
    for made in (program(again=again), apart(again)):
        results, lost = results_of(made, model, inputs)
        assert lost and all(1e-3 < error < 0.01 for error in lost)
        values.append((results, lost))
    (fused, one), (plain, two) = values
    assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))
    assert one == pytest.approx(two, rel=1e-6)


def test_bfloat16_rows_are_the_same_with_and_without_the_kernel() -> None:
    model, inputs = sequence_llama.make()
    found = sequence_llama.halved(model, inputs)
    fused = compile_analysed(found, allow=ALLOW, kernels=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "quantise_norms", lambda lowered, mesh: lowered)
        plain = compile_analysed(found, allow=ALLOW, kernels=True)
    assert count(fused, ALL_GATHER_WIRE.op) == count(plain, ALL_GATHER_Q.op) > 0
    ends = [results_of(made, model, inputs)[0] for made in (fused, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_backward_sees_the_numbers_of_forward() -> None:
    """Layers that are computed again give the same gradients, bit for bit."""
    model, inputs = sequence_llama.make()
    found = []
    for again in ("", "full"):
        made = program(kernels=False, again=again)
        lockstep, env = lockstep_step(made, model, inputs)
        grads = {r.target: r.value for r in made.signature.results if r.kind == "grad"}
        found.append({t: lockstep.whole(env[v], v) for t, v in grads.items()})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][t], found[1][t]) for t in found[0])


def test_verify_says_what_was_lost_of_activations() -> None:
    model, inputs = sequence_llama.make()
    made = program(allow="int8-activations,int8-weights")
    assert tolerance_of(made) == QUANTISED[8] == tolerance_of(program())
    outcome = verify(made, model, (), inputs, steps=1)
    assert outcome.ok
    rows = {r.what: r for r in outcome.rounded}
    assert set(rows) == {"parameters", "activations"}
    assert 1e-3 < rows["activations"].mean <= rows["activations"].worst < 0.01


STEPS = 30


def _losses(made: Program, start: dict[str, torch.Tensor], model: nn.Module, inputs: Any) -> list[float]:
    subject = Ranks(made, start, Batch(made, (), inputs), 0)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    losses = []
    for _ in range(STEPS):
        losses.append(float(subject.step().outputs["0"]))
        subject.update(1e-6, names)
    return losses


def test_training_with_rounded_activations_keeps_up() -> None:
    """30 steps of AdamW: the loss falls as it does with all bits, though not to the same digits."""
    model, inputs = sequence_llama.make()
    start = {n: x.detach().clone() for n, x in (*model.named_parameters(), *model.named_buffers())}
    wanted = _losses(program(allow=""), start, model, inputs)
    found = _losses(program(), start, model, inputs)
    assert wanted[-1] < 0.6 * wanted[0]
    apart = [abs(a - b) / b for a, b in zip(found, wanted, strict=True)]
    assert 1e-7 < max(apart) < 0.01


def test_ranks_of_gloo_send_wires(tmp_path: Path) -> None:
    """Four processes train with and without the kernel, and as lockstep does."""
    model, inputs = sequence_llama.make()
    for name, made in (("fused", program()), ("apart", apart())):
        save_program(made, tmp_path / name)
    run_ranks([str(HERE / "wires_worker.py"), str(tmp_path), "llama"])
    rows = json.loads((tmp_path / "losses.json").read_text())
    lockstep, env = lockstep_step(program(), model, inputs)
    loss = next(r.value for r in program().signature.results if r.kind == "output" and r.target == "0")
    assert rows["fused"][0] == pytest.approx(float(lockstep.whole(env[loss], loss)), rel=1e-6)
    assert rows["fused"] == rows["apart"]
    assert rows["fused"][-1] < rows["fused"][0]


# -- static proof ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("again", ["", "full", "selective"])
def test_the_proof_holds(kernels: bool, again: str) -> None:
    report = verify_static(program(kernels, again))
    assert report.ok, report.findings[0]
    note = next(c.note for c in report.checked if c.name == "collectives")
    assert "rounded" in note


def _with(made: Program, op: str, change: Callable[[Node], Node]) -> Program:
    """The program with another op in place of the first such."""
    name, segment, node = segment_with(made, op)
    nodes = tuple(change(n) if n is node else n for n in segment.graph.nodes)
    broken = replace(segment, graph=replace(segment.graph, nodes=nodes))
    segments = {**made.lowered.segments, name: broken}
    return replace(made, lowered=replace(made.lowered, segments=segments))


def _argument(number: int, value: Any) -> Callable[[Node], Node]:
    def change(node: Node) -> Node:
        return replace(node, args=(*node.args[:number], value, *node.args[number + 1 :]))

    return change


NORM = "autoshard.add_rms_norm_quantise.default"


@pytest.mark.parametrize(
    ("op", "change", "why"),
    [
        (ALL_GATHER_WIRE.op, _argument(1, "dp"), "the mesh has no axis 'dp'"),
        (ALL_GATHER_WIRE.op, _argument(1, ("tp", "tp")), "its arguments are not those of such a gather"),
        (ALL_GATHER_WIRE.op, _argument(2, (0, 1, 1, None)), "it cuts or joins at"),
        (ALL_GATHER_WIRE.op, _argument(2, (1, 2, 1, None)), "it cuts or joins at"),
        (ALL_GATHER_WIRE.op, _argument(3, 64), "in groups of 64"),
        (ALL_GATHER_WIRE.op, _argument(4, (16, 4, 128)), "in groups of 128 as f32[16, 4, 128]"),
        (ALL_GATHER_WIRE.op, _argument(5, Dtype("bf16")), "as bf16"),
        (ALL_GATHER_WIRE.op, _argument(0, Ref("add_4")), "no norm before it makes the wire add_4"),
        (ALL_GATHER_WIRE.op, _argument(3, "128"), "its arguments are not those of such a gather"),
        (NORM, _argument(5, 64), "the wire of f32[4, 64, 128] is"),
        (NORM, _argument(5, 256), "does not lie in whole rows of groups of 256"),
        (ALL_GATHER_WIRE.op, lambda n: replace(n, op="aten.clone.default", args=n.args[:1]), "is a wire"),
    ],
)
def test_a_wrong_gather_is_refused(op: str, change: Callable[[Node], Node], why: str) -> None:
    report = verify_static(_with(program(), op, change))
    assert not report.ok
    assert any(why in f"{f.finding.what} {f.finding.why}" for f in report.findings), report.findings


def test_a_gather_over_another_axis_is_refused() -> None:
    """Two ranks of data parallelism would join their unlike batches as if they were parts of a sequence."""
    made = compile_analysed(sequence_llama.planned("dp=2,tp=4", 64), allow=ALLOW, kernels=True)
    assert verify_static(made).ok
    report = verify_static(_with(made, ALL_GATHER_WIRE.op, _argument(1, "dp")))
    assert not report.ok and "that is all_gather over tp" in str(report.findings)


def test_a_wire_that_lies_elsewhere_is_refused() -> None:
    name, segment, node = segment_with(program(), ALL_GATHER_WIRE.op)
    broken = replace(segment, layouts={**segment.layouts, node.args[0].name: (R,)})
    segments = {**program().lowered.segments, name: broken}
    report = verify_static(replace(program(), lowered=replace(program().lowered, segments=segments)))
    assert not report.ok and "split as its rows are" in str(report.findings)
