"""Started by torchrun: steps of pipelines by autoshard and by torch.distributed.pipelining, taking turns.

Arguments: the folder of the programs, and where to write the results as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import autoshard
from benchmarks.models import bench_batch
from benchmarks.pipeline_by_hand import torch_pipeline
from benchmarks.pipelines import (
    MICROBATCHES,
    PIECE,
    SCHEDULES,
    SEQ,
    VOCAB,
    PipelineRow,
    check_equal,
    pipeline_llama,
)
from benchmarks.ranks import worst_of

WARM_UP, ROUNDS = 1, 9


def timed(step: Callable[[], object], parameters: Iterable[torch.Tensor]) -> float:
    """Seconds of a step from empty gradients, of the slowest rank."""
    for parameter in parameters:
        parameter.grad = None
    dist.barrier()
    start = time.perf_counter()
    step()
    return worst_of(time.perf_counter() - start)


def loss_difference(ours: torch.Tensor, theirs: list[torch.Tensor]) -> float:
    """Relative, on ranks that make the loss; 0 on others."""
    if not theirs:
        return 0.0
    mean = float(torch.stack([x.detach() for x in theirs]).mean())
    return abs(float(ours) - mean) / abs(mean)


def grad_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """The largest relative difference of a parameter's gradient; infinite if the sides hold other ones."""
    if set(ours) != set(theirs) or any(p.grad is None for p in (*ours.values(), *theirs.values())):
        return float("inf")
    found = [0.0]
    for name, parameter in ours.items():
        assert isinstance(parameter.grad, DTensor)
        wanted = theirs[name].grad
        found.append(float((parameter.grad.full_tensor() - wanted).norm() / wanted.norm()))
    return max(found, key=lambda x: (x != x, x))


def measure(folder: Path, schedule: str, chunks: int) -> PipelineRow:
    """One schedule. Raises VerificationError, before any timing, if the sides do not compute the same."""
    batch = bench_batch(PIECE * MICROBATCHES, SEQ, VOCAB)
    model: Any = autoshard.load(folder / schedule, pipeline_llama())
    our_parameters = dict(model.named_parameters())
    their_step, their_parameters = torch_pipeline(pipeline_llama(), schedule, chunks, batch)

    def our_step() -> torch.Tensor:
        loss: torch.Tensor = model.train_step(batch)
        return loss

    row = PipelineRow(
        schedule,
        chunks,
        ours_s=0.0,
        torch_s=0.0,
        ratio=0.0,
        loss_error=worst_of(loss_difference(our_step(), their_step())),
        grad_error=worst_of(grad_difference(our_parameters, their_parameters)),
    )
    check_equal([row])
    sides = [(our_step, our_parameters.values()), (their_step, their_parameters.values())]
    times: list[list[float]] = []
    for turn in range(WARM_UP + ROUNDS):
        # each side is the first of its pair in every other round
        order = (0, 1) if turn % 2 else (1, 0)
        found = {k: timed(*sides[k]) for k in order}
        times.append([found[0], found[1]])
    kept = times[WARM_UP:]
    return PipelineRow(
        schedule,
        chunks,
        statistics.median(a for a, _ in kept),
        statistics.median(b for _, b in kept),
        statistics.median(a / b for a, b in kept),
        row.loss_error,
        row.grad_error,
    )


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    rows = [measure(folder, schedule, chunks) for schedule, chunks in SCHEDULES]
    if dist.get_rank() == 0:
        out.write_text(json.dumps([asdict(row) for row in rows]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
