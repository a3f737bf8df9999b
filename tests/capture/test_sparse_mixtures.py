"""Mixtures that are written as dense products of rows that are mostly zeros."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from architectures import errors_of
from lockstep_check import RTOL
from torch import nn
from torch.nn import functional as F

from autoshard.capture.capture import capture

EXPERTS, TOKENS, WIDTH, HIDDEN = 4, 8, 6, 10
Mix = Callable[["Mixture", torch.Tensor], torch.Tensor]


class Mixture(nn.Module):
    """A router with one choice for each token, and matrices of all experts. mix: what is done to the rows."""

    def __init__(self, mix: Mix, rest: float = float("-inf"), by_expert: bool = True) -> None:
        super().__init__()
        self.mix, self.rest, self.by_expert = mix, rest, by_expert
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.bias = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.router(x)
        top, chosen = torch.topk(logits, 1, dim=1)
        scores = torch.sigmoid(torch.full_like(logits, self.rest).scatter_(1, chosen, top).float())
        scores = scores.transpose(0, 1) if self.by_expert else scores
        rows = x.repeat(EXPERTS, 1) * scores.reshape(-1, 1)
        return {"loss": self.mix(self, rows.view(EXPERTS, -1, WIDTH)).square().sum()}


def gated(self: Mixture, rows: torch.Tensor) -> torch.Tensor:
    gate, up = torch.bmm(rows, self.up).chunk(2, dim=-1)
    return torch.bmm(up * F.silu(gate), self.down).view(-1, WIDTH).reshape(EXPERTS, -1, WIDTH).sum(dim=0)


def plain(self: Mixture, rows: torch.Tensor) -> torch.Tensor:
    up, more = (rows @ self.up).split(HIDDEN, dim=-1)
    return ((F.gelu(up * 2.0) + more) @ self.down).sum(0)


def half(self: Mixture, rows: torch.Tensor) -> torch.Tensor:
    """The gradient of the columns that are left out is zeros of as many rows as a dense product has."""
    return ((rows @ self.up).chunk(2, -1)[0].tanh() @ self.down).sum(0)


def shifted(self: Mixture, rows: torch.Tensor) -> torch.Tensor:
    """Rows of zeros do not stay so."""
    return ((rows @ self.up)[..., :HIDDEN] + self.bias) @ self.down


def not_zero(self: Mixture, rows: torch.Tensor) -> torch.Tensor:
    return ((rows @ self.up).chunk(2, -1)[0].sigmoid() @ self.down).sum(0)


def not_summed(self: Mixture, rows: torch.Tensor) -> torch.Tensor:
    return torch.bmm(rows, self.up)


class Changed(Mixture):
    """What is changed in place: the tokens after they were repeated, or the constant before the scores."""

    def __init__(self, what: str) -> None:
        super().__init__(gated)
        self.what = what

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits, x = self.router(x), x * 1.0
        top, chosen = torch.topk(logits, 1, dim=1)
        base = torch.full_like(logits, float("-inf"))
        if self.what == "base":
            base[0].fill_(0.5)
        scores = torch.sigmoid(base.scatter_(1, chosen, top).float())
        columns = scores.t().reshape(-1, 1)
        rows = x.repeat(EXPERTS, 1)
        if self.what == "tokens":
            x[1:].mul_(2.0)
        return {"loss": gated(self, (rows * columns).view(EXPERTS, -1, WIDTH)).square().sum() + x.sum()}


@pytest.mark.parametrize("what", ["tokens", "base"])
def test_what_was_changed_in_place_is_not_taken_for_what_it_was(what: str) -> None:
    torch.manual_seed(0)
    model = Changed(what)
    assert "aten.bmm.default" in ops_of(model)
    assert max(errors_of(model, {"x": torch.randn(TOKENS, WIDTH)}).values()) < RTOL


def ops_of(model: nn.Module) -> list[str]:
    graph = capture(model, (torch.randn(TOKENS, WIDTH),)).graph
    return [n.op for n in graph.nodes if not n.backward]


@pytest.mark.parametrize("mix", [gated, plain])
def test_products_are_those_of_the_experts_that_were_chosen(mix: Mix) -> None:
    torch.manual_seed(0)
    model = Mixture(mix)
    ops = ops_of(model)
    assert ops.count("autoshard.expert_mm.default") == 2
    assert not any(op.startswith(("aten.bmm", "aten.repeat", "autoshard.stands_for")) for op in ops)
    assert max(errors_of(model, {"x": torch.randn(TOKENS, WIDTH)}).values()) < RTOL


@pytest.mark.parametrize(
    ("mix", "rest", "by_expert"),
    [
        (shifted, float("-inf"), True),
        (not_zero, float("-inf"), True),
        (not_summed, float("-inf"), True),
        (half, float("-inf"), True),
        (gated, -9.0, True),
        (gated, float("-inf"), False),
    ],
)
def test_what_is_not_zero_is_computed_as_it_is_written(mix: Mix, rest: float, by_expert: bool) -> None:
    """Functions that make other numbers of zeros; rows that leave the experts; scores that are small but
    there, or belong to other rows."""
    torch.manual_seed(0)
    model = Mixture(mix, rest, by_expert)
    ops = ops_of(model)
    assert "aten.bmm.default" in ops
    assert not any(op.startswith("autoshard.") and "expert" in op for op in ops)
    assert max(errors_of(model, {"x": torch.randn(TOKENS, WIDTH)}).values()) < RTOL
