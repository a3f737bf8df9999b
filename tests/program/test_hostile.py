"""What an impatient user does: unusual but legal models, wrong arguments, folders that cannot be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autoshard
from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cli.main import app
from autoshard.cluster import Mesh, load_cluster
from autoshard.planner.analysis import analyse
from autoshard.planner.planning import plan_analysed
from autoshard.runtime.arguments import Arguments
from autoshard.verify.lockstep import verify

MESHES = ("dp=2,tp=2", "fsdp=4", "tp=4", "x=4", "dp=2,x=2", "fsdp=2,tp=2")


class Written(nn.Module):
    """A model whose forward is a function."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.run(self, *args)


def alternating(m: Any, x: torch.Tensor) -> torch.Tensor:
    for number, layer in enumerate(m.layers):
        x = torch.tanh(layer(x)) if number % 2 else x + torch.relu(layer(x))
    return x.pow(2).mean()


def average(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    loss = (h * m.norm.running_mean).pow(2).mean()
    m.norm.running_mean = 0.5 * m.norm.running_mean + h.detach().mean(0)
    return loss


def outputs(m: Any, x: torch.Tensor) -> dict[str, Any]:
    h = m.a(x)
    return {"x": x, "h": h, "view": h[:, 2:], "weight": m.a.weight.t(), "nested": (h.sum(), [None, h > 0])}


def linear(*sizes: int) -> nn.Linear:
    return nn.Linear(*(sizes or (16, 16)))


def stack(count: int) -> nn.ModuleList:
    return nn.ModuleList([linear() for _ in range(count)])


def shared(**parts: nn.Linear) -> dict[str, nn.Linear]:
    parts["b"].weight = parts["a"].weight
    return parts


MODELS: dict[str, Callable[[], nn.Module]] = {
    "alternating layers": lambda: Written(alternating, layers=stack(6)),
    "a layer twice": lambda: Written(lambda m, x: m.a(torch.relu(m.a(x))).pow(2).mean(), a=linear()),
    "a weight in two layers": lambda: Written(
        lambda m, x: m.b(torch.tanh(m.a(x))).pow(2).mean(), **shared(a=linear(), b=linear())
    ),
    "outputs of all kinds": lambda: Written(outputs, a=linear()),
    "unused parameters": lambda: Written(lambda m, x: m.a(x).pow(2).mean(), a=linear(), b=linear()),
    "scalars and empty parameters": lambda: Written(
        lambda m, x: (m.a(x) * m.s + m.one).pow(2).mean() + m.none.sum(),
        a=linear(),
        s=nn.Parameter(torch.tensor(0.5)),
        one=nn.Parameter(torch.ones(1)),
        none=nn.Parameter(torch.ones(0)),
    ),
    "no parameters": lambda: Written(lambda m, x: torch.softmax(x @ x.t(), -1)),
    "running statistics": lambda: Written(
        lambda m, x: m.norm(m.a(x)).pow(3).mean(), a=linear(), norm=nn.BatchNorm1d(16)
    ),
    "a buffer read, then assigned anew": lambda: Written(average, a=linear(), norm=nn.BatchNorm1d(16)),
    "a bias that a norm takes away": lambda: Written(
        lambda m, x: m.norm(m.c(x.view(8, 1, 4, 4))).relu().mean((2, 3)),
        c=nn.Conv2d(1, 8, 3, padding=1),
        norm=nn.BatchNorm2d(8),
    ),
    "odd slices": lambda: Written(
        lambda m, x: torch.cat([m.a(x)[:, :5], m.a(x)[:, 7:], x[:, 1::3]], 1)[1:7].pow(2).mean(), a=linear()
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_unusual_models(name: str) -> None:
    torch.manual_seed(1)
    model, x = MODELS[name](), torch.randn(8, 16)
    analysis = analyse(capture(model, (x,)))
    for mesh in MESHES:
        planned = plan_analysed(analysis, [Mesh.parse(mesh)], load_cluster("cpu-gloo"))
        found = verify(compile_analysed(planned), model, (x,), {}, steps=2)
        assert found.ok, (mesh, [c for c in found.checks if not c.ok])


@pytest.mark.parametrize("mesh", MESHES)
def test_alternating_layers_in_little_memory(mesh: str) -> None:
    """Layers that share a segment but keep their gathered weights in different layouts."""
    torch.manual_seed(1)
    model, x = MODELS["alternating layers"](), torch.randn(8, 16)
    analysis = analyse(capture(model, (x,)))
    tight = None
    for power in range(20, 8, -1):
        try:
            tight = plan_analysed(analysis, [Mesh.parse(mesh)], load_cluster("cpu-gloo"), memory=2**power)
        except autoshard.InfeasibleError:
            break
    assert tight is not None
    assert verify(compile_analysed(tight), model, (x,), {}, steps=1).ok


# -- arguments -----------------------------------------------------------------------------------------


class Called(nn.Module):
    def forward(
        self, x: torch.Tensor, y: Any = None, *rest: torch.Tensor, scale: float = 1.0, **more: Any
    ) -> torch.Tensor:
        total = x * scale + sum(rest)
        return total + (y if y is not None else 0) + sum(more.get("extra", {}).values())


X, Y, Z = torch.ones(4, 4), torch.full((4, 4), 2.0), torch.full((4, 4), 3.0)


def arguments(*args: Any, **kwargs: Any) -> Arguments:
    """For a program that was compiled for this call."""
    from autoshard.program.program import Signature

    return Arguments(Called.forward, Signature.of(capture(Called(), args, kwargs)))


def test_calls_that_mean_the_same_are_the_same() -> None:
    wanted = arguments(X, y=Y)
    for args, kwargs in (
        ((X, Y), {}),
        ((X,), {"y": Y}),
        ((), {"y": Y, "x": X}),
        ((X, Y), {"scale": float("1.0")}),
    ):
        assert [id(v) for v in wanted.flattened(args, kwargs)] == [id(X), id(Y)]
    nested = arguments(X, extra={"a": Y, "b": Z})
    assert [id(v) for v in nested.flattened((X,), {"extra": {"b": Z, "a": Y}})] == [id(X), id(Y), id(Z)]


@pytest.mark.parametrize(
    "args, kwargs, words",
    [
        ((X,), {"y": Y, "z": Z}, "z was not given"),
        ((X, Y, Z), {}, "rest was not given"),
        ((), {"y": Y}, "missing a required argument"),
        ((X,), {"y": [Y]}, "built in another way"),
        ((X, Y), {"x": X}, "multiple values"),
        ((X, Y), {"scale": 2.0}, "scale was not given"),
    ],
)
def test_calls_that_differ_are_refused(args: tuple[Any, ...], kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(autoshard.UsageError, match=words):
        arguments(X, Y).flattened(args, kwargs)


def test_static_arguments_are_part_of_the_program() -> None:
    with pytest.raises(autoshard.UsageError, match="scale is 3"):
        arguments(X, Y, scale=2.0).flattened((X, Y), {"scale": 3.0})


# -- misuse --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [0, -1, "1GiB", True])
def test_memory_that_is_none(memory: Any) -> None:
    with pytest.raises(autoshard.UsageError, match="memory is"):
        autoshard.plan(linear(), "tp=2", example_inputs=torch.ones(4, 16), memory=memory)


def test_what_cannot_be_parallelized() -> None:
    def call(*args: Any) -> Any:
        return args

    with pytest.raises(autoshard.UsageError, match="the model is a function"):
        autoshard.parallelize(call, "tp=2")
    with pytest.raises(autoshard.UsageError, match="int is not a cluster"):
        autoshard.plan(linear(), "tp=2", example_inputs=torch.ones(4, 16), cluster=5)  # type: ignore[arg-type]
    lazy = autoshard.parallelize(linear(), "tp=2")
    with pytest.raises(autoshard.UsageError, match="parallelized already"):
        autoshard.parallelize(lazy, "tp=2")


def test_a_first_call_that_fails_fails_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not quietly become the model on one device."""
    monkeypatch.delenv("RANK", raising=False)
    lazy = autoshard.parallelize(linear(), "tp=2")
    for _ in range(2):
        with pytest.raises(autoshard.UsageError, match="no process group"):
            lazy(torch.ones(4, 16))


def test_capture_for_training_in_inference_mode() -> None:
    with torch.inference_mode():
        joint = capture(linear(), (torch.ones(4, 16),))
    assert {r.kind for r in joint.results} == {"output", "grad"}


# -- the command line ----------------------------------------------------------------------------------

TARGET = """
import torch


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()), torch.randn(8, 16)
"""


@pytest.mark.parametrize("command", ["plan", "compile"])
def test_folders_that_cannot_be_written(command: str, tmp_path: Path) -> None:
    (tmp_path / "with space").mkdir()
    target = tmp_path / "with space" / "mine.py"
    target.write_text(TARGET)
    (tmp_path / "file").write_text("")
    words = [command, f"{target}:mlp", "--mesh", "tp=2", "-o", str(tmp_path / "file" / "out")]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 2 and "cannot be written" in result.stderr, result.output


def test_commands_to_copy_are_quoted(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TARGET)
    out = tmp_path / "a [b] c"
    words = ["compile", f"{tmp_path}/mine.py:mlp", "--mesh", "tp=2", "-o", str(out)]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0 and result.stdout.count(f"'{out}'") == 3 and f"to {out}\n" in result.stdout


def test_a_file_is_not_a_program_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "file")], catch_exceptions=False)
    assert result.exit_code == 2 and "is not a program folder" in result.stderr
