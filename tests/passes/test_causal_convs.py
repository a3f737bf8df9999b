"""Causal depthwise convolutions in chunks of a sequence, with the ends of their neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
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

CAUSAL, PLAIN = "autoshard.causal_conv", "aten.convolution"
WIDTH = 16
#: as tensor parallelism places them
CHANNELS = ("into.weight=tp:S(0)", "conv.weight=tp:S(0)", "out.weight=tp:S(1)")


class Mixed(nn.Module):
    """A causal depthwise convolution between products, as in a short convolution of a language model."""

    def __init__(
        self, taps: int = 4, dilation: int = 1, groups: int = WIDTH, drop: int = 0, bias: bool = True
    ) -> None:
        super().__init__()
        padding = (taps - 1) * dilation - drop
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(
            WIDTH, WIDTH, taps, padding=padding, dilation=dilation, groups=groups, bias=bias
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mixed = self.conv(self.into(x).transpose(1, 2))[..., : x.shape[1]]
        return (self.out(torch.tanh(mixed).transpose(1, 2)) - labels).square().mean()


def _inputs(length: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(4, length, WIDTH, dtype=torch.float64) for name in ("x", "labels")}


def _ops(module: nn.Module, length: int) -> list[str]:
    graphs = analyse(capture(module, (), _inputs(length))).folded.segments.values()
    names = (CAUSAL, PLAIN)
    return [node.op for graph in graphs for node in graph.nodes if node.op.startswith(names)]


@pytest.mark.parametrize("length", [5, 32, 37, 48])
def test_which_are_causal(length: int) -> None:
    """Depthwise, of positions before them alone, of any length and dilation."""
    for module in (Mixed(), Mixed(taps=3, dilation=2, bias=False)):
        assert [op.startswith(CAUSAL) for op in _ops(module.double(), length)] == [True, True]
    for other in (Mixed(groups=4), Mixed(groups=1)):  # channels of several
        assert not any(op.startswith(CAUSAL) for op in _ops(other.double(), length))
    # of positions behind them, too
    assert not any(op.startswith(CAUSAL) for op in _ops(Mixed(taps=5, drop=2).double(), length))


@pytest.mark.parametrize(("taps", "dilation", "bias"), [(4, 1, True), (3, 2, False)])
@pytest.mark.parametrize(
    ("mesh", "pins", "length", "dims"),
    [
        ("cp=4", (), 768, {2}),
        ("tp=4", CHANNELS, 24, {1}),
        ("cp=2,tp=2", CHANNELS, 192, {2}),
        ("fsdp=2,cp=2", (), 768, {0, 2}),
    ],
)
def test_equal_to_eager(
    mesh: str, pins: Sequence[str], length: int, dims: set[int], taps: int, dilation: int, bias: bool
) -> None:
    """By sequence, by channels and by batch."""
    module, inputs = Mixed(taps, dilation, bias=bias).double(), _inputs(length)
    request = SearchRequest(pins=tuple(map(Pin.parse, pins)))
    analysis = analyse(capture(module, (), inputs))
    planned = plan_analysed(analysis, [Mesh.parse(mesh)], ring_cluster(), request=request)
    program = compile_analysed(planned)
    convs = [
        segment.layouts[node.args[0].name]
        for segment in program.lowered.segments.values()
        for node in segment.graph.nodes
        if node.op.startswith(CAUSAL)
    ]
    assert len(convs) == 2
    for layout in convs:
        assert {placed.dim for placed in layout if isinstance(placed, Shard)} == dims
    assert verify(program, module, (), inputs, steps=1).ok
    report = verify_static(program)
    assert report.ok and not report.uncovered
