"""The model whose graph stands in ``tests/golden/`` after every pass; its lines are named there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, WORDS = 8, 2, 12


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, words, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, words, HEADS, -1).transpose(1, 2).chunk(3, -1)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(seen.transpose(1, 2).reshape(x.shape))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def made() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and one microbatch."""
    torch.manual_seed(0)
    return Net(), {"ids": torch.randint(0, WORDS, (4, 4)), "labels": torch.randint(0, WORDS, (4, 4))}
