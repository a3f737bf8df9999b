"""What the search takes for seconds, by hand and beside a simulated step."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Literal

import pytest
from ringed import even_cluster, planned

import autoshard
from autoshard.api import compile_analysed
from autoshard.cluster import Mesh, load_cluster
from autoshard.cost.kernel_time import attention_seconds, product_seconds
from autoshard.cost.on_mesh import cost_model
from autoshard.cost.step_time import Overlap, StepSums, step_time
from autoshard.ir import Call, Node, Ref, TensorType, refs_of
from autoshard.ir.placement import Layout, R, Shard
from autoshard.rules import attention, matmul, pointwise
from autoshard.rules.states import OpState
from autoshard.search.plan.plan import Plan
from autoshard.search.problem.cost_entries import BatchPricing, Laid, LayoutChange
from autoshard.search.solve.formulate import layer_calls
from autoshard.search.solve.step_config import StepConfig
from autoshard.simulate.estimate import Estimator
from autoshard.validate.models import Architecture, Kind, on_meta


def test_a_window_of_computing_is_slowed_by_what_runs_beside_it() -> None:
    """One microbatch by hand: 2 s to gather beside 8 s of computing, of which half is gained."""
    step = step_time(StepSums(work_forward=8.0, gather_forward=2.0), Overlap(1, share=0.5))
    assert (step.compute, step.exposed, step.hidden, step.total) == (8.0, 1.0, 1.0, 9.0)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("mesh", ["fsdp=8", "dp=2,tp=4"])
def test_the_search_and_the_simulation_agree_on_large_layers(kind: Kind, mesh: str) -> None:
    """What the search adds up is what the program takes in the simulation, but for the tiles of products."""
    shape = Architecture(kind, 4, 4096, 32, 8 if kind == "llama" else 32, 14336, 32000, 4096)
    model, inputs = on_meta(shape, 16, 4096)
    planned = autoshard.plan(model, mesh, example_inputs=inputs, cluster="h100-dgx", memory=80_000_000_000)
    assert planned.solution is not None and planned.peak is not None and planned.peak.step is not None
    assert planned.solution.placements.seconds == pytest.approx(planned.peak.step, rel=0.06)


@pytest.mark.parametrize("mesh", ["fsdp=8", "dp=2,tp=4"])
def test_the_search_and_the_simulation_agree_on_tiles_of_rows(mesh: str) -> None:
    """All that a tile runs is priced by itself, also beyond the batch of the capture."""
    shape = Architecture("llama", 4, 4096, 32, 8, 14336, 32000, 8192)
    model, inputs = on_meta(shape, 16, 8192)
    planned = autoshard.plan(
        model, mesh, example_inputs=inputs, cluster="h100-dgx", memory=80_000_000_000, tile_rows=1024
    )
    assert planned.solution is not None and planned.peak is not None and planned.peak.step is not None
    assert planned.plan.tile_rows == 1024
    assert planned.solution.placements.seconds == pytest.approx(planned.peak.step, rel=0.02)


def test_attention_is_priced_in_the_type_of_its_result() -> None:
    """The sums that it keeps for its backward are wider, and say nothing of its rate."""
    shape = (4, 16, 2048, 128)
    q, wide = TensorType(shape, "bf16"), TensorType(shape[:3], "f32")
    args = (Ref("q"), Ref("k"), Ref("v"), None, True)
    rule = attention.sdpa(Node("autoshard.sdpa.default", args, (), ("o", "l"), (q, wide)), [q, q, q])
    cluster = load_cluster("h100-dgx")
    prices = cost_model(cluster, Mesh.parse("dp=1"))
    (found,) = prices.op_seconds(rule, [q, q, q], [q, wide], [OpState(((R,),) * 3, ((R,), (R,)), 1)], (1,))
    moved = 4 * q.nbytes + wide.nbytes
    expected = attention_seconds(rule.flops, moved, "bf16", False, cluster.device, native=False)
    assert found == pytest.approx(expected, rel=1e-9)


def test_what_a_kernel_keeps_inside_moves_no_bytes_but_where_its_layout_changes() -> None:
    """relu(x) between ops of its chain, on a device that compiles and on one that does not."""
    x = TensorType((4096, 4096), "bf16")
    rule = pointwise.RULES["aten.relu.default"](Node("aten.relu.default", (Ref("x"),), (), ("y",), (x,)), [x])
    split: Layout = (Shard(0),)
    states = [OpState((split,), (split,), 8)]
    for name, compiled in (("h100-dgx", True), ("cpu-gloo", False)):
        cost = cost_model(load_cluster(name), Mesh.parse("tp=8"))
        all_moved, one, none = (
            float(cost.op_seconds(rule, [x], [x], states, (8,), inside=inside)[0])
            for inside in ((), (True, False), (True, True))
        )
        start, each = cost.device.launch_overhead, x.nbytes / 8 / cost.device.traffic
        assert all_moved == pytest.approx(start + 2 * each)
        assert one == pytest.approx(start + (1 if compiled else 2) * each)
        assert (none < one) == compiled
        prices = BatchPricing(cost, (8,), 2.0)
        ways = [
            LayoutChange(x, True, Laid((split,)), Laid((split, (Shard(1),))), inside=inside)
            for inside in (False, True)
        ]
        outside, inside = (prices.way(way)[0] for way in ways)
        assert inside[0] == outside[0] == 0
        assert inside[1] - outside[1] == pytest.approx(2 * 2 * each if compiled else 0)


def _by_search(
    left: tuple[int, ...],
    right: tuple[int, ...],
    turned: tuple[bool, bool] = (False, False),
    grow: tuple[bool, ...] = (),
    *,
    scale: float = 1.0,
    waves: bool = False,
) -> float:
    """Seconds of a product of whole bf16 matrices on an H100. grow: which of them hold the batch."""
    cluster = load_cluster("h100-dgx")
    ins = [TensorType(left, "bf16"), TensorType(right, "bf16")]
    out = TensorType((*left[:-1], right[-1]), "bf16")
    op = "aten.mm.default" if len(left) == 2 else "aten.bmm.default"
    rule = matmul.RULES[op](Node(op, (Ref("a"), Ref("b")), (), ("c",), (out,)), ins)
    prices = cost_model(cluster, Mesh.parse("dp=1"))
    states = [OpState(((R,), (R,)), ((R,),), 1)]
    (found,) = prices.op_seconds(
        rule, ins, [out], states, (1,), scale, any(grow), grow, turned=turned, waves=waves
    )
    return float(found)


def _by_simulation(
    left: tuple[int, ...], right: tuple[int, ...], turned: tuple[bool, bool] = (False, False)
) -> float:
    """The same on the time line."""
    device = load_cluster("h100-dgx").device
    batch, rows, depth = prod(left[:-2]), left[-2], left[-1]
    moved = 2.0 * (prod(left) + prod(right) + prod((*left[:-1], right[-1])))
    return product_seconds(batch, rows, right[-1], depth, "bf16", moved, device, turned=turned)


@pytest.mark.parametrize(
    ("left", "right", "turned"),
    [
        ((256 * 132 * 64, 1024), (1024, 128), (False, False)),
        ((256 * 132 * 64, 1024), (1024, 100), (False, True)),  # a result whose rows are no whole words
        ((256 * 132 * 64, 1000), (1000, 192), (False, False)),  # a tile and a half
        ((132 * 256, 128, 1000), (132 * 256, 1000, 64), (False, False)),  # half a tile
        ((132 * 256, 999, 128), (132 * 256, 128, 999), (False, True)),  # scores of an odd length
        ((132 * 256, 999, 128), (132 * 256, 128, 1000), (True, False)),  # factors by their other dim
    ],
)
def test_a_large_product_takes_in_the_search_what_it_takes_in_the_simulation(
    left: tuple[int, ...], right: tuple[int, ...], turned: tuple[bool, bool]
) -> None:
    """Where waves of tiles are full: rows that are not aligned, and tiles that are not filled."""
    assert _by_search(left, right, turned) == pytest.approx(_by_simulation(left, right, turned), rel=0.02)


@pytest.mark.parametrize(
    ("left", "right"),
    [((1024, 8192), (8192, 2816)), ((130, 300), (300, 520)), ((7, 100, 60), (7, 60, 72)), ((1, 8), (8, 8))],
)
def test_with_waves_a_product_takes_in_the_search_exactly_what_it_takes_in_the_simulation(
    left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    """And never less than without, by which other microbatches are bounded."""
    expected = pytest.approx(_by_simulation(left, right), rel=1e-9)
    assert _by_search(left, right, waves=True) == expected
    assert _by_search(left, right) <= _by_search(left, right, waves=True) * (1 + 1e-9)


def test_a_gradient_of_a_weight_has_its_waves_for_any_microbatch() -> None:
    """Its result holds no sequences, of which more only make its sums longer: never more for each of them."""
    held = (True, True, False)
    few, many = (
        _by_search((1280, n * 1000), (n * 1000, 6000), (True, False), held, scale=1.0) for n in (1, 4)
    )
    assert few == pytest.approx(_by_simulation((1280, 1000), (1000, 6000), (True, False)), rel=1e-9)
    grown = _by_search((1280, 1000), (1000, 6000), (True, False), held, scale=4.0)
    assert few < many < 4 * few and grown == pytest.approx(many, rel=1e-9)


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize(("name", "mesh"), [("llama", "tp=2"), ("gpt2", "tp=2"), ("gpt2", "dp=2,tp=2")])
def test_messages_that_recomputation_sends_once_more_are_those_of_the_program(
    name: str, mesh: str, policy: Literal["selective", "full"]
) -> None:
    made = planned(name, mesh)
    assert made.solution is not None
    usage = made.solution.placements.usage
    setting = StepConfig(1, layer_calls(made.analysis.folded))
    sums = [s.sums(usage) for s in (setting, setting.recomputing(policy))]

    def talk(plan: Plan) -> float:
        program = compile_analysed(replace(made, plan=plan), ring=False, bucket=False)
        estimator, lowered = Estimator(program, even_cluster()), program.lowered
        items = [item for p in lowered.parts if p.phase == "backward" for item in lowered.of(p)]
        # what a call gathers ahead is a segment of its own; parameters are counted as gathers, not as talk
        ahead = [lowered.segments[i.segment] for i in items if isinstance(i, Call) and "_gather" in i.segment]
        params = [
            (n, s.placed())
            for s in ahead
            for n in s.graph.nodes
            if set(refs_of(n.args)) <= dict(s.graph.inputs).keys()
        ]
        return estimator.priced(items).comm - sum(estimator.node(n, values).comm for n, values in params)

    more = talk(replace(made.plan, recompute=dict(setting.recomputing(policy).recompute))) - talk(made.plan)
    assert more > 0
    assert sums[1].talk_backward - sums[0].talk_backward == pytest.approx(more, rel=0.01)
