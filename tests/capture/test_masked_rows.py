"""Loops over experts with rows that a mask chooses: what is the same over all rows, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import errors_of
from lockstep_check import RTOL
from torch import nn
from torch.nn import functional as F

from autoshard.capture.capture import capture
from autoshard.errors import CaptureError

EXPERTS, TOKENS, WIDTH = 4, 8, 4
Step = Callable[["Mixture", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Mixture(nn.Module):
    """Experts, of which each token takes the best two, and a step that lets them work."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU()) for _ in range(EXPERTS))
        self.last = nn.ModuleList(nn.Linear(8, WIDTH) for _ in range(EXPERTS))
        self.seen = 0

    def expert(self, number: Any, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last[number](self.experts[number](x))
        return made

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        weights, chosen = torch.topk(self.router(x).softmax(-1), 2)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        return {"loss": self.step(self, x, weights, mask).square().sum()}


def looping(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for hit in torch.greater(mask.sum((-1, -2)), 0).nonzero():
        choice, token = torch.where(mask[hit].squeeze(0))
        if token.numel() == 0:
            continue
        rows = x[None, token].reshape(-1, WIDTH)
        made = self.expert(int(hit[0]), rows) * weights[token, choice, None]
        out.index_add_(0, token, made.to(x.dtype))
    return out


def over_all(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for number in range(EXPERTS):
        choice, token = mask[number].nonzero(as_tuple=True)
        made = self.expert(number, x[token]) * weights[token, choice].unsqueeze(-1)
        out = out.index_add(0, token, made)
    return out


def comparing(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Choices are compared with the number of an expert; matrices lie in one tensor."""
    matrices = torch.stack([each[0].weight for each in self.experts])
    chosen, out = torch.topk(self.router(x).softmax(-1), 2)[1], torch.zeros_like(x)
    for number in range(EXPERTS):
        token, choice = torch.where(chosen == number)
        if token.shape[0] > 0:
            rows = F.silu(x[token] @ matrices[number].t()) @ self.last[number].weight.t()
            out.index_add_(0, token, rows * weights[token, choice, None])
    return out


def dropping(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What slots have no form for."""
    out = torch.zeros_like(x)
    for number in range(EXPERTS):
        choice, token = torch.where(mask[number])
        rows = x[token].masked_fill(torch.zeros((), dtype=torch.bool), 0.0)
        made = self.expert(number, rows) * weights[token, choice, None]
        out.index_add_(0, token, made)
    return out


def putting(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rows are put back where they were taken from."""
    chosen, out = torch.topk(self.router(x).softmax(-1), 2)[1], torch.zeros_like(x)
    for number in range(EXPERTS):
        token, choice = torch.where(chosen == number)
        out[token] += weights[token, choice, None] * self.expert(number, x[token])
    return out


def replacing(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Every token has one expert, which says all of its row."""
    scores = self.router(x).softmax(-1)
    best, out = scores.argmax(-1), torch.empty_like(x)
    for number in range(EXPERTS):
        token = (best == number).nonzero(as_tuple=True)[0]
        out[token] = self.expert(number, x[token]) * scores[token, number, None]
    return out


def unlike(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """One expert does something else; what others add is read in between."""
    out = torch.zeros_like(x)
    for number in range(EXPERTS):
        choice, token = torch.where(mask[number])
        rows = x[token] if number == 1 else self.expert(number, x[token])
        out.index_add_(0, token, rows * weights[token, choice, None])
        if number == 2:
            out = out * 2 + torch.zeros_like(x)
    return out


def flagged(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rows of flags, in the shape of tokens by sequence; scores by expert."""
    tokens = x.view(2, TOKENS // 2, WIDTH)
    scores = self.router(tokens).softmax(-1)
    chosen, out = scores.topk(2)[1], torch.zeros_like(tokens)
    for number in range(EXPERTS):
        flags = (chosen == number).any(dim=-1)
        if not flags.any():
            continue
        rows = self.expert(number, x[flags.view(-1)])
        out[flags] += (rows * scores.view(-1, EXPERTS)[flags.view(-1), number].unsqueeze(1)).squeeze(1)
    return out.view(TOKENS, WIDTH)


def asking(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Only if there are rows; a view of the sum is taken before anything is added."""
    out = torch.zeros_like(x)
    turned, chosen = out.T, torch.topk(self.router(x).softmax(-1), 2)[1]
    for number in range(EXPERTS):
        flags = (chosen == number).any(-1)
        if flags.any():
            rows = self.expert(number, x[flags])
            out[flags] += rows
    return out + turned.T


def averaging(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for number in range(EXPERTS):
        choice, token = torch.where(mask[number])
        rows = x[token] * weights[token, choice, None]
        out.index_add_(0, token, rows - rows.mean(0))
    return out


def holding(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    choice, token = torch.where(mask[0])
    return x[token] * weights[token, choice, None]


@pytest.mark.parametrize(
    ("step", "products", "together"),
    [
        (looping, 2, True),
        (comparing, 2, True),
        (putting, 2, True),
        (replacing, 2, True),
        (over_all, 2, False),
        (dropping, 0, False),
    ],
)
def test_products_are_those_of_the_tokens_that_chose_an_expert(
    step: Step, products: int, together: bool
) -> None:
    """All experts have two rows for each token: of a loop that adds to zeros they are products of one op.
    Otherwise those of one expert hold a quarter of that."""
    graph = capture(Mixture(step), (torch.randn(TOKENS, WIDTH),)).graph
    rows = [n.types[0] for n in graph.nodes if n.op == "autoshard.expert_mm.default" and not n.backward]
    filled = [t.filled for t in rows if t is not None]
    if step is replacing:
        assert filled == [(1, EXPERTS)] * products
        return
    assert filled == [(2, EXPERTS)] * products * (1 if together else EXPERTS)
    assert sum(t.existing(t.shape[0]) for t in rows if t is not None) == products * 2 * TOKENS
    over_all_tokens = [n for n in graph.nodes if n.op in ("aten.mm.default", "aten.addmm.default")]
    assert len([n for n in over_all_tokens if not n.backward]) == (1 if products else 1 + 2 * EXPERTS) + (
        step in (comparing, putting)
    )


STEPS = [
    looping,
    over_all,
    comparing,
    dropping,
    averaging,
    holding,
    putting,
    replacing,
    unlike,
    flagged,
    asking,
]


@pytest.mark.parametrize("step", STEPS)
def test_equal_to_eager(step: Step) -> None:
    torch.manual_seed(0)
    model, x = Mixture(step), torch.randn(TOKENS, WIDTH)
    with torch.no_grad():  # one expert that nobody chooses
        model.router.bias[2] = -9.0
    errors = errors_of(model, {"x": x})
    assert max(errors.values()) < RTOL


def using(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What changes beside rows does so for experts with rows alone."""
    out, used = torch.zeros_like(x), torch.zeros(EXPERTS)
    for number in range(EXPERTS):
        choice, token = torch.where(mask[number])
        if token.numel() > 0:
            used[number] += 1
            out.index_add_(0, token, self.expert(number, x[token]) * weights[token, choice, None])
    return out * used.sum()


def counting(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out, turns = torch.zeros_like(x), 0
    for hit in (mask.sum((-1, -2)) > 0).nonzero():
        choice, token = torch.where(mask[hit].squeeze(0))
        out.index_add_(0, token, self.expert(int(hit), x[token]) * weights[token, choice, None])
        turns += 1
    return out * turns


def numbering(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for number, hit in enumerate((mask.sum((-1, -2)) > 0).nonzero()):
        choice, token = torch.where(mask[hit].squeeze(0))
        out.index_add_(0, token, self.expert(number, x[token]) * weights[token, choice, None])
    return out


def stopping(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for hit in (mask.sum((-1, -2)) > 0).nonzero():
        choice, token = torch.where(mask[hit].squeeze(0))
        out.index_add_(0, token, self.expert(int(hit), x[token]) * weights[token, choice, None])
        break
    return out


def collecting(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    found = []
    for hit in (mask.sum((-1, -2)) > 0).nonzero():
        found.append(self.last[int(hit)].weight.sum())
    return torch.stack(found)


def adding(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for hit in (mask.sum((-1, -2)) > 0).nonzero():
        out += self.last[int(hit)].bias
    return out


def sizing(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for number in range(EXPERTS):
        _, token = torch.where(mask[number])
        out.index_add_(0, token, x[token] / token.shape[0])
    return out


def sorting(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for number in range(EXPERTS):
        _, token = torch.where(mask[number])
        out.index_add_(0, token, x[token] - x[token].cumsum(0))
    return out


def noting(self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for hit in (mask.sum((-1, -2)) > 0).nonzero():
        self.seen = int(hit)
        choice, token = torch.where(mask[hit].squeeze(0))
        out.index_add_(0, token, self.expert(int(hit), x[token]) * weights[token, choice, None])
    return out * self.seen


class OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] / grads[0].shape[0]


def differentiating(
    self: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros_like(x)
    for number in range(EXPERTS):
        choice, token = torch.where(mask[number])
        out.index_add_(0, token, OwnGradient.apply(x[token]) * weights[token, choice, None])
    return out


@pytest.mark.parametrize(
    "step",
    [
        counting,
        using,
        numbering,
        stopping,
        collecting,
        adding,
        sizing,
        sorting,
        noting,
        differentiating,
    ],
)
def test_what_depends_on_how_many_rows_or_turns_there_are_is_refused(step: Step) -> None:
    with pytest.raises(CaptureError, match=r"depends on values|_Count"):
        capture(Mixture(step), (torch.randn(TOKENS, WIDTH),))
