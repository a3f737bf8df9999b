"""Segments in canonical form compute the same, and hide no sum over ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from architectures import errors_of, program_of
from lockstep_check import RTOL
from torch import nn

from autoshard.capture.capture import capture
from autoshard.ir.placement import Partial
from autoshard.passes.pipeline import simplify

Choice = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
WHERE = "aten.where"


class Chosen(nn.Module):
    """Sums over the batch, of which some elements are replaced."""

    def __init__(self, choose: Choice) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6, 8))
        self.register_buffer("mask", torch.arange(48).view(6, 8) % 3 > 0)
        self.choose = choose

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        chosen = self.choose(self.mask, (x * self.scale).sum(0))
        return {"loss": (chosen - y).square().mean()}


LINEAR: dict[str, Choice] = {
    "zeros": lambda mask, x: torch.where(mask, x, torch.zeros_like(x)),
    "zeros where it is set": lambda mask, x: torch.where(mask, torch.zeros_like(x), x),
    "the number": lambda mask, x: torch.where(mask, x, 0.0),
    "a number of its type": lambda mask, x: torch.where(mask, x, torch.zeros((), dtype=x.dtype)),
}
OTHERS: dict[str, Choice] = {
    "ones": lambda mask, x: torch.where(mask, x, torch.ones_like(x)),
    "another value": lambda mask, x: torch.where(mask, x, x.sin()),
    "wider zeros": lambda mask, x: torch.where(mask[:1], x[:1], torch.zeros_like(x)),
    "zeros of a wider type": lambda mask, x: torch.where(mask, x, x.new_zeros((), dtype=torch.float64)[None]),
    "false": lambda mask, x: torch.where(mask, x > 0, torch.zeros_like(mask)).to(x.dtype) + x,
    "nothing but zeros": lambda mask, x: torch.where(mask, x.new_zeros(6, 8), x.new_zeros(6, 8)) + x,
}


def _inputs() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 6, 8), "y": torch.randn(6, 8)}


@pytest.mark.parametrize("name", [*LINEAR, *OTHERS])
def test_what_is_zero_elsewhere_may_stay_a_sum_over_ranks(name: str) -> None:
    model, inputs = Chosen((LINEAR | OTHERS)[name]), _inputs()
    program = program_of(model, inputs, "dp=2,tp=2")
    assert max(errors_of(model, inputs, program).values()) < RTOL
    joint = simplify(capture(model, (), inputs))
    chosen = [
        n for g in joint.segments.values() for n in g.nodes if n.op.startswith(WHERE) and not n.backward
    ]
    assert all(n.op.startswith(f"{WHERE}.Scalar") == (name in LINEAR) for n in chosen)
    assert chosen or name not in LINEAR


@pytest.mark.parametrize("name", list(LINEAR))
def test_a_masked_sum_is_reduced_once(name: str) -> None:
    class Twice(Chosen):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            sums = [self.choose(self.mask, (x * self.scale * k).sum(0)) for k in (1.0, 2.0)]
            return {"loss": (sums[0] + sums[1] - y).square().mean()}

    model, inputs = Twice(LINEAR[name]), _inputs()
    program = program_of(model, inputs, "dp=4")
    assert max(errors_of(model, inputs, program).values()) < RTOL
    layouts = [
        segment.placed()[node.name].layout
        for segment in program.lowered.segments.values()
        for node in segment.graph.nodes
        if node.op.startswith(WHERE) and not node.backward
    ]
    assert layouts and all(isinstance(layout[0], Partial) for layout in layouts)
