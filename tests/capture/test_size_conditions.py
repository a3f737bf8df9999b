"""What a model's code decides by sizes is known without running it again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard.capture.size_conditions import size_conditions


class Windowed(nn.Module):
    """Takes another way for long inputs, and for those that are no multiple of four."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        if x.shape[1] > 32:
            h = h[:, -32:]
        if h.shape[1] % 4:
            h = torch.nn.functional.pad(h, (0, 0, 0, 4 - h.shape[1] % 4))
        return h.mean()


@pytest.mark.parametrize(
    ("shape", "holds"),
    [
        ((2, 8, 4), True),
        ((7, 16, 4), True),
        ((2, 32, 4), True),
        ((2, 36, 4), False),
        ((2, 9, 4), False),
        ((2, 8, 5), False),
    ],
)
def test_branches_on_sizes(shape: tuple[int, ...], holds: bool) -> None:
    conditions = size_conditions(Windowed(), (torch.randn(3, 12, 4),), {})
    assert conditions is not None
    assert conditions.hold({0: shape}) is holds


def test_sizes_that_are_one_stay_one() -> None:
    """Two arguments whose dims were of one size."""

    class Pair(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x * y).sum()

    conditions = size_conditions(Pair(), (torch.randn(3, 5), torch.randn(3, 5)), {})
    assert conditions is not None
    assert conditions.hold({0: (4, 6), 1: (4, 6)})
    assert not conditions.hold({0: (4, 6), 1: (4, 7)})


def test_nothing_is_known_of_code_that_asks_for_values() -> None:
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum().item() > 0 else x

    assert size_conditions(Asks(), (torch.randn(3, 5),), {}) is None
