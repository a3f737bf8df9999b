"""Models with tensors without elements."""

from __future__ import annotations

import torch
from torch import nn


class PartialRotary(nn.Module):
    """Attention whose heads are turned in all of their elements: what is left of them is empty."""

    def __init__(self, heads: int = 4, turned: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.turned = heads, turned
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def turn(self, x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        moved, rest = x[..., : self.turned], x[..., self.turned :]
        low, high = moved.chunk(2, -1)
        halves = torch.cat((-high, low), -1)
        return torch.cat((moved * angle.cos() + halves * angle.sin(), rest), -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / torch.arange(1, self.turned + 1)
        y = nn.functional.scaled_dot_product_attention(self.turn(q, angle), self.turn(k, angle), v)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()
