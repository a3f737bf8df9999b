"""Models of which parts are given to torch.compile."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def in_place(model: Net) -> nn.Module:
    for layer in model.layers:
        layer.compile()
    model.compile()
    return model


def inside(model: Net) -> nn.Module:
    for layer in model.layers:
        layer[0] = torch.compile(layer[0])  # type: ignore[index]
    return torch.compile(model)  # type: ignore[return-value]
