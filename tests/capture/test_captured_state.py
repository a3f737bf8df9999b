"""What a capture takes for granted: noted, guarded at the call, or refused."""

from __future__ import annotations

import contextvars
import dis
import json
import random
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import transformers.models.llama.modeling_llama as modeling
from torch import nn

from autoshard.capture.capture import capture
from autoshard.capture.python_state.captured_state import graph_digest, state_here, texts_of
from autoshard.capture.python_state.code_reads import codes_of, globals_of
from autoshard.errors import CaptureError, UsageError
from autoshard.passes.simplify.fold_repeats import flat
from autoshard.runtime.checks import call_guard
from autoshard.runtime.checks.call_guard import CallGuard
from autoshard.runtime.checks.recapture import captured_of
from autoshard.runtime.compile_once import CompilingRanks

SCALE = 2.0
LOG: list[Any] = []
LEVEL: contextvars.ContextVar[float] = contextvars.ContextVar("level", default=1.0)


class Options:
    def __init__(self) -> None:
        self.power, self.unused = 2, "x"


class Net(nn.Module):
    """Its forward is given."""

    gain = 1

    def __init__(self, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(4, 4), nn.Dropout(0.1)
        self.step, self.weight_of_loss, self.mask = 0, 0.5, None
        self.seen: list[Any] = []
        self.table, self.options = torch.ones(4), Options()
        self.draws, self.random, self.tree = iter(range(9)), random.Random(0), {"a": [1.0, (2.0, [3.0])]}
        self.array = numpy.ones(3)
        self.run = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def attributes(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.drop(self.inner(x) * self.table).pow(self.options.power)
    return y.mean() * self.gain * self.weight_of_loss * SCALE * LEVEL.get()


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.step += 1
    return self.inner(x).mean() * min(1.0, self.step / 10)


def first_call_differs(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.step == 0:
        self.step, x = 1, x * 2
    return self.inner(x).mean()


def recurrent(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.table = self.inner(x).mean(0) + self.table
    return self.table.mean()


def collects(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.inner(x)
    self.seen.append(y)
    return y.mean()


def collects_outside(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.inner(x)
    LOG.append(y)
    return y.mean()


def draws(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.inner(x).mean() * next(self.draws)


def draws_at_random(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.inner(x).mean() * self.random.random()


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (counts, "step"),
        (first_call_differs, "step"),
        (recurrent, "table"),
        (collects, "seen"),
        (collects_outside, "LOG"),
        (draws, "draws"),
        (draws_at_random, "random generator random"),
    ],
)
def test_state_that_python_keeps_is_refused_by_name(forward: Any, name: str) -> None:
    model = Net(forward)
    before = model.random.getstate()
    with pytest.raises(CaptureError, match=name):
        capture(model, (torch.randn(3, 4),))
    assert model.random.getstate() == before
    assert type(model) is Net and not model.seen and not LOG and model.step == 0
    assert torch.equal(model.table, torch.ones(4))


def asks_for_what_is_not_there(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.inner(x).mean() * (2 if hasattr(self, "added") else 1)


def test_attributes_that_are_not_there_are_guarded() -> None:
    model = Net(asks_for_what_is_not_there)
    check = guard(model).check
    check()
    model.other = True
    check()
    model.added = True
    with pytest.raises(UsageError, match="added is True"):
        check()


def looks_inside(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.inner(x).mean() * self.tree["a"][1][1][0] * float(self.array[1])


def test_items_of_nested_containers_and_arrays_are_guarded() -> None:
    model = Net(looks_inside)
    check = guard(model).check
    check()
    model.tree["a"][1][1][0] = 4.0
    with pytest.raises(UsageError, match="tree"):
        check()
    model.tree["a"][1][1][0] = 3.0
    check()
    model.array[1] = 2.0
    with pytest.raises(UsageError, match="array"):
        check()


def builds_lazily(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.mask is None:
        self.mask = torch.ones(4)
    return (self.inner(x) * self.mask).mean()


def leaves_behind(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.last, self.rows = self.inner(x), x.shape[0]
    return self.last.mean() / self.rows


@pytest.mark.parametrize("forward", [builds_lazily, leaves_behind])
def test_values_that_no_later_call_depends_on_are_fine(forward: Any) -> None:
    model, x = Net(forward), torch.randn(3, 4)
    graph = flat(capture(model, (x,)))
    assert any(n.op.startswith("aten.addmm") for n in graph.graph.nodes)
    left = {c.read.label: c.after for c in capture(model, (x,)).captured_state.left}
    if forward is leaves_behind:
        assert left["rows"] == 3
        with pytest.raises(UsageError, match="last is read outside of forward"):
            left["last"] + 1


def guard(model: nn.Module, same_graph: Any = None) -> CallGuard:
    state = capture(model, (torch.randn(3, 4),)).captured_state
    return CallGuard(model, state, "cpu", same_graph)


def test_what_is_read_is_guarded_and_what_is_not_is_free() -> None:
    model = Net(attributes)
    check = guard(model).check
    check()
    model.step, model.options.unused, model.inner.name = 7, "y", "z"
    check()
    changes: list[tuple[Any, str, Any, str]] = [
        (model, "weight_of_loss", 5.0, "weight_of_loss is 5.0, and was 0.5"),
        (model.drop, "p", 0.0, r"drop\.p"),
        (model.options, "power", 3, r"options\.power"),
        (model, "table", torch.zeros(4), "table"),
        (model, "gain", 2, "gain is 2"),
        (model, "drop", nn.Identity(), "drop"),
        (model.drop, "training", False, "training"),
    ]
    for owner, name, value, text in changes:
        before = getattr(owner, name)
        setattr(owner, name, value)
        with pytest.raises(UsageError, match=text):
            check()
        delattr(owner, name) if name == "gain" else setattr(owner, name, before)
        check()


def test_variables_modes_hooks_and_tensors_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(attributes)
    check = guard(model).check
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    with pytest.raises(UsageError, match="SCALE is"):
        check()
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    token = LEVEL.set(4.0)
    with pytest.raises(UsageError, match="LEVEL"):
        check()
    LEVEL.reset(token)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UsageError, match="autocast"):
        check()
    hook = model.inner.register_forward_hook(lambda *args: None)
    with pytest.raises(UsageError, match="hooks"):
        check()
    hook.remove()
    check()
    model.table.add_(1)
    with pytest.raises(UsageError, match="table"):
        check()


def test_a_changed_value_that_gives_the_same_graph_is_accepted_once_looked_at() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).mean() * (2 if self.step < 10 else 3)

    model, asked = Net(forward), []
    joint = capture(model, (torch.randn(3, 4),))

    def same_graph(module: nn.Module) -> bool:
        asked.append(module.step)
        return graph_digest(capture(module, (torch.randn(3, 4),))) == graph_digest(joint)

    check = CallGuard(model, joint.captured_state, "cpu", same_graph).check
    for step in (1, 1, 0, 1):
        model.step = step
        check()
    assert asked == [1]
    model.step = 10
    with pytest.raises(UsageError, match="step is 10"):
        check()


class Switches(nn.Module):
    """Puts another module in place at its first call, as BigBird does for short sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.inner = "wide", nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (3, 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "wide":
            self.kind, self.inner = "narrow", nn.Sequential(self.inner[0], nn.Tanh())
        return self.inner(x).sum()


def test_modules_that_the_first_call_puts_in_place_are_there_at_the_second() -> None:
    """The attribute that says so was, and they were not."""
    model = Switches()
    joint = capture(model, (torch.randn(3, 4),))
    assert "aten.tanh.default" in {node.op for node in joint.graph.nodes}
    assert model.kind == "wide" and isinstance(model.inner[1], nn.Unflatten)


class Level(nn.Module):
    """Reads a context variable and an attribute of the model it is in."""

    def __init__(self, outer: list[Any]) -> None:
        super().__init__()
        self.outer = outer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * LEVEL.get() * self.outer[0].depth


class Deep(nn.Module):
    """Equal layers, of which one is not quite."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        outer = [self]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), Level(outer)) for _ in range(4)
        )
        self.odd, self.depth = odd, 1
        if odd == "hook":
            self.layers[2].register_forward_hook(lambda module, args, out: out * 7)
        if odd == "eval":
            self.layers[2][1].p = 0.5
            self.layers[2].eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            self.depth = 1 + number if self.odd == "outer" else 1
            with torch.autocast("cpu", torch.bfloat16, enabled=self.odd == "autocast" and number == 2):
                token = LEVEL.set(1.0 + number) if self.odd == "context" else None
                x = layer(x).float()
                if token is not None:
                    LEVEL.reset(token)
            if self.odd == "no_grad" and number == 1:
                with torch.no_grad():
                    x = layer(x)
        return x.pow(2).mean()


@pytest.mark.parametrize("odd", ["hook", "eval", "autocast", "no_grad", "context", "outer"])
def test_layers_that_differ_in_something_are_traced_as_they_are(odd: str) -> None:
    from joint_eval import evaluate

    torch.manual_seed(0)
    model, x = Deep(odd), torch.randn(3, 4)
    joint = capture(model, (x,))
    wanted = model(x)
    wanted.backward()
    found = evaluate(flat(joint), model, (x,), {})
    assert torch.allclose(found["output", "0"], wanted.detach(), rtol=1e-4)
    for name, p in model.named_parameters():
        if p.grad is None:
            assert ("grad", name) not in found or not found["grad", name].any(), name
        else:
            assert torch.allclose(found["grad", name], p.grad, rtol=1e-2, atol=1e-6), name
    assert (odd == "autocast") == any("bf16" in str(n.types) for n in flat(joint).graph.nodes)


def test_hooks_of_the_model_itself_are_left_to_the_call() -> None:
    model = Net(attributes)
    plain = graph_digest(capture(model, (torch.randn(3, 4),)))
    model.register_forward_hook(lambda module, args, out: out * 7)
    assert graph_digest(capture(model, (torch.randn(3, 4),))) == plain
    assert len(model._forward_hooks) == 1
    model.inner.register_full_backward_hook(lambda module, into, out: None)
    with pytest.raises(CaptureError, match="hook on its gradients"):
        capture(model, (torch.randn(3, 4),))


def test_weights_that_are_not_registered_are_refused_unless_they_need_no_gradient() -> None:
    hidden = [nn.Linear(4, 4)]

    class Teacher(nn.Module):
        def __init__(self, trained: bool) -> None:
            super().__init__()
            self.inner, self.trained = nn.Linear(4, 4), trained

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(self.trained):
                y = hidden[0](x)
            return (self.inner(x) - y).mean()

    with pytest.raises(CaptureError, match="no parameter of the model"):
        capture(Teacher(True), (torch.randn(3, 4),))
    check = guard(Teacher(False)).check
    check()
    with torch.no_grad():
        hidden[0].weight.mul_(2)
    with pytest.raises(UsageError, match="changed in place"):
        check()


def test_outputs_that_have_a_gradient_are_marked() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.inner(x)
            return {"loss": y.mean(), "logits": y, "ids": y.argmax(-1), "fixed": y.detach()}

    joint = capture(Two(), (torch.randn(3, 4),))
    assert [kind for _, kind in joint.out_leaves] == ["grad", "grad", "", ""]
    assert [p.target for p in joint.ports if p.kind == "tangent"] == ["0"]


def test_a_stored_program_knows_what_attributes_were_when_it_was_compiled() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.inner(x)).mean() * self.options.scale

    model, x = Net(forward), torch.randn(3, 4)
    model.drop, model.options, model.unread = nn.Dropout(0.25), SimpleNamespace(scale=2.0), 1
    texts = json.loads(json.dumps(texts_of(capture(model, (x,)).captured_state.reads)))
    assert texts.items() >= {"drop.p": "0.25", "drop.training": "True", "options.scale": "2.0"}.items()
    check = CallGuard(model, state_here(model, texts), "cpu", None, texts).check
    model.unread = 2
    check()
    for owner, name, value, label in (
        (model.drop, "p", 0.5, r"drop.p is 0.5, and was 0.25"),
        (model.drop, "training", False, r"drop.training is False, and was True"),
        (model.options, "scale", 3.0, r"options.scale is 3.0, and was 2.0"),
    ):
        before = getattr(owner, name)
        setattr(owner, name, value)
        later = CallGuard(model, state_here(model, texts), "cpu", None, texts).check
        for each in (check, later):
            with pytest.raises(UsageError, match=label):
                each()
        setattr(owner, name, before)
        check()
        later()  # as it was when the program was compiled


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helped(self.inner(x))

    def helped(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.part(x).mean()
        return y


@pytest.mark.parametrize("name", ["inner.forward", "forward", "helped"])
def test_methods_that_are_replaced_later_are_guarded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Whole()
    check = guard(model).check
    check()
    owner, _, key = f"part.{name}".rpartition(".")
    other = nn.Identity().forward
    with monkeypatch.context() as patched:
        patched.setattr(model.get_submodule(owner), key, other, raising=False)
        with pytest.raises(UsageError, match=f"part.{name} is a method, and was "):
            check()
    check()
    if name != "inner.forward":
        monkeypatch.setattr(Part, name, lambda self, x: x)
        with pytest.raises(UsageError, match=f"Part.{name} is a function"):
            check()


class Asks(nn.Module):
    """Asks whether gradients are recorded, while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).mean()
        return y * 3 if self.training and not torch.is_grad_enabled() else y * 2


def test_code_that_asks_for_gradients_is_for_calls_with_them() -> None:
    model, x = Asks(), torch.randn(3, 4)
    with torch.no_grad():
        joint = capture(model, (x,))
        made = captured_of(
            joint.captured_state,
            joint.captured_state.digest,
            ((x,), {}),
            "auto",
            "",
            lambda *_: None,
            lambda *_: None,
            CompilingRanks.alone(),
        )
        check = CallGuard(model, made.state, "cpu", made.same_graph).check
        with pytest.raises(UsageError, match="grad mode is False, and was True"):
            check()
        model.eval()  # it does not ask then, and the graph is the same
        check()
    model.train()
    check()


class Reads(nn.Module):
    """Looks at what depends on gradients being recorded."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner, self.name = nn.Linear(4, 4), name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return (y * 2 if getattr(y, self.name) else y).mean()


@pytest.mark.parametrize("name", ["requires_grad", "grad_fn", "is_leaf", "ndim"])
def test_attributes_that_depend_on_gradients_being_recorded(name: str) -> None:
    state = capture(Reads(name), (torch.randn(3, 4),)).captured_state
    assert state.grad_mode == (name != "ndim")


def test_autocast_of_a_device_that_captures_do_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(attributes)
    joint = capture(model, (torch.randn(3, 4),))
    check = CallGuard(model, joint.captured_state, "cuda", lambda module: True).check
    check()
    model.train(False)  # this would be asked of a capture
    check()
    monkeypatch.setattr(call_guard, "autocast_state", lambda device: (True, torch.bfloat16))
    with pytest.raises(UsageError, match="autocast for cuda"):
        check()


def test_a_global_with_the_name_of_an_attribute_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Asks(), torch.randn(3, 4)
    monkeypatch.setattr(sys.modules[__name__], "inner", 1, raising=False)
    assert not [r for r in capture(model, (x,)).captured_state.variables if r.key == "inner"]


def test_globals_are_those_that_dis_tells() -> None:
    """Of all functions of some modules, with more names than an instruction has room for."""
    many = "def f():\n    return (" + ", ".join(f"g{k}" for k in range(400)) + ")\nclass C:\n    x = g1\n"
    codes = list(codes_of(compile(many, "many", "exec")))
    for module in (modeling, torch.nn.functional):
        functions = [f for f in vars(module).values() if isinstance(f, FunctionType)]
        codes += [code for f in functions for code in codes_of(f.__code__)]
    assert len(codes) > 100
    for code in codes:
        loads = [i for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
        assert globals_of(code) == {i.argval for i in loads}


@lru_cache(maxsize=8)
def mask_of(length: int) -> torch.Tensor:
    return torch.ones(length, length).tril()


class Cached(nn.Module):
    """Keeps a mask by its length, and a table by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @staticmethod
    @cache
    def scales(width: int) -> torch.Tensor:
        return torch.arange(1.0, width + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (mask_of(x.shape[1]) @ self.layer(x) * self.scales(4)).square().mean()


def test_functions_that_keep_what_they_return_keep_nothing_of_a_capture() -> None:
    model, x = Cached(), torch.randn(4, 8, 4)
    for _ in range(2):
        joint = capture(model, (x,))
        assert not any(p.kind == "const" for p in joint.ports)
    assert mask_of.cache_info().currsize == Cached.scales.cache_info().currsize == 0
    model(x).backward()
    assert type(mask_of(8)) is torch.Tensor and capture(model, (x,)) is not None


class OfTheClass(nn.Module):
    """Its numbers are read by methods that have no instance."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @staticmethod
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * SCALE

    @classmethod
    def logged(cls, x: torch.Tensor) -> torch.Tensor:
        return x * len(LOG)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scaled(self.layer(x)) + self.logged(x)).sum()


def test_what_static_and_class_methods_read_is_noted() -> None:
    reads = capture(OfTheClass(), (torch.randn(2, 4),)).captured_state
    assert reads is not None and {"SCALE", "LOG"} <= {r.key for r in reads.variables}
