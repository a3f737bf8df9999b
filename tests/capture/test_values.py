"""Python code that asks tensors for their values: what can be captured, and what is said where it cannot."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from architectures import errors_of, program_of
from lockstep_check import RTOL, lockstep_step, relative_error
from torch import nn

from autoshard.capture.capture import capture
from autoshard.errors import CaptureError, NoRuleError
from autoshard.ir import Joint
from autoshard.ops.lift import Lifter
from autoshard.planner.analysis import analyse


class Asking(nn.Module):
    """A linear layer behind some code."""

    def __init__(self, code: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.code, self.last = code, nn.Linear(4, 4)

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.last(self.code(*args)).sum()


def graph_of(code: Callable[..., torch.Tensor], *more: torch.Tensor) -> Joint:
    return capture(Asking(code), (torch.randn(2, 4), *more))


def raising(x: torch.Tensor) -> torch.Tensor:
    if x is not None and x.max() > 3:
        raise ValueError("too large")
    if not torch.isfinite(x).all() or not x.abs().max() < 9:
        raise ValueError("not finite")
    else:
        x = x * 2
    return x


def asserting(x: torch.Tensor) -> torch.Tensor:
    assert x.max().item() <= 3 and (x > -3).all(), f"too large: {x.max()}"
    assert not torch.isnan(x).any()
    return x * 2


def warning(x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any():
        warnings.warn("negative", stacklevel=2)
    return x * 2


@pytest.mark.parametrize("code", [raising, asserting, warning])
def test_checks_count_as_passed(code: Callable[..., torch.Tensor]) -> None:
    """What a check would have raised is left out; what follows it stays."""
    ops = [node.op for node in graph_of(code).graph.nodes]
    assert "aten.mul.Tensor" in ops
    assert not any("_local_scalar_dense" in op or "isnan" in op for op in ops)


def branching(x: torch.Tensor) -> torch.Tensor:
    if x.max() > 3:
        x = x * 2
    return x


def both(x: torch.Tensor) -> torch.Tensor:
    """A check that also changes what is computed is a branch."""
    if x.max() > 3:
        x = x * 2
        raise ValueError(x)
    return x


def mixed(x: torch.Tensor) -> torch.Tensor:
    if x.max() > 3 or not x.min() < 3:
        raise ValueError("which of the two is asked cannot be told")
    return x


def kept(x: torch.Tensor) -> torch.Tensor:
    largest = x.max().item()
    if largest > 3:
        raise ValueError(largest)
    return x


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (branching, "if x.max() > 3"),
        (both, "if x.max() > 3"),
        (mixed, "if x.max() > 3"),
        (kept, ".item()"),
    ],
)
def test_other_uses_of_values_name_their_line(code: Callable[..., torch.Tensor], line: str) -> None:
    with pytest.raises(CaptureError) as failed:
        graph_of(code)
    assert "value of a tensor" in failed.value.what and line in failed.value.where


def by_sizes(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    for height, width in sizes.tolist():
        x = x * height + width
    rows = torch.repeat_interleave(torch.arange(2), sizes.prod(1))
    return x[rows]


def test_tables_of_sizes_become_part_of_the_program() -> None:
    joint = graph_of(by_sizes, torch.tensor([[1, 2], [3, 1]]))
    assert joint.in_leaves[1] == ("static", repr(torch.tensor([[1, 2], [3, 1]])))
    assert [p.target for p in joint.ports if p.kind == "input"] == ["0"]
    gathered = next(n for n in joint.graph.nodes if n.op == "aten.index.Tensor")
    assert gathered.types[0] is not None and gathered.types[0].shape == (5, 4)


def test_sizes_stay_inputs_where_their_values_are_not_needed() -> None:
    joint = graph_of(lambda x, sizes: x * sizes.sum(), torch.tensor([[1, 2], [3, 1]]))
    assert joint.in_leaves[1] == ("tensor", "")


def spoiled(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    sizes[0] = x.long()[0, :2]
    return x * sum(sizes[1].tolist())


def test_known_values_that_are_overwritten_are_an_error() -> None:
    with pytest.raises(CaptureError, match="changed in place"):
        graph_of(spoiled, torch.tensor([[1, 2], [3, 1]]))


def only_eager(x: torch.Tensor) -> torch.Tensor:
    mask = None if torch.compiler.is_compiling() else x > 0
    return x * mask.shape[0]  # type: ignore[union-attr]


def test_code_that_fails_only_when_compiled_is_traced_as_eager_runs_it() -> None:
    ops = [node.op for node in graph_of(only_eager).graph.nodes]
    assert "aten.mul.Tensor" in ops


def test_recurrent_layers_are_one_op_for_all_steps() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(4, 3, num_layers=2, dropout=0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0].sum()

    for steps in (3, 30):
        ops = [n.op for n in capture(Reader(), (torch.randn(steps, 2, 4),)).graph.nodes]
        assert ops.count("autoshard.recurrent.default") == 2
        assert ops.count("autoshard.recurrent_backward.default") == 2
        assert ops.count("autoshard.dropout.default") == 2


def test_selected_labels_are_tensors_elsewhere() -> None:
    with pytest.raises(CaptureError) as failed:
        graph_of(
            lambda x, y: x * y.masked_select(y > 0).unique().float().mean(),
            torch.ones(2, 5, dtype=torch.int64),
        )
    assert "shape of a tensor depends on values" in failed.value.what


class Noisy(nn.Module):
    """Stochastic depth of two kinds, noise and a random mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        kept = (0.8 + torch.rand((x.shape[0], 1))).floor_()
        x = x + self.first(x).div(0.8) * kept
        x = x + self.second(x) * x.new_empty((x.shape[0], 1)).bernoulli_(0.7).div_(0.7)
        x = x + 0.1 * torch.randn_like(x) + torch.empty_like(x).exponential_(2.0)
        x = x[torch.randperm(8)] * torch.randint(1, 4, (8, 1)) + x[torch.multinomial(torch.ones(8), 8, True)]
        return {"loss": (x * torch.bernoulli(torch.sigmoid(x))).square().mean()}


def test_random_numbers_are_the_same_on_any_mesh() -> None:
    model, inputs = Noisy(), {"x": torch.randn(8, 8)}

    def results(mesh: str, seed: int) -> list[torch.Tensor]:
        program = program_of(model, inputs, mesh)
        lockstep, env = lockstep_step(program, model, inputs, seed)
        return [lockstep.whole(env[r.value], r.value) for r in program.signature.results]

    one = results("dp=1", 7)
    for mesh in ("dp=2,tp=2", "dp=4"):
        for found, wanted in zip(results(mesh, 7), one, strict=True):
            assert relative_error(found, wanted) < RTOL
    assert not torch.allclose(results("dp=1", 8)[0], one[0])


def test_random_numbers_have_their_distributions() -> None:
    drawn = Lifter(torch.tensor(5)).table()
    shape = (300, 300)
    uniform, normal = drawn[torch.rand](*shape), drawn[torch.randn](shape)
    assert 0 <= uniform.min() < 1e-4 and 1 - 1e-4 < uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 5e-3 and abs(uniform.var() - 1 / 12) < 2e-3
    assert abs(normal.mean()) < 0.02 and abs(normal.std() - 1) < 0.01
    assert abs(torch.corrcoef(normal[:50]) - torch.eye(50)).max() < 0.3
    kept = drawn[torch.Tensor.bernoulli_](torch.empty(shape), 0.3)
    assert set(kept.unique().tolist()) == {0.0, 1.0} and abs(kept.mean() - 0.3) < 0.01
    waited = drawn[torch.Tensor.exponential_](torch.empty(shape), 2.0)
    assert waited.min() >= 0 and abs(waited.mean() - 0.5) < 0.01
    logs = drawn[torch.Tensor.log_normal_](torch.empty(shape), 0.5, 2.0).log()
    assert abs(logs.mean() - 0.5) < 0.02 and abs(logs.std() - 2) < 0.02
    cauchy = drawn[torch.Tensor.cauchy_](torch.empty(shape), 1.0, 2.0)
    assert abs(cauchy.median() - 1) < 0.05 and abs((cauchy < 3).float().mean() - 0.75) < 0.01
    tries = drawn[torch.Tensor.geometric_](torch.empty(shape), 0.25)
    assert tries.min() == 1 and abs(tries.mean() - 4) < 0.05 and torch.equal(tries, tries.round())
    means, spreads = torch.full(shape, 3.0), torch.tensor([1.0, 2.0, 4.0]).repeat(100)
    spread = drawn[torch.normal](means, spreads).view(-1, 3)
    assert torch.allclose(spread.mean(0), torch.tensor(3.0), atol=0.1)
    assert torch.allclose(spread.std(0), spreads[:3], rtol=0.02)
    assert drawn[torch.normal](1.0, spreads).shape == (300,) and drawn[torch.normal](
        0.0, 1.0, (2, 5)
    ).shape == (2, 5)
    slopes = drawn[torch.nn.functional.rrelu](-torch.ones(shape), 0.2, 0.4, training=True)
    assert -0.4 <= slopes.min() < slopes.max() <= -0.2 and abs(slopes.mean() + 0.3) < 2e-3
    like = drawn[torch.randint_like](torch.empty(shape), 2, 5)
    assert like.dtype == torch.float32 and like.unique().tolist() == [2, 3, 4]
    assert drawn[torch.rand](size=(2, 3), dtype=torch.float64).dtype == torch.float64
    numbers = drawn[torch.randint](-1, 3, shape)
    assert numbers.unique().tolist() == [-1, 0, 1, 2] and abs(numbers.float().mean() - 0.5) < 0.05
    assert drawn[torch.randint](high=2, size=(50,)).unique().tolist() == [0, 1]
    assert drawn[torch.randperm](50).sort().values.tolist() == list(range(50))
    rates = torch.tensor([[1.0, 0.0, 3.0]]).expand(4000, 3)
    assert abs((drawn[torch.multinomial](rates, 1, True) == 2).float().mean() - 0.75) < 0.03
    both = drawn[torch.Tensor.multinomial](rates, 2)
    assert both.unique().tolist() == [0, 2] and abs((both[:, 0] == 2).float().mean() - 0.75) < 0.03


def test_other_random_ops_never_run_on_every_rank() -> None:
    joint = graph_of(lambda x: x[torch.randperm(2, generator=torch.Generator())])
    for replicate in (False, True):
        with pytest.raises(NoRuleError, match=r"random numbers: aten\.randperm"):
            analyse(joint, replicate_unknown=replicate)


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["random", "numpy"])
def test_numbers_drawn_in_python_are_an_error(draw: Callable[[], float]) -> None:
    random.seed(1)
    np.random.seed(1)
    first = draw()
    random.seed(1)
    np.random.seed(1)
    with pytest.raises(CaptureError, match="draws random numbers with"):
        graph_of(lambda x: x * draw())
    assert draw() == first


class Hidden(nn.Module):
    """A token in the place of what is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.last = nn.Parameter(torch.randn(8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.last(x)
        x[mask] = self.token
        y = x.clone()
        y[mask[:, 0]] = self.token.sum()
        return {"loss": (x * y).square().mean()}


def test_one_value_for_all_masked_places() -> None:
    model, inputs = Hidden(), {"x": torch.randn(4, 6, 8), "mask": torch.rand(4, 6) < 0.4}
    errors = errors_of(model, inputs)
    assert {"loss", "token", "last.weight"} <= set(errors)
    assert max(errors.values()) < RTOL
