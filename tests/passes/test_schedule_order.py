"""The order of reductions that go out one at a time."""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.ir import Graph, Node, Ref, TensorType
from autoshard.ir.lowered import Lowered, LoweredSegment, PlacedValue
from autoshard.ir.placement import P, Shard
from autoshard.passes.overlap.schedule_ops import overlap
from autoshard.passes.simplify.segment_cache import SegmentCache
from autoshard.rules.chains import InKernel

ROWS, COLUMNS = 8192, 4096
BIG, SMALL = TensorType((ROWS, COLUMNS), "f32"), TensorType((ROWS, 256), "f32")


def _layer(*, used: bool) -> LoweredSegment:
    """Two products whose sums are reduced, the larger first. used: whether the segment needs that itself."""
    x, y = TensorType((ROWS, COLUMNS), "f32"), TensorType((COLUMNS, 256), "f32")
    nodes = [
        Node("aten.mm.default", (Ref("x"), Ref("w")), (), ("big",), (BIG,)),
        Node("comm.reduce_scatter.default", (Ref("big"), "dp", 0), (), ("big_sum",), (BIG,)),
        Node("aten.mm.default", (Ref("x"), Ref("y")), (), ("small",), (SMALL,)),
        Node("comm.reduce_scatter.default", (Ref("small"), "dp", 0), (), ("small_sum",), (SMALL,)),
    ]
    outputs = ["big_sum", "small_sum"]
    if used:
        nodes.append(Node("aten.relu.default", (Ref("big_sum"),), (), ("last",), (BIG,)))
        outputs.append("last")
    inputs = (("x", x), ("w", TensorType((COLUMNS, COLUMNS), "f32")), ("y", y))
    layouts = {name: (Shard(0) if "sum" in name else P,) for n in nodes for name in n.outs}
    return LoweredSegment(Graph("layer", inputs, tuple(nodes), tuple(outputs)), layouts, {})


def _seconds(node: Node, values: Mapping[str, PlacedValue], kernel: InKernel) -> float:
    """The larger sum is on its way for as long as all else takes together."""
    return {"big_sum": 10.0, "small_sum": 0.5, "big": 8.0, "small": 0.5}.get(node.name, 0.1)


def _order(*, used: bool) -> list[str]:
    lowered = Lowered({"layer": _layer(used=used)}, (), {}, ())
    nodes = overlap(lowered, _seconds, SegmentCache()).segments["layer"].graph.nodes
    return [n.name for n in nodes if n.op.startswith("comm.")]


def test_a_small_reduction_does_not_wait_for_a_large_one() -> None:
    """The one before has to have arrived when a reduction goes out: nothing would be computed meanwhile."""
    assert _order(used=False) == ["small_sum", "big_sum"]


def test_what_is_needed_stays_where_it_is() -> None:
    assert _order(used=True) == ["big_sum", "small_sum"]
