"""Plans that are made again with less memory, because of what a process takes beside tensors."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autoshard import api
from autoshard.planner import planning
from autoshard.planner.planned import Planned


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def plan_with(missing: Iterator[int], monkeypatch: pytest.MonkeyPatch, offload: str = "") -> Planned:
    """A plan whose device lacks so many bytes, one after the other."""
    monkeypatch.setattr(planning, "device_memory", lambda peaks: SimpleNamespace(missing=next(missing)))
    with torch.device("meta"):
        net, x = Net(), torch.zeros(8, 16)
    return api.plan(net, "fsdp=2", example_inputs=x, cluster="h100-dgx", device=True, offload=offload)


def test_what_fits_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not plan_with(iter([0]), monkeypatch).plan.warnings


def test_less_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = plan_with(iter([2**30, 0]), monkeypatch).plan.warnings
    assert warning.startswith("planned for 73.9 GiB: 74.9 GiB of tensors do not fit")


def test_a_plan_that_cannot_be_smaller_does_not_say_that_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan_with(iter([80 * 2**30]), monkeypatch)
    assert found.device is not None and found.device.missing == 80 * 2**30
    assert not found.plan.warnings


def test_nothing_goes_to_host_memory_where_that_was_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    with_less = planning.PlanningRequest._with_less

    def noted(self: planning.PlanningRequest, *args: Any) -> Planned:
        asked.append(self.options.offload)
        return with_less(self, *args)

    monkeypatch.setattr(planning.PlanningRequest, "_with_less", noted)
    plan_with(iter([2**30, 0]), monkeypatch, "none")
    assert asked == ["none"]
