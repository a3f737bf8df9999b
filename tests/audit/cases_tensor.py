"""Tensor parallelism by hand, in Megatron's style: autograd functions with collectives inside."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import Case
from torch import nn

HIDDEN, WORDS = 8, 16
TOKENS = torch.randint(WORDS, (4, 6), generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(WORDS, (4, 6), generator=torch.Generator().manual_seed(2))


class Block(nn.Module):
    """A layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)


class Net(nn.Module):
    """Two layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer.down(F.gelu(layer.up(layer.norm(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def one_device(model: Net) -> None:
    model(TOKENS, LABELS).backward()


class ToRanks(torch.autograd.Function):
    """Forward as it is, backward a sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class FromRanks(torch.autograd.Function):
    """Forward a sum over the ranks, backward as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: str) -> torch.Tensor:
        ctx.fault = fault
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.fault == "sum in both directions":
            gradient = gradient.clone()
            dist.all_reduce(gradient)  # fault: sum in both directions
        return gradient, None


def rank_chunk(x: torch.Tensor, group: dist.ProcessGroup | None = None, dim: int = 0) -> torch.Tensor:
    """This rank's part."""
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def part(weight: torch.Tensor, dim: int) -> nn.Parameter:
    """This rank's part of a weight."""
    return nn.Parameter(rank_chunk(weight.detach(), dim=dim).clone())


def layers(model: Net, fault: str) -> None:
    for layer in model.layers:
        layer.up.weight, layer.up.bias = part(layer.up.weight, 0), part(layer.up.bias, 0)
        layer.down.weight = part(layer.down.weight, 1)
    x = model.words(TOKENS)
    for layer in model.layers:
        normed = layer.norm(x)
        if fault != "no sum of input gradients":
            normed = ToRanks.apply(normed)
        partial = layer.down(F.gelu(layer.up(normed)))  # fault: no sum of input gradients
        x = x + FromRanks.apply(partial, fault)
    F.cross_entropy(model.head(x).flatten(0, 1), LABELS.flatten()).backward()


CASES = [
    Case("sum in both directions", "", "tp=2", Net, one_device, layers, word="adds up over tp"),
    Case("no sum of input gradients", "", "tp=2", Net, one_device, layers, word="not reduced over tp"),
]
