"""Started by torchrun, on fewer and fewer ranks: trains on, with the program of a folder for so many.

Arguments: a folder with ``program`` and checkpoints, steps. The first rank prints ``loss STEP VALUE MESH``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from calls_worker import backward, batch, build
from leaving import leave

import autoshard


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    autoshard.init_process_group()
    model = autoshard.load(folder / "program", build("Llama"))
    mesh = model._autoshard.program.full_mesh  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoints = autoshard.Checkpoints(folder / "run", model, optimizer)
    first = checkpoints.load()
    for step in range(first, first + steps):
        loss = backward(model, batch(8, 16, step))
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print("loss", step, loss, mesh, flush=True)
    checkpoints.save(first + steps)
    leave()


if __name__ == "__main__":
    main()
