"""What the search takes for seconds, by hand and beside a simulated step."""

from __future__ import annotations

from math import prod

import pytest

import autoshard
from autoshard.cluster import Mesh, load_cluster
from autoshard.cost.kernel_time import attention_seconds, product_seconds
from autoshard.cost.on_mesh import cost_model
from autoshard.cost.step_time import Overlap, StepSums, step_time
from autoshard.ir import Node, Ref, TensorType
from autoshard.ir.placement import R
from autoshard.rules import attention, matmul
from autoshard.rules.states import OpState
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


def _by_search(
    left: tuple[int, ...], right: tuple[int, ...], turned: tuple[bool, bool] = (False, False)
) -> float:
    """Seconds of a product of whole bf16 matrices on an H100."""
    cluster = load_cluster("h100-dgx")
    ins = [TensorType(left, "bf16"), TensorType(right, "bf16")]
    out = TensorType((*left[:-1], right[-1]), "bf16")
    op = "aten.mm.default" if len(left) == 2 else "aten.bmm.default"
    rule = matmul.RULES[op](Node(op, (Ref("a"), Ref("b")), (), ("c",), (out,)), ins)
    prices = cost_model(cluster, Mesh.parse("dp=1"))
    states = [OpState(((R,), (R,)), ((R,),), 1)]
    (found,) = prices.op_seconds(rule, ins, [out], states, (1,), turned=turned)
    return float(found)


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
    device = load_cluster("h100-dgx").device
    batch, rows, depth = prod(left[:-2]), left[-2], left[-1]
    moved = 2.0 * (prod(left) + prod(right) + prod((*left[:-1], right[-1])))
    expected = product_seconds(batch, rows, right[-1], depth, "bf16", moved, device, turned=turned)
    assert _by_search(left, right, turned) == pytest.approx(expected, rel=0.02)
