"""Started by torchrun on two processes with AUTOSHARD_CHECK=2: what each rank is told, into a folder."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard

#: seconds after which a collective gives up, and that a rank stays away
PATIENCE, AWAY = 6, 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 32), nn.Linear(32, 8), nn.LayerNorm(8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x + self.down(torch.relu(self.up(x * self.scale))))
        return h.pow(3).mean()


def made(mesh: str, batch: int, **options: Any) -> Any:
    torch.manual_seed(0)
    x = torch.randn(batch, 8)
    return autoshard.parallelize(Net(), mesh, example_inputs=x, **options), x


def flip(x: torch.Tensor, bit: int) -> None:
    """Turn one bit of the memory of a tensor over."""
    local = x.to_local() if isinstance(x, DTensor) else x
    local.detach().view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8


def told(run: Any) -> str:
    """The text of the error that something raises, "" if it raises none."""
    try:
        run()
    except autoshard.errors.AutoshardError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    rank = dist.get_rank()
    found: dict[str, str] = {}

    model, x = made("tp=2", 4)
    found["clean"] = told(lambda: model(x).backward()) + told(lambda: model(x).backward())
    held = {"norm.weight": model.norm.weight, "scale": model.scale, "up.weight": model.up.weight}
    for name, tensor in held.items():
        if rank == 1:
            flip(tensor, 13)
        found[name] = told(lambda: model(x))
        if rank == 1:
            flip(tensor, 13)
    # each rank's own batch where the plan has one batch for all: the weights are equal, the losses are not
    model._autoshard.guard.steps = 2
    found["loss"] = told(lambda: model(x + rank))
    model._autoshard.guard.steps = 3
    found["clean again"] = told(lambda: model(x).backward()) + told(lambda: model(x).backward())

    piped, batch = made("pp=2,dp=1", 8, schedule="1f1b", microbatches=2)
    found["pipeline"] = told(lambda: piped.train_step(batch))

    # a step without a check, so that the first to be missed is a collective of the program
    assert model._autoshard.guard.steps % 2 == 1
    if rank == 1:
        time.sleep(AWAY)
    found["late rank"] = told(lambda: model(x))
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # groups whose collectives failed cannot be ended in order


if __name__ == "__main__":
    main()
