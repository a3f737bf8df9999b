"""Compile once, load the program on every rank, stop and go on with torch.distributed.checkpoint.

    python examples/load_and_checkpoint.py      # compiles, then starts torchrun for four processes

Planning happens in the parent alone. The ranks load the program, train, save model and optimizer, restore
them into fresh ones, and go on exactly where they were.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autoshard


class Regression(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x, y [batch, width] -> mean squared error."""
        return nn.functional.mse_loss(self.down(torch.relu(self.up(x))), y)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, 1)


def start(folder: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = autoshard.load(folder, Regression())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        loss = model(*batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(folder: str, checkpoint: str) -> None:
    model, optimizer = start(folder, seed=0)
    steps(model, optimizer, range(5))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=checkpoint)
    wanted = steps(model, optimizer, range(5, 8))

    model, optimizer = start(folder, seed=1)  # other weights, to be replaced
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    found = steps(model, optimizer, range(5, 8))
    if dist.get_rank() == 0:
        print("went on:  ", " ".join(f"{x:.6f}" for x in wanted))
        print("restored: ", " ".join(f"{x:.6f}" for x in found))
    dist.destroy_process_group()
    if wanted != found:
        sys.exit(1)


def parent() -> int:
    from autoshard.runtime.launch import torchrun

    with tempfile.TemporaryDirectory() as scratch:
        model = Regression()
        planned = autoshard.plan(model, "fsdp=2,tp=2", example_inputs=batch(0))
        autoshard.compile(model, planned).save(f"{scratch}/program")
        return torchrun([__file__, f"{scratch}/program", f"{scratch}/checkpoint"], 4).returncode


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(sys.argv[1], sys.argv[2])
    else:
        sys.exit(parent())
