"""Layers traced once give the graph that tracing all of them gives."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from families import FAMILIES, deep
from joint_eval import evaluate
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autoshard.capture.capture as capturing
from autoshard.capture.capture import capture
from autoshard.capture.meta_args import Absent, AbsentUsedError
from autoshard.capture.repeats import find_groups
from autoshard.ir import Folded
from autoshard.passes.pipeline import simplify
from autoshard.passes.simplify.fold_repeats import flat

LAYERS = 4


def _facts(folded: Folded) -> list[Any]:
    """What must not depend on how a graph was traced."""
    return [
        (call.backward, Counter(n.op for n in folded.segments[call.segment].nodes), call.label)
        for call in folded.calls
    ]


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A capture that traces every layer."""

    def trace(model: nn.Module, inputs: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(capturing._Task, "_repeats", lambda *args: None)
            return capture(model, (), inputs)

    return trace


@pytest.mark.parametrize("name", [f.name for f in FAMILIES])
def test_same_graph_and_same_numbers(name: str, plainly: Any) -> None:
    model, inputs = deep(name, LAYERS)
    once, plain = capture(model, (), inputs), plainly(model, inputs)
    assert len(flat(once).graph.nodes) == len(flat(plain).graph.nodes)
    assert _facts(simplify(once)) == _facts(simplify(plain))
    assert [(r.kind, r.target) for r in flat(once).results] == [(r.kind, r.target) for r in plain.results]
    found, wanted = evaluate(once, model, (), inputs), evaluate(plain, model, (), inputs)
    for key, value in wanted.items():
        assert torch.allclose(found[key], value, rtol=1e-5, atol=1e-6, equal_nan=True), key


def test_dropout_masks_are_those_of_the_plain_trace(plainly: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_head=2, n_embd=16, vocab_size=50, n_positions=16)).train()
    ids = torch.randint(0, 50, (2, 8))
    inputs = {"input_ids": ids, "labels": ids}
    once, plain = capture(model, (), inputs), plainly(model, inputs)
    for key, value in evaluate(plain, model, (), inputs, seed=3).items():
        assert torch.allclose(evaluate(once, model, (), inputs, seed=3)[key], value, rtol=1e-5, atol=1e-6)


class Layer(nn.Module):
    """What a test wants to happen in a layer is given by ``kind``."""

    def __init__(self, index: int, kind: str) -> None:
        super().__init__()
        self.index, self.kind = index, kind
        self.linear = nn.Linear(6, 6)
        self.wide = index % 2 == 0 if kind == "alternating" else True
        if kind == "buffer":
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, seen: list[Any] | None = None) -> Any:
        y = torch.tanh(self.linear(x))
        if self.kind == "index" and self.index > 2:
            y = y * 3
        if self.kind == "scale":
            y = y / (self.index + 1)
        if self.kind == "alternating" and self.wide:
            y = y + x
        if self.kind == "buffer":
            self.seen.add_(1)
        if self.kind == "remembers":
            self.last = y
        if self.kind == "collects":
            assert seen is not None
            seen.append(y.sum())
        if self.kind == "constant":
            y = y * torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0])
        return (y, x) if self.kind == "identity" else y


class Scaled(nn.Module):
    """Multiplies what a partial function of its own makes of x by the factor it is given for it."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.act = functools.partial(torch.mul, other=factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x))


@pytest.mark.parametrize(("factors", "groups"), [([2.0] * 4, 1), ([2.0, 2.0, 3.0, 4.0], 0)])
def test_partial_functions_are_alike_if_their_arguments_are(factors: list[float], groups: int) -> None:
    assert len(find_groups(nn.Sequential(*map(Scaled, factors)))) == groups


class Unused(nn.Module):
    """Hands on what has a gradient and what has none beside its own result; nobody uses either at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor) -> Any:
        return torch.tanh(self.linear(x) + bias * mask), bias, mask


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bias = nn.Parameter(torch.randn(6))
        self.layers = nn.ModuleList([Unused() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias, mask = 2 * self.bias, (x > 0).float()
        for layer in self.layers:
            x, bias, mask = layer(x, bias, mask)
        return x.pow(2).mean()


def test_layers_hand_on_what_has_no_gradient(plainly: Any) -> None:
    model, inputs = Shared().train(), {"x": torch.randn(3, 6)}
    once, plain = capture(model, (), inputs), plainly(model, inputs)
    assert Counter(n.op for n in flat(once).graph.nodes) == Counter(n.op for n in flat(plain).graph.nodes)
    assert any("_r3" in out for n in flat(once).graph.nodes for out in n.outs)
    found, wanted = evaluate(once, model, (), inputs), evaluate(plain, model, (), inputs)
    for key, value in wanted.items():
        assert torch.allclose(found[key], value, rtol=1e-5, atol=1e-6), key


class Stack(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.layers = nn.ModuleList([Layer(k, kind) for k in range(5)])
        if kind == "tied":
            for layer in self.layers:
                layer.linear.bias = self.layers[0].linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[Any] = []
        layers = [*self.layers, *self.layers] if self.kind == "twice" else self.layers
        if self.kind == "regularised":
            seen = [0.1 * layer.linear.bias.pow(2).sum() for layer in self.layers]
        if self.kind == "returned":
            seen = [self.layers[1].linear.bias.sum().detach()]
        for number, layer in enumerate(layers):
            if self.kind == "identity":
                y, old = layer(x)
                x = y + 0.5 * old
            elif self.kind == "collects":
                x = layer(x, seen)
            elif self.kind == "outside" and number == 3:
                x = layer(x.double().float()) * 2
            else:
                x = layer(x)
            if self.kind == "remembers":
                x = x + layer.last
        return x.pow(2).mean() + sum(seen)


KINDS = (
    "plain",
    "index",
    "scale",
    "alternating",
    "buffer",
    "remembers",
    "collects",
    "constant",
    "identity",
    "outside",
    "tied",
    "twice",
    "regularised",
    "returned",
)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_certain_is_traced_plainly(kind: str) -> None:
    """Layers that look at their number, keep values, collect or change state: right numbers all the same."""
    model = Stack(kind)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    joint = capture(model, (x,), {})
    found = evaluate(joint, model, (x,), {})
    loss = Stack(kind)
    wanted = loss(x)
    wanted.backward()
    assert torch.allclose(found["output", "0"], wanted.detach(), rtol=1e-5)
    for name, parameter in loss.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(found["grad", name], parameter.grad, rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize("kind", ["tied", "twice", "regularised", "returned"])
def test_parameters_with_other_uses_are_given_to_the_calls(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer is traced once all the same."""
    traced: list[bool | None] = []
    trace = capturing._Task._joint

    def watched(task: Any, repeats: Any, *state: Any, **options: bool) -> Any:
        if isinstance(task.kept.module, Stack):
            traced.append(None if repeats is None else repeats.apart)
        return trace(task, repeats, *state, **options)

    monkeypatch.setattr(capturing._Task, "_joint", watched)
    for name, wanted in (("plain", [True]), (kind, [True, False])):
        traced.clear()
        capture(Stack(name), (torch.randn(3, 6),), {})
        assert traced == wanted


def test_parameters_of_layers_are_no_arguments_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for one per call; all are ports of the graph, in their order, with their gradients."""
    sizes = []
    trace = capturing.trace

    def watched(function: Any, tensors: Any) -> Any:
        sizes.append(len(tensors))
        return trace(function, tensors)

    monkeypatch.setattr(capturing, "trace", watched)
    model = Stack("plain")
    joint = capture(model, (torch.randn(3, 6),), {})
    names = [name for name, _ in model.named_parameters()]
    inside = sum(1 for name in names if name.startswith("layers."))
    assert inside > len(model.layers)
    assert sizes[-1] == len(names) - inside + len(model.layers) + 2  # the input and the seed
    assert [p.target for p in joint.ports if p.kind == "param"] == names
    assert [r.target for r in flat(joint).results if r.kind == "grad"] == names


def test_what_is_absent_has_a_type_and_nothing_else() -> None:
    like = torch.empty(3, 4, dtype=torch.bfloat16, device="meta").t().requires_grad_()
    absent = Absent(like)
    assert (absent.shape, absent.stride(), absent.dtype) == ((4, 3), (1, 4), torch.bfloat16)
    assert absent.requires_grad and absent.is_floating_point() and absent.device.type == "cpu"
    uses = [torch.clone, torch.detach, torch.sum, lambda t: t + 1, lambda t: t[0].item()]
    for use in uses:
        with pytest.raises(AbsentUsedError):
            use(absent)
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(AbsentUsedError):
            use(absent)


def test_hooks_are_honoured() -> None:
    model = Stack("plain")
    model.layers[2].linear.register_forward_hook(lambda module, args, output: output * 2)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    found = evaluate(capture(model, (x,), {}), model, (x,), {})
    assert torch.allclose(found["output", "0"], model(x).detach(), rtol=1e-5)


def test_depth_costs_little_to_trace() -> None:
    """The layer's code runs a fixed number of times, however many layers there are."""
    counts = []
    for depth in (4, 12):
        calls = Counter[str]()

        class Counted(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(6, 6)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                calls["n"] += 1  # noqa: B023
                return torch.tanh(self.linear(x))

        model = nn.Sequential(*[Counted() for _ in range(depth)])
        capture(model, (torch.randn(2, 6),), {})
        counts.append(calls["n"])
    assert counts[0] == counts[1]
