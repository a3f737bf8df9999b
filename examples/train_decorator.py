"""The decorator form: a model class whose instances run in parallel, and an ordinary training loop.

python examples/train_decorator.py      # starts torchrun for four processes by itself
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import autoshard


@autoshard.parallelize(mesh="dp=2,tp=2")
class Classifier(nn.Module):
    """Planned at the first call, when the shapes are known."""

    def __init__(self, inputs: int = 64, hidden: int = 256, classes: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(inputs, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x [batch, inputs], y [batch] -> mean cross-entropy."""
        return nn.functional.cross_entropy(self.net(x), y)


def main() -> None:
    torch.manual_seed(0)  # every rank makes the same weights and the same batches
    model = Classifier()
    x = torch.randn(32, 64)
    y = x[:, :16].argmax(1)
    model(x, y)  # the first call shards the parameters: make the optimizer after it
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(30):
        loss = model(x, y)
        loss.backward()
        norm = autoshard.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1:2}  loss {loss.item():.4f}  gradient norm {norm.item():.3f}")
    if dist.get_rank() == 0:
        for name, p in model.named_parameters():
            print(f"{name:14} {list(p.shape)!s:12} {p.placements}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        from autoshard.runtime.launch import torchrun

        sys.exit(torchrun([__file__], 4).returncode)
