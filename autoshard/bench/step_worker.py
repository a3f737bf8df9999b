"""Started by torchrun: step times of one mesh by autoshard and by hand, in alternating rounds.

Arguments: where to write the results as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.bench.by_hand import by_ddp, by_fsdp2, by_tensor_parallel
from autoshard.bench.models import bench_batch, bench_llama

ROUNDS, STEPS = 9, 4


def stepper(model: nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], float]:
    """One AdamW training step as a function that returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def timed(step: Callable[[], float]) -> float:
    """Seconds of a step, all ranks starting together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - start) / STEPS


def local_batch(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's part of the batch, as a DistributedSampler would give it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {k: v.chunk(world)[rank] for k, v in batch.items()}


def pair(name: str) -> tuple[Callable[[], float], Callable[[], float]]:
    """(ours, by hand) training the same model on the same data."""
    batch = bench_batch()
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=(name,))
    ours = autoshard.parallelize(bench_llama(), mesh, example_inputs=batch, cluster="cpu-gloo")
    hand = {"fsdp": by_fsdp2, "tp": by_tensor_parallel, "dp": by_ddp}[name](bench_llama(), mesh)
    return stepper(ours, batch), stepper(hand, batch if name == "tp" else local_batch(batch))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for name in ("fsdp", "tp", "dp"):
        ours, hand = pair(name)
        losses = [(ours(), hand()) for _ in range(2)]
        times = [(timed(ours), timed(hand)) for _ in range(ROUNDS)]
        rows.append(
            {
                "mesh": f"{name}={dist.get_world_size()}",
                "ours_s": statistics.median(a for a, _ in times),
                "by_hand_s": statistics.median(b for _, b in times),
                "ratio": statistics.median(a / b for a, b in times),
                "first_losses": losses[0],
            }
        )
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
