"""Started by torchrun, perhaps several times: trains from the newest checkpoint on.

Arguments: a folder, a mesh, steps, ``wait`` or ``go on`` while a checkpoint is written. The first rank adds a
line to ``losses`` for every step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from calls_worker import backward, batch, build
from leaving import leave

import autoshard


def main() -> None:
    folder, mesh, steps, waiting = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "wait"
    autoshard.init_process_group()
    (folder / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    model = autoshard.parallelize(build("Llama"), mesh, example_inputs=batch(8, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
    checkpoints = autoshard.Checkpoints(folder / "run", model, optimizer, others={"scheduler": scheduler})
    for step in range(checkpoints.load(), steps):
        # the order of the data follows the random numbers
        seed = int(torch.randint(1000, ()))
        loss = backward(model, batch(8, 16, seed))
        autoshard.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if dist.get_rank() == 0:
            with (folder / "losses").open("a") as file:
                file.write(json.dumps([step, loss]) + "\n")
        if checkpoints.should_stop():
            checkpoints.save(step + 1)
            break
        if step % 2 == 1:
            checkpoints.save(step + 1, wait=waiting)
        time.sleep(0.05)
    checkpoints.wait()
    leave()


if __name__ == "__main__":
    main()
