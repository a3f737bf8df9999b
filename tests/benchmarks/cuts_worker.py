"""Started by torchrun: steps of one pipeline with two cuts, taking turns.

Arguments: the folder of the programs, and where to write the results as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autoshard
from benchmarks.cuts_measured import (
    MICROBATCHES,
    PIECE,
    SEQ,
    SIDES,
    VOCAB,
    check_equal,
    cut_llama,
)
from benchmarks.models import bench_batch
from benchmarks.ranks import worst_of

WARM_UP, ROUNDS = 1, 9


def timed(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, float, float]:
    """(seconds of the slowest rank, processor seconds of the busiest one, loss) of a step."""
    for parameter in model.parameters():
        parameter.grad = None
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    loss = model.train_step(batch)
    taken, used = time.perf_counter() - start, time.process_time() - busy
    return worst_of(taken), worst_of(used), float(loss)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    batch = bench_batch(PIECE * MICROBATCHES, SEQ, VOCAB)
    models = [autoshard.load(folder / name, cut_llama()) for name in SIDES]
    steps: list[list[tuple[float, float, float]]] = []
    for turn in range(WARM_UP + ROUNDS):
        # each side is the first of its pair in every other round
        order = (0, 1) if turn % 2 else (1, 0)
        found = {k: timed(models[k], batch) for k in order}
        steps.append([found[0], found[1]])
        error = worst_of(abs(found[0][2] - found[1][2]) / abs(found[1][2]))
        check_equal(error)
    kept = steps[WARM_UP:]
    if dist.get_rank() == 0:
        medians = {
            "planned_s": statistics.median(a[0] for a, _ in kept),
            "equal_s": statistics.median(b[0] for _, b in kept),
            "ratio": statistics.median(b[0] / a[0] for a, b in kept),
            "planned_busy_s": statistics.median(a[1] for a, _ in kept),
            "equal_busy_s": statistics.median(b[1] for _, b in kept),
            "busy_ratio": statistics.median(b[1] / a[1] for a, b in kept),
            "loss_error": max(abs(a[2] - b[2]) / abs(b[2]) for a, b in steps),
        }
        out.write_text(json.dumps(medians))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
