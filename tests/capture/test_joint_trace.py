"""One trace of ours gives what AOTAutograd gives, node by node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import plain_nets
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from aot_joint import aot_trace, rows
from torch import nn

from autoshard.capture import trace as capture_trace
from autoshard.capture.capture import capture
from autoshard.capture.joint_trace import Traced
from autoshard.capture.traced_function import Function
from autoshard.errors import CaptureError


class Net(nn.Module):
    """A module whose forward is any function of itself and ``x``."""

    def __init__(self, fn: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.fn = fn
        self.l, self.m = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.fn(self, x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x * x).view(-1).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (inner,) = torch.autograd.grad((y * y).sum(), y)
        return inner * grad


def replaced(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen = self.seen * 0.9 + self.l(x).detach().mean(0)
    return (self.l(x) * self.seen).sum()


def kept(self: Any, x: torch.Tensor) -> torch.Tensor:
    before = (self.l(x) * self.seen).sum()  # autograd keeps the old value
    self.seen = self.seen + x.detach().mean(0)
    return before


def changed(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.seen[2:4].mul_(3).add_(x.mean())
    return (self.l(x) + self.seen).sum()


def in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    y = self.l(x)
    y[:, :4].mul_(2).add_(x[:, 4:])
    y.transpose_(0, 1)
    return self.m(y.T + x).tanh_()


def aliases(self: Any, x: torch.Tensor) -> Any:
    y = self.l(x)
    return {"views": [x.view(-1), y.T, y[0], y], "twice": (y, y.detach()), "self": x, "none": None, "n": 3}


def reused(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(self.l(x)) + x
    return torch.cat([y, y * y, self.m(y)], 1).split(8, 1)[1].sum() + y.mean()


CASES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "replaced buffer": replaced,
    "replaced buffer that autograd keeps": kept,
    "changed buffer": changed,
    "in place": in_place,
    "aliases": aliases,
    "used more than once": reused,
    "frozen part": lambda s, x: s.l(x).detach() + s.m(x) * torch.arange(8.0),
    "nothing trained": lambda s, x: (x + s.seen).argmax(1),
    "random": lambda s, x: F.dropout(s.l(x), 0.3) * torch.rand_like(x) + torch.randperm(8),
    "checkpoint": lambda s, x: torch.utils.checkpoint.checkpoint(s.m, s.l(x), use_reentrant=False).sum(),
    "autograd function": lambda s, x: Doubled.apply(s.l(x)).sum(),
    "composite ops": lambda s, x: F.cosine_similarity(F.layer_norm(s.l(x), (8,)), s.m(x)).std(),
    "constants": lambda s, x: s.l(x) * torch.tensor([1.0, 2.0] * 4) + float(torch.tensor(2.0)),
    "functional transform": lambda s, x: torch.func.vmap(lambda row: s.l(row).norm())(x),
}


def traced_twice(monkeypatch: pytest.MonkeyPatch, model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Capture a model and compare each graph that is traced; how many there were."""
    ours = capture_trace.trace
    count = 0

    def both(function: Function, tensors: Any) -> Traced:
        nonlocal count
        traced = ours(function, tensors)
        expected = aot_trace(function, tensors)
        found = rows(traced.graph, traced.inputs, traced.outputs, function.recorder.origins)
        assert found == expected
        count += 1
        return traced

    with monkeypatch.context() as patched:
        patched.setattr("autoshard.capture.capture.trace", both)
        capture(model, args, kwargs)
    return count


@pytest.mark.parametrize("case", CASES)
def test_equal_to_aot_autograd(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    x = torch.randn(8, 8, requires_grad=case == "used more than once")
    assert traced_twice(monkeypatch, Net(CASES[case]), x) == 1


@pytest.mark.parametrize("build", [plain_nets.mobilenet, plain_nets.lstm, plain_nets.transformer_encoder])
def test_nets_equal_to_aot_autograd(monkeypatch: pytest.MonkeyPatch, build: Callable[[], nn.Module]) -> None:
    shape = (2, 3, 8, 8) if build is plain_nets.mobilenet else (2, 7, 8)
    name = "pixel_values" if build is plain_nets.mobilenet else "x"
    inputs = {name: torch.randn(shape), "labels": torch.zeros(2, dtype=torch.int64)}
    assert traced_twice(monkeypatch, build(), **inputs) >= 1


def test_repeated_layers_equal_to_aot_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    # the first one has an input that needs no gradient; then the rest, then what is around them
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.ReLU()) for _ in range(4)]
    assert traced_twice(monkeypatch, nn.Sequential(*layers), torch.randn(2, 8)) == 3


def test_a_backward_that_changes_what_it_is_given_is_refused() -> None:
    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            ctx.seen = seen
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            ctx.seen.add_(1)
            return grad, None

    with pytest.raises(CaptureError, match="backward changes"):
        capture(Net(lambda s, x: Counting.apply(s.l(x), s.seen).sum()), (torch.randn(2, 8),))
