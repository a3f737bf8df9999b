"""Means over the batch as sums: right, and the batch stays split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import errors_of, program_of
from lockstep_check import RTOL
from plain_nets import vgg
from torch import nn
from torch.nn import functional as F

from autoshard.capture.capture import capture
from autoshard.ir.placement import Shard
from autoshard.passes.pipeline import simplify
from autoshard.program.program import Program

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
BATCH = 14


class Scored(nn.Module):
    """A network and a loss of what it gives."""

    def __init__(self, net: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.net, self.score = net, loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.score(self.net(x), y)}


def _linear(loss: Callable[..., torch.Tensor], last: nn.Module | None = None) -> nn.Module:
    return Scored(nn.Sequential(nn.Linear(8, 10), last or nn.Identity()), loss)


def _weighted(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.5, 2, 10, device=rows.device)
    return F.nll_loss(rows.log_softmax(-1), labels, weight=weight, ignore_index=3)


def _scores(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(x.log_softmax(-1), y)


def _norms(order: float, dim: int | None) -> Callable[..., torch.Tensor]:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(x - y, order, dim).mean()

    return loss


REAL: dict[str, Callable[..., torch.Tensor]] = {
    "mse": F.mse_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": lambda x, y: F.huber_loss(x, y, delta=0.7),
    "bce_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "bce": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "mse sum": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "norm 2 of all": _norms(2, None),
    "norm 2 of rows": _norms(2, -1),
    "norm 2 over the batch": _norms(2, 0),
    "norm 1": _norms(1, 0),
    "norm 3": _norms(3, 0),
    "norm inf": _norms(torch.inf, 0),
}
LABELLED: dict[str, Callable[..., torch.Tensor]] = {"nll": _scores, "nll, weights, ignored": _weighted}


def _case(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(BATCH, 8)
    if name in LABELLED:
        return _linear(LABELLED[name]), {"x": x, "y": torch.randint(0, 10, (BATCH,))}
    return _linear(REAL[name]), {"x": x, "y": torch.randn(BATCH, 10)}


@pytest.mark.parametrize("mesh", ["dp=4", "dp=5", "dp=2,tp=2"])
@pytest.mark.parametrize("name", [*REAL, *LABELLED])
def test_losses_and_norms(name: str, mesh: str) -> None:
    model, inputs = _case(name)
    errors = errors_of(model, inputs, program_of(model, inputs, mesh))
    assert max(errors.values()) < RTOL, errors


def _ops(model: nn.Module, inputs: dict[str, Any]) -> set[str]:
    folded = simplify(capture(model, (), inputs))
    return {n.op for g in folded.segments.values() for n in g.nodes}


@pytest.mark.parametrize("name", [*REAL, *LABELLED])
def test_the_batch_stays_split(name: str) -> None:
    """Rows are never gathered: what is whole on every rank is smaller than the batch."""
    model, inputs = _case(name)
    program = program_of(model, inputs, "dp=4")
    assert not _gathered(program, BATCH)


def _gathered(program: Program, batch: int) -> list[str]:
    """Activations that begin with the batch and are not sharded along it."""
    found = []
    for segment in program.lowered.segments.values():
        types = segment.graph.types()
        for node in segment.graph.nodes:
            for out in node.outs:
                type_, layout = types.get(out), segment.layouts.get(out)
                if type_ is None or layout is None or len(type_.shape) < 2 or type_.shape[0] != batch:
                    continue
                if not isinstance(layout[0], Shard):
                    found.append(f"{node.op} {out} {layout[0]}")
    return found


# -- batch norm ----------------------------------------------------------------------------------------


def _norm_net(norm: nn.Module) -> nn.Module:
    return Scored(nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.Tanh(), nn.Conv2d(6, 1, 3)), F.mse_loss)


def _pictures(batch: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(batch, 3, 8, 8) + 3, "y": torch.randn(batch, 1, 4, 4)}


NORMS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.BatchNorm2d(6),
    "momentum": lambda: nn.BatchNorm2d(6, momentum=0.3, eps=1e-3),
    "no weight": lambda: nn.BatchNorm2d(6, affine=False),
    "no statistics": lambda: nn.BatchNorm2d(6, track_running_stats=False),
    "instance": lambda: nn.InstanceNorm2d(6, affine=True),
}


@pytest.mark.parametrize("mesh", ["dp=4", "dp=5", "tp=3", "dp=2,tp=2"])
@pytest.mark.parametrize("kind", list(NORMS))
def test_batch_norm(kind: str, mesh: str) -> None:
    torch.manual_seed(0)
    model, inputs = _norm_net(NORMS[kind]()), _pictures(10)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) / 4)
    errors = errors_of(model, inputs, program_of(model, inputs, mesh))
    assert max(errors.values()) < RTOL, errors
    if kind in ("plain", "momentum"):
        assert {"net.1.running_mean", "net.1.running_var", "net.1.num_batches_tracked"} <= set(errors)


def test_batch_norm_keeps_the_batch_split() -> None:
    torch.manual_seed(0)
    model = Scored(vgg().get_submodule("layers"), F.cross_entropy)
    inputs = {"x": torch.randn(BATCH, 3, 8, 8), "y": torch.randint(0, 6, (BATCH,))}
    assert not _gathered(program_of(model, inputs, "dp=4"), BATCH)


def test_batch_norm_of_large_means() -> None:
    """The variance of numbers around 1000 keeps its digits."""
    torch.manual_seed(0)
    model, inputs = Scored(nn.BatchNorm2d(3), lambda x, y: F.mse_loss(x, y)), _pictures(8)
    inputs = {"x": inputs["x"] + 1000, "y": torch.randn(8, 3, 8, 8)}
    errors = errors_of(model, inputs, program_of(model, inputs, "dp=4"))
    assert max(errors.values()) < 10 * RTOL, errors


def test_batch_norm_outside_training_is_kept() -> None:
    model, inputs = _norm_net(nn.BatchNorm2d(6)).eval(), _pictures(8)
    assert "aten.native_batch_norm_backward.default" in _ops(model, inputs)
    assert max(errors_of(model, inputs).values()) < RTOL


# -- strides -------------------------------------------------------------------------------------------


def test_a_pool_to_one_pixel_is_a_mean() -> None:
    """torch writes the gradient of this pooling with strides; they say no more than a reshape."""
    torch.manual_seed(0)
    pooled = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten())
    model = Scored(pooled, F.mse_loss)
    model.net = nn.Sequential(nn.Linear(9, 9), pooled)
    inputs = {"x": torch.randn(8, 5, 9), "y": torch.randn(8, 5)}
    assert not any("as_strided" in op for op in _ops(model, inputs))
    assert max(errors_of(model, inputs).values()) < RTOL


def test_strides_of_windows_are_unfolds_and_others_have_no_rule() -> None:
    class Strided(nn.Module):
        def __init__(self, *args: tuple[int, ...]) -> None:
            super().__init__()
            self.args = args

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).as_strided(*self.args).square().mean()

    inputs = {"x": torch.randn(9, requires_grad=True)}
    assert "aten.unfold.default" in _ops(Strided((6, 4), (1, 1)), inputs)
    assert "aten.as_strided.default" in _ops(Strided((3,), (4,)), inputs)
