"""Rules of the user's own: an op from a library of theirs, from the rule to the equality with eager."""

from __future__ import annotations

import json
import textwrap
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lockstep_check import RTOL, compare_step
from torch import nn
from typer.testing import CliRunner

import autoshard
from autoshard.capture.capture import capture
from autoshard.cli.main import app
from autoshard.ir import Node, TensorType
from autoshard.planner.analysis import analyse
from autoshard.program.store import load_program
from autoshard.rules import Factored, broadcast, einsum, opaque

SOURCE = """
import torch
from torch import nn
import autoshard
from autoshard.rules import einsum


@torch.library.custom_op("reach::gated", mutates_args=())
def gated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


@gated.register_fake
def _(x, w):
    return x.new_empty((x.shape[0], w.shape[1]))


@torch.library.custom_op("reach::gated_backward", mutates_args=())
def gated_backward(g: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return g * (1 - y * y)


@gated_backward.register_fake
def _(g, y):
    return torch.empty_like(g)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output)


def _backward(ctx, g):
    x, w, y = ctx.saved_tensors
    h = gated_backward(g, y)
    return h @ w.t(), x.t() @ h


gated.register_autograd(_backward, setup_context=_save)


@autoshard.rule("reach.gated.default")
def gated_rule(node, ins):
    return einsum("m k, k n -> m n", ins, node.types, fixed="k", kind="matmul")


@autoshard.rule("reach.gated_backward.default")
def backward_rule(node, ins):
    return einsum("m n, m n -> m n", ins, node.types, linear=((0,),))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.out = nn.Parameter(torch.randn(16, 24) / 4), nn.Linear(24, 8)

    def forward(self, x):
        return {"loss": self.out(gated(x, self.w)).square().mean()}


def make():
    return Model(), torch.randn(8, 16)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "reach_ops.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def own(source: Path) -> Any:
    from autoshard.interop.targets import load_rules

    return load_rules(source)


class Out(dict[str, torch.Tensor]):
    """Outputs that can be read as attributes, as those of transformers."""

    loss = property(lambda self: self["loss"])


def _made(own: Any) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = own.make()
    return model, x


@pytest.mark.parametrize("mesh", ["dp=4", "tp=4", "dp=2,tp=2", "fsdp=4"])
def test_equal_to_eager(own: Any, mesh: str) -> None:
    model, x = _made(own)
    planned = autoshard.plan(model, mesh, example_inputs={"x": x}, cluster="h100-dgx", rules=own)
    program = autoshard.compile(model, planned).program
    assert program.user_ops == ("reach.gated.default", "reach.gated_backward.default")

    class Eager(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return model.named_parameters(*args, **kwargs)

        def forward(self, **inputs: Any) -> Out:
            return Out(model(**inputs))

    errors = compare_step(program, Eager(), {"x": x})
    assert {"loss", "w", "out.weight", "out.bias"} <= set(errors)
    assert max(errors.values()) < RTOL


def test_the_op_is_split(own: Any) -> None:
    model, x = _made(own)
    planned = autoshard.plan(model, "tp=4", example_inputs={"x": x}, cluster="h100-dgx", rules=[*_rules(own)])
    program = autoshard.compile(model, planned).program
    text = "\n".join(
        f"{node.op} {segment.layouts[node.name]}"
        for segment in program.lowered.segments.values()
        for node in segment.graph.nodes
    )
    assert "reach.gated.default (S" in text.replace("(Shard", "(S")


def _rules(own: Any) -> list[autoshard.UserRule]:
    return [own.gated_rule, own.backward_rule]


def test_without_its_rule_the_op_has_none(own: Any) -> None:
    model, x = _made(own)
    with pytest.raises(autoshard.NoRuleError, match=r"reach\.gated\.default, reach\.gated_backward\.default"):
        autoshard.plan(model, "dp=2", example_inputs=x)
    with pytest.raises(autoshard.NoRuleError, match=r"for: reach\.gated_backward\.default\n"):
        autoshard.plan(model, "dp=2", example_inputs=x, rules=[own.gated_rule])


def test_a_stored_program_needs_its_rules_again(own: Any, tmp_path: Path) -> None:
    model, x = _made(own)
    planned = autoshard.plan(model, "dp=2", example_inputs=x, rules=_rules(own))
    autoshard.compile(model, planned).save(tmp_path / "p")
    with pytest.raises(autoshard.VerificationError, match=r"calls reach\.gated\.default"):
        load_program(tmp_path / "p")
    with pytest.raises(autoshard.VerificationError, match=r"calls reach\.gated_backward\.default"):
        autoshard.load(tmp_path / "p", model, rules=[own.gated_rule])
    assert load_program(tmp_path / "p", rules=own).user_ops == planned_ops(planned)
    assert load_program(tmp_path / "p", only_read=True).user_ops == planned_ops(planned)


def planned_ops(planned: autoshard.Planned) -> tuple[str, ...]:
    return tuple(sorted(op for op in planned.analysis.table if op.startswith("reach.")))


def test_an_op_is_not_let_in_by_the_text_alone(own: Any, tmp_path: Path) -> None:
    """Taking the op out of the manifest does not make a loader call it."""
    model, x = _made(own)
    planned = autoshard.plan(model, "dp=2", example_inputs=x, rules=_rules(own))
    autoshard.compile(model, planned).save(tmp_path / "p")
    path = tmp_path / "p" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["user_ops"] = []
    path.write_text(json.dumps(manifest))
    with pytest.raises(autoshard.VerificationError):
        load_program(tmp_path / "p")


def test_commands_take_a_file_of_rules(source: Path, own: Any, tmp_path: Path) -> None:
    run = CliRunner()
    target, given = f"{source}:make", ["--rules", str(source)]
    out = tmp_path / "program"
    assert run.invoke(app, ["check", target]).exit_code == 3
    assert run.invoke(app, ["check", target, *given]).exit_code == 0
    assert run.invoke(app, ["plan", target, "--mesh", "dp=2", *given]).exit_code == 0
    made = run.invoke(app, ["compile", target, "--mesh", "dp=2,tp=2", "-o", str(out), *given])
    assert made.exit_code == 0, made.output
    assert run.invoke(app, ["inspect", str(out)]).exit_code == 0
    assert run.invoke(app, ["verify", str(out)]).exit_code == 5
    verified = run.invoke(app, ["verify", str(out), *given])
    assert verified.exit_code == 0, verified.output


def test_a_file_without_rules_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nothing_in_it.py"
    path.write_text("x = 1\n")
    outcome = CliRunner().invoke(app, ["plan", f"{path}:x", "--mesh", "dp=2", "--rules", str(path)])
    assert outcome.exit_code == 2
    assert "holds no rule" in outcome.output


# -- what is refused -----------------------------------------------------------------------------------


def _identity(node: Node, ins: Sequence[TensorType]) -> Factored:
    return broadcast(ins, node.types)


def test_rules_are_values() -> None:
    made = autoshard.rule("mine.op.default")(_identity)
    assert (made.op, made.fn) == ("mine.op.default", _identity)
    with pytest.raises(AttributeError):
        made.op = "other.op.default"  # type: ignore[misc]


@pytest.mark.parametrize("name", ["relu", "aten.relu", "a.b.c.d", "..", ""])
def test_names_of_ops_are_checked(name: str) -> None:
    with pytest.raises(autoshard.UsageError, match="not the name of an op"):
        autoshard.rule(name)


def test_what_is_no_rule_is_refused() -> None:
    joint = capture(nn.Linear(4, 4), (torch.randn(2, 4),))
    mine = autoshard.rule("mine.op.default")(_identity)
    with pytest.raises(autoshard.UsageError, match="is not a rule"):
        analyse(joint, rules=[_identity])  # type: ignore[list-item]
    with pytest.raises(autoshard.UsageError, match="two rules for mine"):
        analyse(joint, rules=[mine, autoshard.rule("mine.op.default")(_identity)])
    with pytest.raises(autoshard.UsageError, match="has a rule already"):
        analyse(joint, rules=[autoshard.rule("aten.mm.default")(_identity)])
    with pytest.raises(autoshard.UsageError, match="cannot have a rule"):
        analyse(joint, rules=[autoshard.rule("sum.dim_IntList.default")(_identity)])
    module = types.ModuleType("some")
    vars(module).update(first=mine, again=mine, other=3)
    assert "mine.op.default" in analyse(joint, rules=module).table


@pytest.mark.parametrize(
    "wrong",
    [
        lambda node, ins: None,
        lambda node, ins: ins[7],
        lambda node, ins: einsum("m k, k n -> n m", ins, node.types),
        lambda node, ins: Factored((8,), (((0,), ()),), (((0,), ()),)),
        lambda node, ins: Factored((7,), (((0,), ()), ((), ())), (((0,), ()),)),
    ],
)
def test_a_rule_that_says_the_impossible_is_named(own: Any, wrong: Any) -> None:
    model, x = _made(own)
    rules = [autoshard.rule("reach.gated.default")(wrong), own.backward_rule]
    with pytest.raises(autoshard.NoRuleError, match=r"the rule of reach\.gated\.default cannot be used"):
        autoshard.plan(model, "dp=2", example_inputs=x, rules=rules)


# -- the truth about a rule ----------------------------------------------------------------------------


def test_a_right_rule_passes(own: Any) -> None:
    x, w = torch.randn(5, 4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    assert autoshard.check_rule(own.gated_rule, x, w) > 10
    assert (
        autoshard.check_rule(autoshard.rule("reach.gated.default")(lambda n, ins: opaque(ins, n.types)), x, w)
        > 0
    )


def test_the_documented_example_is_right() -> None:
    @torch.library.custom_op("reachdoc::scaled_matmul", mutates_args=())
    def op(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x @ w * scale

    text = autoshard.rules.__doc__ or ""
    code = text[text.index("    @autoshard.rule") : text.index("    autoshard.parallelize")]
    scope: dict[str, Any] = {"autoshard": autoshard, "einsum": einsum}
    exec(textwrap.dedent(code).replace("mine.", "reachdoc."), scope)
    autoshard.check_rule(scope["scaled_matmul"], torch.randn(6, 4), torch.randn(4, 8), torch.tensor(2.0))


def test_a_wrong_rule_is_caught(own: Any) -> None:
    """tanh of a sum is not the sum of tanh."""
    x, w = torch.randn(5, 4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)

    @autoshard.rule("reach.gated.default")
    def wrong(node: Node, ins: Sequence[TensorType]) -> Factored:
        return einsum("m k, k n -> m n", ins, node.types)

    with pytest.raises(autoshard.WrongRule):
        autoshard.check_rule(wrong, x, w)
