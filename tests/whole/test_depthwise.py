"""Depthwise convolutions are divided by channels, with the norms around them."""

from __future__ import annotations

import torch
from architectures import ARCHITECTURES
from slow_links import ring_cluster
from torch import nn

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh
from autoshard.ir.placement import Shard
from autoshard.planner.analysis import analyse
from autoshard.planner.planning import plan_analysed
from autoshard.search.problem.pins import Pin
from autoshard.search.select.request import SearchRequest
from autoshard.verify.lockstep import verify
from autoshard.verify.static import verify_static

#: products into the channels, and convolutions of each, as tensor parallelism places them
PINS = ("into.weight=tp:S(0)", "depthwise.weight=tp:S(0)")


class Block(nn.Module):
    """An inverted bottleneck (MobileNetV2)."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.first = nn.Conv2d(8, 32, 1, bias=False), nn.BatchNorm2d(32)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.second, self.out = nn.BatchNorm2d(32), nn.Conv2d(32, 8, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wide = torch.relu(self.first(self.into(x)))
        return (self.out(torch.relu(self.second(self.depthwise(wide)))) - labels).square().mean()


def test_equal_to_eager_by_channels() -> None:
    torch.manual_seed(0)
    module = Block().double()
    inputs = {name: torch.randn(4, 8, 6, 6, dtype=torch.float64) for name in ("x", "labels")}
    request = SearchRequest(pins=tuple(map(Pin.parse, PINS)))
    analysis = analyse(capture(module, (), inputs))
    program = compile_analysed(plan_analysed(analysis, [Mesh.parse("tp=4")], ring_cluster(), request=request))
    calls = [
        (segment, node)
        for segment in program.lowered.segments.values()
        for node in segment.graph.nodes
        if node.op.startswith("aten.convolution") and 8 in node.args
    ]
    assert len(calls) == 2  # of the 32 groups 8 are a rank's
    for segment, node in calls:
        assert segment.layouts[node.args[0].name] == (Shard(1),)
    assert verify(program, module, (), inputs, steps=2).ok
    assert verify_static(program).ok


def test_new_values_of_buffers_may_lie_in_parts() -> None:
    """Norms by channels; each rank keeps all of their statistics."""
    (made,) = (a for a in ARCHITECTURES if a.name == "EfficientNetForImageClassification")
    model, inputs = made.make()
    program = compile_analysed(
        plan_analysed(analyse(capture(model, (), inputs)), [Mesh.parse("tp=4")], ring_cluster())
    )
    values, results = program.lowered.values, program.signature.results
    assert any(values[r.value].layout == (Shard(0),) for r in results if r.kind == "buffer")
    assert verify_static(program).ok
