"""Started by `ranks`: checkpoints of one mesh go on on another.

``pairs_worker.py FOLDER MODEL MESHES``: a model of each mesh trains, saves in the folder and trains on; a
model of each mesh loads what is there, from any number of ranks, and trains on. A line for each pair says how
far its losses are from those of the run that saved.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from calls_worker import backward, batch, build
from leaving import leave
from torch import nn

import autoshard


def with_checkpoints(name: str, mesh: str, folder: Path) -> tuple[nn.Module, Any, Any]:
    model = autoshard.parallelize(build(name), mesh, example_inputs=batch(8, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, autoshard.Checkpoints(folder, model, optimizer)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        losses.append(backward(model, batch(8, 16, int(torch.randint(1000, ())))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main() -> None:
    folder, name, meshes = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(";")
    autoshard.init_process_group()
    ranks = dist.get_world_size()
    for mesh in meshes:
        torch.manual_seed(0)
        model, optimizer, checkpoints = with_checkpoints(name, mesh, folder / f"{ranks} {mesh}")
        steps(model, optimizer, 2)
        checkpoints.save(2, wait=mesh != meshes[0])
        wanted = steps(model, optimizer, 2)
        checkpoints.wait()
        if dist.get_rank() == 0:
            (folder / f"{ranks} {mesh}.json").write_text(json.dumps(wanted))
    dist.barrier()
    for saved in sorted(folder.glob("*.json")):
        wanted = json.loads(saved.read_text())
        for mesh in meshes:
            torch.manual_seed(1)
            model, optimizer, checkpoints = with_checkpoints(name, mesh, saved.with_suffix(""))
            assert checkpoints.load() == 2
            losses = steps(model, optimizer, 2)
            worst = max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))
            if dist.get_rank() == 0:
                said = "ok" if worst < 1e-6 else "BAD"
                print(f"\n{said} {name} {saved.stem} -> {ranks} {mesh}: {worst:.1e}", flush=True)
    leave()


if __name__ == "__main__":
    main()
