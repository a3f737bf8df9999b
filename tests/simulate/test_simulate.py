"""The simulated step: prices of kernels by shape, streams, what runs beside what, memory inside a part."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import pipeline, planned
from typer.testing import CliRunner

from autoshard.api import compile_analysed
from autoshard.cli.main import app
from autoshard.cli.simulate import tokens_of
from autoshard.cluster import Mesh, load_cluster
from autoshard.cluster.cluster import Device
from autoshard.cluster.kernels import Kernels
from autoshard.cluster.load import parse_cluster
from autoshard.cluster.measured import KINDS
from autoshard.cost.collective import _FORMULAS, seconds
from autoshard.cost.kernel_time import attention_seconds, product_seconds, traffic_seconds
from autoshard.cost.link import link_of
from autoshard.errors import UsageError
from autoshard.ir import Call, Graph, Node, Ref, TensorType
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.placement import Partial, Replicate, Shard
from autoshard.ir.symbols import LocalSize, ShardOf
from autoshard.ir.transposed import turned_in
from autoshard.ir.views import VIEWS
from autoshard.passes.pipeline import LoweringOptions
from autoshard.program.program import Program
from autoshard.program.store import save_program
from autoshard.schedules.schedule import Action
from autoshard.search.plan.plan import Recompute
from autoshard.simulate.behaviour import Behaviour
from autoshard.simulate.op_work import Ops, product_flops, unfused
from autoshard.simulate.step import estimate_step, simulated
from autoshard.simulate.streams import Habits, Player, SegmentCall, pricer
from autoshard.simulate.transients import Transients
from autoshard.simulate.work import Attention, CollectiveWork, MatmulWork, MemoryWork, OpTask, Sheet, Work

CPU = load_cluster("cpu-gloo")
#: 10 multiprocessors, a product of 100 x 100 tiles at 1 PFLOP/s, no launch
PLAIN = Device(
    "plain",
    2**34,
    {"f32": 1e15},
    1e12,
    1.0,
    0.0,
    kernels=Kernels(multiprocessors=10, tile=(100, 100), traffic=1.0),
)
Invoke = Callable[..., Any]


# -- kernels ----------------------------------------------------------------------------------------------


def product(rows: int, columns: int, depth: int = 1000, device: Device = PLAIN) -> float:
    return product_seconds(1, rows, columns, depth, "f32", 0.0, device)


def test_tiles_run_in_waves() -> None:
    full = 2.0 * 1000 * 100 * 1000 / 1e15
    assert product(1000, 100) == pytest.approx(full)
    # one row more needs a second wave of large tiles; smaller tiles fill it better, at a lower rate
    assert full < product(1001, 100) <= 2 * full
    assert product(10, 10) <= full


def test_idle_multiprocessors_share_a_sum() -> None:
    """One tile of ten: eight of them do an eighth each, and their parts are written and read once more."""
    alone = 2.0 * 100 * 100 * 100_000 / (1e15 / 10)
    parts = 2.0 * 8 * 100 * 100 * 4 / PLAIN.traffic
    assert product(100, 100, 100_000) == pytest.approx(alone / 8 + parts)
    # where the sum is short, that takes longer than it saves
    assert product(100, 100, 100) == pytest.approx(2.0 * 100 * 100 * 100 / (1e15 / 10))


def test_convolutions_are_products_of_places_and_channels() -> None:
    image, weight, made = (TensorType(s, "f32") for s in ((8, 3, 14, 14), (6, 3, 3, 3), (8, 6, 12, 12)))
    split = (Shard(0),)
    whole = (Replicate(),)
    values = {
        "x": PlacedValue(image, split),
        "w": PlacedValue(weight, whole),
        "y": PlacedValue(made, split),
        "dx": PlacedValue(image, split),
        "dw": PlacedValue(weight, (Partial(),)),
    }
    args = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    forward = Node("aten.convolution.default", (Ref("x"), Ref("w"), None, *args), (), ("y",), (made,))
    ops = Ops(Mesh.parse("dp=4"), (0,), Behaviour())
    moved = 4.0 * (2 * 3 * 14 * 14 + 6 * 27 + 2 * 6 * 12 * 12)
    assert ops.work(forward, values) == [MatmulWork(1, 2 * 144, 6, 27, "f32", moved)]
    back = Node(
        "aten.convolution_backward.default",
        (Ref("y"), Ref("x"), Ref("w"), None, *args, (True, True, False)),
        (),
        ("dx", "dw", "db"),
        (image, weight, None),
    )
    found = [work for work in ops.work(back, values) if isinstance(work, MatmulWork)]
    assert [(w.rows, w.columns, w.turned[0]) for w in found] == [(2 * 196, 3, False), (6, 27, True)]
    only = replace(back, types=(None, weight, None))
    (one,) = (work for work in ops.work(only, values) if isinstance(work, MatmulWork))
    assert (one.rows, one.columns, one.depth) == (6, 27, 2 * 144)


def test_rows_are_those_that_lie_in_memory() -> None:
    """257 tokens are no whole words of 16 bytes: only where a row of memory has as many does that matter."""
    half = replace(PLAIN, peak_flops={"f32": 1e14, "f16": 1e15})

    def taken(rows: int, columns: int, depth: int, turned: tuple[bool, bool]) -> float:
        return product_seconds(1, rows, columns, depth, "f16", 0.0, half, turned=turned)

    weights = taken(512, 512, 257, (True, False))  # gradients of a weight: a sum over tokens
    assert weights < taken(512, 512, 257, (False, False)) / 2
    assert taken(257, 512, 512, (False, True)) < taken(512, 257, 512, (False, True))  # scores of attention


def test_transposed_looks_lie_by_another_dim() -> None:
    two = TensorType((4, 6), "f32")
    other = TensorType((6, 4), "f32")
    graph = Graph(
        "g",
        (("a", two),),
        (
            Node("aten.t.default", (Ref("a"),), (), ("t",), (other,)),
            Node("aten.t.default", (Ref("t"),), (), ("b",), (two,)),
            Node("aten.transpose.int", (Ref("a"), -1, 0), (), ("c",), (other,)),
            Node("aten.permute.default", (Ref("c"), (1, 0)), (), ("d",), (two,)),
            Node("aten.permute.default", (Ref("a"), (0, 1)), (), ("e",), (two,)),
            Node("aten.expand.default", (Ref("c"), (6, 4)), (), ("f",), (other,)),
            Node("aten.neg.default", (Ref("c"),), (), ("g",), (other,)),
        ),
        ("g",),
    )
    assert turned_in(graph) == {"t", "c", "f"}


def test_short_sums_are_slower_per_flop() -> None:
    deep = replace(PLAIN, kernels=replace(PLAIN.kernels, depth=500.0))
    assert product(1000, 100, 500, deep) == pytest.approx(2 * product(1000, 100, 500))
    assert product(1000, 100, 50_000, deep) == pytest.approx(product(1000, 100, 50_000), rel=0.011)
    # a tile takes no longer to begin and to end where products take four times as long
    fast = replace(deep, peak_flops={**deep.peak_flops, "bf16": 4 * deep.peak_flops["f32"]})
    assert product(1000, 100, 500, fast) == pytest.approx(1.25 * product(1000, 100, 500))


def test_vector_units_are_filled_by_shorter_sums() -> None:
    """Many products whose rows are not aligned run at the rate of f32, and lose as little as f32 does."""
    kernels = replace(PLAIN.kernels, depth=800.0)
    half = replace(PLAIN, peak_flops={"f32": 1e15, "f16": 8e15, "bf16": 8e15})
    seconds = [
        product_seconds(10, 1000, 100, 150, kind, 0.0, replace(half, kernels=kernels))
        for kind in ("f16", "f32")
    ]
    assert seconds[0] == pytest.approx(seconds[1])
    assert seconds[1] == pytest.approx(10 * (150 + 100) / 150 * product(1000, 100, 150))


@settings(max_examples=60)
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3000), st.floats(0, 1e9))
def test_no_product_beats_the_peak_or_the_memory(rows: int, columns: int, depth: int, nbytes: float) -> None:
    for name in ("a100-selene", "h100-dgx", "cpu-gloo"):
        device = load_cluster(name).device
        seconds = product_seconds(1, rows, columns, depth, "f32", nbytes, device)
        assert seconds >= 2.0 * rows * columns * depth / device.peak_flops["f32"]
        assert seconds >= nbytes / device.memory_bandwidth
        assert seconds >= traffic_seconds(nbytes, device)


def test_unfused_attention_writes_its_scores() -> None:
    whole = Attention(8, 64, 32, 16, False, "f16", 2.0 * 8 * 64 * 32 * 32, 0.0)
    plain, dropped = (unfused(whole, 2, Behaviour(attention="unfused", dropout=p)) for p in (0.0, 0.1))
    assert [type(w) for w in plain] == [MatmulWork, MemoryWork, MatmulWork]
    assert sum(w.flop for w in plain if isinstance(w, MatmulWork)) == pytest.approx(whole.flop)
    assert plain[1] == MemoryWork(2 * 2 * 8 * 64 * 32)
    assert [type(w) for w in dropped] == [MatmulWork, MemoryWork, MemoryWork, MatmulWork]
    back = replace(whole, backward=True)
    again = unfused(back, 2, Behaviour(attention="unfused", recomputes_scores=True))
    once = unfused(back, 2, Behaviour(attention="unfused"))
    assert again[-len(once) :] == once and len(again) == len(once) + 2
    products = [w for w in once if isinstance(w, MatmulWork)]
    assert sum(w.flop for w in products) == pytest.approx(2 * whole.flop)


# -- streams ----------------------------------------------------------------------------------------------


def price(work: Work) -> float:
    return work.nbytes


def played(
    sheet: Sheet, args: tuple[str, ...], outs: tuple[str, ...], gradients: tuple[str, ...] = (), **how: Any
) -> Any:
    habits = Habits(**{"ahead": False, "behind": False, "beside": False, "overlap": 1.0, **how})
    return Player(price, (4,), habits).play(
        [SegmentCall(sheet, tuple(args), tuple(outs))], {"w", "v"}, gradients
    )


def task(work: Work, after: tuple[int, ...] = (), inputs: tuple[int, ...] = ()) -> OpTask:
    return OpTask("x", "op", work, after, inputs)


GATHERS = Sheet(
    (
        task(CollectiveWork("all_gather", 0, 3.0), inputs=(0,)),
        task(MemoryWork(2.0), after=(0,), inputs=(1,)),
        task(CollectiveWork("all_gather", 0, 3.0), inputs=(2,)),
        task(MemoryWork(4.0), after=(1, 2)),
    ),
    (3,),
)


def test_parameters_are_gathered_ahead() -> None:
    waits = played(GATHERS, ("w", "x", "v"), ("y",))
    assert (waits.seconds, waits.compute, waits.exposed, waits.hidden) == (12.0, 6.0, (6.0,), 0.0)
    ahead = played(GATHERS, ("w", "x", "v"), ("y",), ahead=True)
    # the second gather runs from 3 to 6 beside the op from 3 to 5
    assert (ahead.seconds, ahead.hidden) == (10.0, 2.0)
    slowed = played(GATHERS, ("w", "x", "v"), ("y",), ahead=True, overlap=0.5)
    assert slowed.seconds == 11.0 and sum(slowed.exposed) == pytest.approx(5.0)


REDUCES = Sheet(
    (
        task(MemoryWork(2.0), inputs=(0,)),
        task(CollectiveWork("reduce_scatter", 0, 3.0), after=(0,)),
        task(MemoryWork(4.0), after=(0,)),
    ),
    (1, 2),
)


def test_gradients_are_reduced_behind() -> None:
    late = played(REDUCES, ("x",), ("g", "y"), ("g",))
    assert late.seconds == 9.0 and late.hidden == 0.0
    behind = played(REDUCES, ("x",), ("g", "y"), ("g",), behind=True)
    assert behind.seconds == 6.0 and behind.hidden == 3.0 and behind.exposed == (0.0,)
    # the same message of an activation stands in the way, or a quarter of it where it runs in parts
    assert played(REDUCES, ("x",), ("g", "y")).seconds == 9.0
    assert played(REDUCES, ("x",), ("g", "y"), beside=True).seconds == 6.75


def test_a_host_that_waits_for_every_op_is_never_ahead() -> None:
    """Three ops of 10 s and a gradient's message of 4 s, issued in 1 s each."""
    computes = tuple(OpTask(f"y{k}", "op", MemoryWork(10.0), (k - 1,) if k else (), ()) for k in range(3))
    sheet = Sheet(
        (computes[0], OpTask("g", "op", CollectiveWork("all_reduce", 0, 4.0), (0,), ()), *computes[1:]), (1,)
    )
    sheet = replace(
        sheet, tasks=(*sheet.tasks[:2], replace(computes[1], after=(0,)), replace(computes[2], after=(2,)))
    )
    seconds = [
        Player(price, (4,), Habits(dispatch=1.0, blocking=blocking)).play(
            [SegmentCall(sheet, (), ("g",))], (), ("g",)
        )
        for blocking in (False, True)
    ]
    assert [played.seconds for played in seconds] == [1 + 3 * 10, 4 * 1 + 3 * 10 + 4]
    assert seconds[1].hidden == 0.0


# -- programs ---------------------------------------------------------------------------------------------


def one_stage(name: str, mesh: str, **changes: Any) -> Program:
    found = planned(name, mesh)
    return compile_analysed(replace(found, plan=replace(found.plan, **changes)))


def test_gathers_are_issued_before_what_the_call_before_reduces() -> None:
    """Layers with parameters of 2 s to gather, 10 s to compute and 4 s to reduce."""
    layer = Sheet(
        (
            OpTask("w", "op", CollectiveWork("all_gather", 0, 2.0), (), (0,)),
            OpTask("y", "op", MemoryWork(10.0), (0,), (1,)),
            OpTask("g", "op", CollectiveWork("reduce_scatter", 0, 4.0), (1,), ()),
        ),
        (1, 2),
    )
    habits = Habits(ahead=True, behind=True, beside=False, overlap=1.0)
    steps = [SegmentCall(layer, (f"w{k}", f"y{k}"), (f"y{k + 1}", f"g{k}")) for k in range(3)]
    found = Player(price, (4,), habits).play(steps, {"w0", "w1", "w2"}, {"g0", "g1", "g2"}, spans=True)
    # bare are the first gather and the last reduction
    assert found.seconds == pytest.approx(2 + 3 * 10 + 4)
    sent = sorted((s.start, s.step, s.task) for s in found.spans if s.stream)
    assert [(step, task) for _, step, task in sent] == [(0, 0), (1, 0), (0, 2), (2, 0), (1, 2), (2, 2)]


def test_a_shard_is_packed_beside_computing() -> None:
    """The copy of a shard into its message waits for nothing that is computed."""
    layer = Sheet(
        (
            OpTask("s", "comm.all_gather_bucket", MemoryWork(1.0), (), (0,)),
            OpTask("w", "comm.all_gather_bucket", CollectiveWork("all_gather", 0, 5.0), (0,), ()),
            OpTask("y", "op", MemoryWork(10.0), (1,), (1,)),
        ),
        (2,),
    )
    steps = [SegmentCall(layer, (f"w{k}", f"y{k}"), (f"y{k + 1}",)) for k in range(3)]
    seconds = [
        Player(price, (4,), Habits(ahead, True, False, 1.0)).play(steps, {"w0", "w1", "w2"}, ()).seconds
        for ahead in (True, False)
    ]
    assert seconds == pytest.approx([1 + 5 + 3 * 10, 3 * 16])


def test_what_a_message_brought_is_copied_when_it_is_needed() -> None:
    """A gather of 5 s that is issued a call early is on its way while that call computes 10 s; unpacking it
    takes 2 s, once."""
    gather = Sheet(
        (
            OpTask("w", "comm.all_gather_bucket", CollectiveWork("all_gather", 0, 5.0), (), (0, 1)),
            OpTask("w", "comm.all_gather_bucket", MemoryWork(2.0), (0,), ()),
        ),
        (1, 1),
    )
    call = Sheet((OpTask("y", "op", MemoryWork(10.0), (), (0, 1)),), (0,))
    steps = [
        SegmentCall(gather, ("p0", "q0"), ("w0", "v0")),
        SegmentCall(gather, ("p1", "q1"), ("w1", "v1")),
        SegmentCall(call, ("w0", "v0"), ("y0",)),
        SegmentCall(call, ("w1", "v1"), ("y1",)),
    ]
    run = Player(price, (4,), Habits(late=True)).play(steps, {"p0", "q0", "p1", "q1"}, (), spans=True)
    assert (run.seconds, run.compute, run.exposed, run.hidden) == (5 + 2 * (2 + 10), 24.0, (5.0,), 5.0)
    when = {(s.step, s.task): (s.start, s.end) for s in run.spans}
    assert when[0, 1] == (5.0, 7.0) and when[1, 0] == (5.0, 10.0) and when[1, 1] == (17.0, 19.0)
    # what nothing takes has arrived when the part ends
    assert Player(price, (4,), Habits(late=True)).play(steps[:1], {"p0", "q0"}, ()).seconds == 7.0


def test_a_copy_waits_for_its_message_inside_a_call_too() -> None:
    """A gather of 6 s with a copy of 2 s, beside 5 s of computing that does not need it."""
    sheet = Sheet(
        (
            OpTask("w", "comm.all_gather", CollectiveWork("all_gather", 0, 6.0), (), (0,)),
            OpTask("w", "comm.all_gather", MemoryWork(2.0), (0,), ()),
            OpTask("y", "op", MemoryWork(5.0), (), (1,)),
            OpTask("z", "op", MemoryWork(3.0), (1, 2), ()),
        ),
        (3,),
    )
    assert played(sheet, ("w", "x"), ("z",), late=True).seconds == 6 + 2 + 3


def test_messages_are_copied_unless_they_lie_as_they_are_sent() -> None:
    program = one_stage("llama", "fsdp=2", microbatches=1)

    def copied(**how: Any) -> float:
        works = works_of(program, **how)
        return sum(w.nbytes for op, w in works if op.startswith("comm.") and isinstance(w, MemoryWork))

    plain, parameters = copied(), copied(flat_parameters=True)
    neither = copied(flat_parameters=True, flat_gradients=True)
    assert plain > parameters > neither
    # fp32: 6 bytes more of every element that is reduced than the two passes of 4 bytes
    made_ready = copied(flat_parameters=True, flat_gradients=True, ready_bytes=8.0) - neither
    assert made_ready == pytest.approx(parameters - neither)


def test_ranks_that_share_memory_pack_a_message_where_it_is_read() -> None:
    """What lays it down and what reads it are in its price."""
    for mesh in ("fsdp=2", "tp=2"):
        program = one_stage("llama", mesh, microbatches=1)
        sent, shared = (works_of(program, transport=t) for t in ("device", "memory"))
        bytes_of = [
            sum(w.nbytes for _, w in works if isinstance(w, CollectiveWork)) for works in (sent, shared)
        ]
        assert bytes_of[0] == bytes_of[1] > 0
        kinds = ("comm.all_gather", "comm.reduce_scatter", "comm.all_reduce")
        copies = [
            sum(w.nbytes for op, w in works if op.startswith(kinds) and isinstance(w, MemoryWork))
            for works in (sent, shared)
        ]
        assert copies[0] > copies[1] == 0


def test_parts_in_several_pieces_are_copied() -> None:
    """Messages along another dim than the first, and of rows that are cut into blocks first."""
    program = one_stage("llama", "tp=2", microbatches=1)
    strewn = works_of(program)
    lying = works_of(program, copied_messages=False)
    extra = [sum(w.nbytes for _, w in works if isinstance(w, MemoryWork)) for works in (strewn, lying)]
    assert extra[0] > extra[1]
    nodes = {
        n.name: n
        for s in program.lowered.segments.values()
        for n in s.graph.nodes
        if n.op.startswith(("comm.reduce_scatter.", "comm.all_gather.", "comm.slice."))
    }
    cut = [n for n in nodes.values() if any(n.args[2:3]) or dict(n.kwargs).get("outer", 1) != 1]
    assert cut  # a program without any would prove nothing
    pricer = simulated(program, CPU)[1].pricer
    for segment in program.lowered.segments.values():
        values = segment.placed()
        for node in segment.graph.nodes:
            if node in cut:
                works = pricer.ops.work(node, values)
                assert any(isinstance(w, MemoryWork) and w.nbytes > 0 for w in works), node


def test_looking_at_tensors_takes_time_where_the_device_issues_ops() -> None:
    program = one_stage("llama", "dp=1", microbatches=1)
    kernels = CPU.device.kernels
    slow = replace(CPU, device=replace(CPU.device, kernels=replace(kernels, view=1e-3)))
    plain, found = (estimate_step(program, c) for c in (CPU, slow))
    lowered = program.lowered
    views = sum(
        sum(n.op in VIEWS for n in lowered.segments[i.segment].graph.nodes)
        for i in lowered.main
        if isinstance(i, Call)
    )
    assert views > 10
    assert found.seconds - plain.seconds == pytest.approx(views * 1e-3)


def test_modules_in_python_take_their_host_longer() -> None:
    program = one_stage("llama", "dp=1", microbatches=1)
    kernels = CPU.device.kernels

    def found(modules: bool, **figures: float) -> float:
        device = replace(CPU.device, kernels=replace(kernels, **figures))
        return estimate_step(program, replace(CPU, device=device), behaviour=Behaviour(eager=modules)).seconds

    assert found(False, eager=0.1) == found(False) == found(True)
    assert found(True, eager=0.1) == found(False, dispatch=0.1) > 10 * found(False)


def test_parameters_are_handed_over_once_a_step() -> None:
    program = one_stage("llama", "dp=1", microbatches=1)
    kernels = replace(CPU.device.kernels, hand=1e-3)
    slow = replace(CPU, device=replace(CPU.device, kernels=kernels))
    plain, found = (estimate_step(program, c) for c in (CPU, slow))
    trained = {r.target for r in program.signature.results if r.kind == "grad"}
    assert found.seconds - plain.seconds == pytest.approx(len(trained) * 1e-3)
    assert found.spent.total == pytest.approx(found.seconds)


def test_attention_takes_its_start_beside_its_flop() -> None:
    late = replace(PLAIN, kernels=replace(PLAIN.kernels, attention_start=1e-3))
    plain, found = (attention_seconds(1e12, 0.0, "f32", False, device) for device in (PLAIN, late))
    assert found == pytest.approx(plain + 1e-3)


def test_attention_for_earlier_devices_is_slower() -> None:
    device = load_cluster("h100-dgx").device
    native, earlier = (
        attention_seconds(1e12, 0.0, "bf16", False, device, native=n) - device.launch_overhead
        for n in (True, False)
    )
    assert earlier == pytest.approx(native / device.kernels.attention_earlier)
    before = load_cluster("a100-selene").device
    assert device.kernels.attention_earlier < 1 == before.kernels.attention_earlier


def works_of(program: Program, **how: Any) -> list[tuple[str, Work]]:
    """(op, work) of all tasks of segments, and of main."""
    prices, lowered = simulated(program, CPU, behaviour=Behaviour(**how))[1], program.lowered
    found = [(t.op, t.work) for name in lowered.segments for t in prices.sheets.of(name).tasks]
    nodes = [i for i in lowered.main if isinstance(i, Node)]
    return found + [(n.op, w) for n in nodes for w in prices.pricer.ops.work(n, lowered.values)]


def test_attention_of_the_first_version_is_slower() -> None:
    program = one_stage("llama", "dp=2", microbatches=1)
    full, half = (
        [w for _, w in works_of(program, attention_reach=reach) if isinstance(w, Attention)]
        for reach in (1.0, 0.5)
    )
    assert full and half == [replace(w, reach=0.5) for w in full]
    device = load_cluster("h100-dgx").device
    one, two = (
        pricer(device, ())(replace(w, flop=1e15)) - device.launch_overhead for w in (full[0], half[0])
    )
    assert two == pytest.approx(2 * one)


def test_gradients_of_norms_read_once_or_twice() -> None:
    program = one_stage("gpt2", "dp=1")
    once, twice = (
        [
            w.nbytes
            for op, w in works_of(program, norm_reads=reads)
            if op == "aten.native_layer_norm_backward" and isinstance(w, MemoryWork)
        ]
        for reads in (1, 2)
    )
    assert once and len(once) == len(twice)
    # two tensors are read and one is written, beside weights and sums of rows
    assert [b / a for a, b in zip(once, twice, strict=True)] == pytest.approx([5 / 3] * len(once), rel=0.05)


@pytest.mark.parametrize("mesh", ["fsdp=2", "dp=2", "tp=2"])
def test_overlap_never_takes_longer(mesh: str) -> None:
    program = one_stage("llama", mesh, microbatches=3)
    plain = estimate_step(program, CPU)
    for change in ("gathers_overlap", "gradients_overlap", "tensor_overlap", "fused"):
        better = estimate_step(program, CPU, behaviour=Behaviour(**{change: True}))  # type: ignore[arg-type]
        assert better.seconds <= plain.seconds * (1 + 1e-9)
        assert better.spent.total == pytest.approx(better.seconds)
    whole = estimate_step(program, CPU, behaviour=Behaviour(blocking_sends=True))
    assert whole.seconds == pytest.approx(plain.seconds)


def test_what_fits_in_caches_is_moved_faster() -> None:
    plain = CPU.device
    near = replace(plain, kernels=replace(plain.kernels, cache=1e6, cached=4.0))
    slow, fast = (lambda n, d=d: traffic_seconds(n, d, launch=False) for d in (plain, near))
    assert fast(1e6) == pytest.approx(slow(1e6) / 4)
    assert fast(3e6) == pytest.approx(slow(2e6) + slow(1e6) / 4)
    with pytest.raises(UsageError, match="cached is"):
        replace(plain.kernels, cached=0.5)


def test_a_layer_that_runs_again_whole_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in programs of other tools, which recompute in calls of their own."""
    apart = partial(LoweringOptions, join_recompute=False)
    monkeypatch.setattr("autoshard.planner.lowering.LoweringOptions", apart)
    found = planned("llama-deep", "dp=1")
    segments = [c.segment for c in found.analysis.folded.calls if not c.backward and c.label]
    chosen = {s: Recompute("full", segments.count(s)) for s in segments}
    program = one_stage("llama-deep", "dp=1", recompute=chosen)
    needed, whole = (
        estimate_step(program, CPU, behaviour=Behaviour(full_recompute=w)) for w in (False, True)
    )
    assert whole.spent.compute > needed.spent.compute
    plain = one_stage("llama-deep", "dp=1")
    inside = [
        Transients(p, simulated(p, CPU)[1].sheets).course(Action("B", 0, 0)).peak for p in (program, plain)
    ]
    assert inside[0] > inside[1] > 0  # a layer is made again while backward runs


def test_what_stays_inside_a_kernel_takes_no_memory() -> None:
    program = one_stage("gpt2", "dp=1")
    peaks = [
        Transients(program, simulated(program, CPU, behaviour=Behaviour(fused=fused))[1].sheets)
        .course(Action("F", 0, 0))
        .peak
        for fused in (True, False)
    ]
    assert 0 < peaks[0] <= peaks[1]


def test_blocking_sends_stand_in_the_way() -> None:
    program = pipeline("llama-deep", 2, "dp=2", "1f1b", 4)
    plain, blocking = (
        estimate_step(program, CPU, behaviour=Behaviour(blocking_sends=b)) for b in (False, True)
    )
    assert blocking.spent.total == pytest.approx(blocking.seconds)
    assert blocking.spent.compute == pytest.approx(plain.spent.compute)
    # a message takes the time of its sender once, and has then arrived
    sent = plain.costs.send_forward[0]
    assert sent > 0
    assert blocking.costs.send_forward == blocking.costs.send_backward == (0.0,)
    assert blocking.costs.forward[0] == pytest.approx(plain.costs.forward[0] + sent)
    assert blocking.costs.forward[1] == pytest.approx(plain.costs.forward[1])


# -- the command ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("simulate") / "program"
    save_program(pipeline("llama-deep", 2, "dp=2", "1f1b", 4), path)
    return path


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["simulate", *args])


def test_the_step_and_what_a_budget_takes(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = run(str(folder), "--tokens", "1M", "--price", "2", "--perfetto", str(trace), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert sum(found["breakdown_seconds"].values()) == pytest.approx(found["step_seconds"])
    assert found["items"] == "tokens" and found["devices"] == 4
    training = found["training"]
    assert training["steps"] == -(-1_000_000 // found["items_per_step"])
    assert training["device_hours"] == pytest.approx(4 * training["steps"] * found["step_seconds"] / 3600)
    assert training["cost"] == pytest.approx(2 * training["device_hours"])
    memory = found["memory"]
    assert sum(memory["resident_bytes"].values()) == pytest.approx(memory["peak_bytes"]) and memory["fits"]
    events = json.loads(trace.read_text())["traceEvents"]
    ops = [e for e in events if e["ph"] == "X" and e["pid"] > 0]
    assert {e["pid"] for e in ops} == {1, 2} and all(e["dur"] >= 0 for e in ops)
    assert max(e["ts"] + e["dur"] for e in ops) <= found["step_seconds"] * 1e6


def test_text_names_what_the_time_goes_to(folder: Path) -> None:
    result = run(str(folder))
    assert result.exit_code == 0, result.output
    for word in ("compute", "exposed communication, dp", "bubble", "optimizer", "tokens/s", "MFU", "fits"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--price", "2"], "--tokens"),
        (["--tokens", "many"], "not a number of tokens"),
        (["--tokens", "-5"], "not a number of tokens"),
        (["--cluster", "nowhere"], "no cluster is called"),
    ],
)
def test_bad_options(folder: Path, args: list[str], says: str) -> None:
    result = run(str(folder), *args)
    assert result.exit_code == 2
    assert says in result.stderr


def test_numbers_of_tokens() -> None:
    assert [tokens_of(t) for t in ("300B", "1.5t", "2e12", "1_000")] == [3e11, 1.5e12, 2e12, 1000]
    for text in ("", "b", "nan", "inf", "0"):
        with pytest.raises(UsageError):
            tokens_of(text)


# -- measured collectives ---------------------------------------------------------------------------------

LEVEL = """
name = "mine"
[device]
name = "d"
memory_bytes = 1
peak_flops = { f32 = 1.0 }
memory_bandwidth = 1.0
matmul_efficiency = 1.0
launch_overhead = 0.0
[[level]]
name = "near"
size = 4
latency = 1e-6
bandwidth = 1e9
[[level.measured]]
kind = "all_reduce"
ranks = 4
bytes = [1000, 100000]
seconds = [1e-4, 1e-3]
[[level]]
name = "far"
latency = 1e-5
bandwidth = 1e8
"""


def test_a_measured_collective_costs_what_was_measured() -> None:
    cluster = parse_cluster(LEVEL, where="here")
    near, far = link_of(cluster, Mesh.parse("tp=4"), 0), link_of(cluster, Mesh.parse("dp=8"), 0)
    sizes = {10: 1e-4, 1000: 1e-4, 10_000: 10**-3.5, 100_000: 1e-3, 199_000: 1.9e-3}
    for nbytes, expected in sizes.items():
        assert seconds("all_reduce", nbytes, near) == pytest.approx(expected)
    assert seconds("all_reduce", 0, near) == 0
    plain = replace(near, measured=())
    assert seconds("all_gather", 10_000, near) == seconds("all_gather", 10_000, plain)
    assert far.measured == () and link_of(cluster, Mesh.parse("tp=2"), 0).measured == ()
    assert tuple(_FORMULAS) == KINDS


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[1000, 100000]", "[1000, 100]", "not in order"),
        ("[1e-4, 1e-3]", "[1e-4]", "not complete"),
        ('"all_reduce"', '"all_reduced"', "there is no collective"),
        ("[1e-4, 1e-3]", '["a", 1]', "must be `float`"),
    ],
)
def test_bad_tables(old: str, new: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_cluster(LEVEL.replace(old, new), where="here")


def test_experts_that_do_not_divide_take_the_flop_of_all() -> None:
    """A rank's op says how many of them it has, by a symbol where ranks have unlike numbers."""
    tokens, experts, wide = 12, 7, 8
    slots = TensorType((experts * tokens,), "i64", (2, experts))
    x = TensorType((experts * tokens, wide), "f32", (2, experts))
    out = TensorType((experts, wide, wide), "f32")

    def flop(count: int | LocalSize) -> float:
        args = (Ref("x"), Ref("grad"), Ref("slots"), count, False)
        node = Node("autoshard.expert_outer.default", args, (), ("out",), (out,))
        return product_flops(node, [x, x, slots], [out])

    assert flop(LocalSize(experts, (ShardOf("ep", 1, 1),))) == flop(experts) == 2 * x.numel * wide
