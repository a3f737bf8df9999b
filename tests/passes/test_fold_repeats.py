"""Of layers that follow each other a few are folded, and give what folding all of them gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import FAMILIES, deep
from torch import nn

from autoshard.capture.capture import capture
from autoshard.ir import Joint
from autoshard.passes.simplify import fold_repeats as folding
from autoshard.passes.simplify.fold import fold
from autoshard.passes.simplify.fold_repeats import flat, fold_repeats
from autoshard.passes.stages.layer_runs import Stretch, Wiring, calls_of


def stretches(joint: Joint) -> list[Stretch]:
    return list(Wiring(joint, calls_of(joint)).stretches(6))


def assert_same(joint: Joint) -> None:
    found, wanted = fold_repeats(joint), fold(flat(joint))
    assert list(found.segments) == list(wanted.segments)
    for name, graph in wanted.segments.items():
        assert found.segments[name] == graph, name
    assert found.calls == wanted.calls
    assert found.joint.results == wanted.joint.results
    assert found.joint.ports == wanted.joint.ports
    assert found.joint.constants.keys() == wanted.joint.constants.keys()


@pytest.mark.parametrize("name", [f.name for f in FAMILIES])
def test_families(name: str) -> None:
    model, inputs = deep(name, 9)
    assert_same(capture(model, (), inputs))


class Layer(nn.Module):
    """kind: what else than x a layer is given, or gives."""

    def __init__(self, index: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear, self.norm, self.drop = nn.Linear(6, 6), nn.LayerNorm(6), nn.Dropout(0.1)
        self.wide = index % 3 == 2 if kind == "turns" else True
        self.register_buffer("scale", torch.full((6,), 2.0))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> Any:
        y = self.drop(torch.relu(self.linear(self.norm(x.reshape(-1, 6))))).reshape(x.shape) * self.scale
        if self.kind == "turns" and self.wide:
            y = y + x
        if self.kind == "unused":
            return y + other, y.sum()
        if self.kind == "handed":
            return y + other, x
        return (y + other).view(x.shape)


class Deep(nn.Module):
    def __init__(self, kind: str, layers: int = 24) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.layers = nn.ModuleList([Layer(k, kind) for k in range(layers)])
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = x.transpose(0, 1).reshape(x.shape) + (self.bias if self.kind == "trained" else 1.0)
        far = x
        kept = []
        for number, layer in enumerate(self.layers):
            if self.kind in ("unused", "handed"):
                x, last = layer(x, other)
                other = last if self.kind == "handed" else other
            elif self.kind == "between":
                x = layer(x * 2, other)
            elif self.kind == "once" and number == 8:
                x = layer(x, other) * 3
            elif self.kind == "far" and number > 1:
                x, far = layer(x, far), x
            else:
                x = layer(x, other)
            if self.kind == "collected":
                kept.append(x.sum())
        return x.pow(2).mean() + sum(kept)


KINDS: dict[str, Callable[[list[Stretch]], bool]] = {
    "plain": lambda found: [s.size for s in found] == [1],
    "turns": lambda found: [s.size for s in found] == [3],
    "unused": lambda found: [s.size for s in found] == [1],
    "handed": lambda found: [s.size for s in found] == [1],
    "between": lambda found: not found,
    "once": lambda found: [s.first for s in found] == [1, 10],
    "far": lambda found: not found,
    "collected": lambda found: not found,
    "trained": lambda found: not found,
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_wiring(kind: str) -> None:
    """trained, far: gradients are summed outside the layers."""
    joint = capture(Deep(kind).train(), (torch.randn(3, 4, 6),))
    assert KINDS[kind](stretches(joint)), stretches(joint)
    assert_same(joint)


@pytest.mark.parametrize(("kind", "size"), [("plain", 1), ("far", 2)])
def test_without_a_backward_half(kind: str, size: int) -> None:
    """far: layers use what others than their neighbours made."""
    joint = capture(Deep(kind).train(), (torch.randn(3, 4, 6),), differentiate="none")
    assert [s.size for s in stretches(joint)] == [size]
    assert_same(joint)


def test_most_layers_are_not_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for layers in (14, 40):
        joint = capture(Deep("plain", layers).train(), (torch.randn(3, 4, 6),))
        monkeypatch.setattr(folding, "flat", lambda j: sizes.append(len(calls_of(j))) or flat(j))
        assert len(fold_repeats(joint).calls) > 2 * layers
    assert sizes[0] == sizes[1] < 10


def test_layers_that_fold_in_different_ways_are_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the check of two of the layers to fail, nothing of the short way would be left."""

    def refuse(*_: object) -> None:
        raise folding._NotAlike

    joint = capture(Deep("plain").train(), (torch.randn(3, 4, 6),))
    monkeypatch.setattr(folding._Lengthening, "_check", refuse)
    assert_same(joint)
