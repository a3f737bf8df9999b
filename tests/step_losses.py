"""A small model with losses that are reduced over the batch in every way, and batches with unlike labels."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, SEQ = 50, 8
Loss = Callable[["Net", torch.Tensor, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Token by token, so that it is small; weights: of classes."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 4096), nn.GELU(), nn.Linear(4096, 16)) for _ in range(4)
        )
        self.head = nn.Linear(16, VOCAB)
        self.loss = LOSSES[loss]
        self.register_buffer("weights", torch.rand(VOCAB) + 0.5)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.loss(self, self.head(x), labels)


class Counted(Net):
    """With the number of labels of the whole batch, as transformers' trainer gives it."""

    def forward(  # type: ignore[override]
        self, ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int
    ) -> torch.Tensor:
        return super().forward(ids, labels) / num_items_in_batch


def _ce(logits: torch.Tensor, labels: torch.Tensor, **how: object) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **how)  # type: ignore[arg-type]


def _own_weights(net: Net, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weights = (labels.flatten() % 7).float()
    each = _ce(logits, labels.clamp(min=0), reduction="none")
    return (each * weights).sum() / weights.sum()


def _of_samples(net: Net, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)
    return (each / (labels != -100).sum(1).clamp(min=1)).mean()


LOSSES: dict[str, Loss] = {
    "labels": lambda net, x, y: _ce(x, y),
    "sum": lambda net, x, y: _ce(x, y, reduction="sum"),
    "class weights": lambda net, x, y: _ce(x, y, weight=net.weights),
    "class weights apart": lambda net, x, y: F.cross_entropy(x.transpose(1, 2), y, weight=net.weights),
    "smoothed": lambda net, x, y: _ce(x, y, label_smoothing=0.1),
    "all elements": lambda net, x, y: F.mse_loss(x, F.one_hot(y.clamp(min=0), VOCAB).float()),
    "mean": lambda net, x, y: x.square().mean(),
    "size in Python": lambda net, x, y: x.square().sum() / x.shape[0],
    "numel in Python": lambda net, x, y: _ce(x, y, reduction="sum") / y.numel(),
    "at least one": lambda net, x, y: _ce(x, y, reduction="sum") / (y != -100).sum().clamp(min=1),
    "all but": lambda net, x, y: _ce(x, y, reduction="sum") / (y.numel() - (y == -100).sum()),
    "size as a constant": lambda net, x, y: x.square().sum() / torch.tensor(float(len(x))),
    "size of integers": lambda net, x, y: x.square().sum() / y.new_tensor(len(x)),
    "size in full": lambda net, x, y: x.square().sum() / torch.full((), len(x)),
    "balanced": lambda net, x, y: F.binary_cross_entropy_with_logits(
        x[..., 0],
        (y > 20).float(),
        weight=torch.where(y > 20, (y.numel() - (y > 20).sum()) / y.numel(), (y > 20).sum() / y.numel()),
    ),
    "size of ones": lambda net, x, y: x.square().sum() / torch.ones_like(x).sum(),
    "own weights": _own_weights,
    "samples": _of_samples,
    "several": lambda net, x, y: (
        _ce(x, y) + 0.1 * x.square().mean() + 0.01 * x.sum() + 0.3 * net.head.weight.square().sum()
    ),
}
#: in which samples, or the size of the batch, are used in ways that a microbatch does not follow
TOLD: dict[str, Loss] = {
    "weights by number": lambda net, x, y: (x.mean((1, 2)) * torch.arange(len(x))).mean(),
    "weights in a line": lambda net, x, y: (x.mean((1, 2)) * torch.linspace(1, 0, len(x))).mean(),
    "labels by number": lambda net, x, y: F.cross_entropy(x.mean(1), torch.arange(len(x)) % 3),
    "labels in a list": lambda net, x, y: F.cross_entropy(x.mean(1), torch.tensor([*range(len(x))])),
    "start of a table": lambda net, x, y: (x.mean((1, 2)) * net.weights[: len(x)]).mean(),
    "looked up": lambda net, x, y: (x.mean((1, 2)) * net.weights[torch.arange(len(x))]).mean(),
    "backwards": lambda net, x, y: (x[torch.arange(len(x) - 1, -1, -1)] * x).mean(),
    "beta": lambda net, x, y: torch.baddbmm(
        x, x, net.head.weight @ net.head.weight.t() + x.mT @ x, beta=1 / len(x)
    ).mean(),
    "alpha": lambda net, x, y: x.mean().add(net.head.weight.square().sum(), alpha=1 / len(x)),
    "compared": lambda net, x, y: torch.where(x > 1 / len(x), x, x * 0.1).mean(),
    "halves": lambda net, x, y: F.softplus(x[: len(x) // 2] - x[len(x) // 2 :]).mean(),
    "largest half": lambda net, x, y: x.mean((1, 2)).topk(len(x) // 2)[0].mean(),
    "less the size": lambda net, x, y: F.softplus(x - len(x)).mean(),
}
LOSSES |= TOLD
#: what is no sum over the batch
BALANCE = "balance"
LOSSES[BALANCE] = lambda net, x, y: _ce(x, y) + x.mean((0, 1)).square().sum()


def batch(count: int = 8) -> dict[str, torch.Tensor]:
    """The first quarter has no label at all, the next ones have some."""
    torch.manual_seed(3)
    ids = torch.randint(0, VOCAB, (count, SEQ))
    labels = ids.clone()
    labels[: count // 4] = -100
    for row in range(count // 4, count):
        labels[row, : row % 7] = -100
    return {"ids": ids, "labels": labels}
