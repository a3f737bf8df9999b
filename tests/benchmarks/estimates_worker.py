"""Started by torchrun: measures the machine, then the steps of programs in turns, then their bytes.

Argument: the folder of the programs, where the results go as well.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.cluster.write import write_all
from autoshard.runtime.module import ParallelModule
from autoshard.runtime.profile.machine import Effort, measure
from autoshard.runtime.train import accumulate
from benchmarks.estimates import PROFILES, RESULTS, StepMeasured, cluster_file
from benchmarks.estimates_cases import Inputs, cases
from benchmarks.live_bytes import LiveBytes
from benchmarks.ranks import worst_of

#: of steps, after each profile
ROUNDS = 4


class Measured:
    """One program: its model on this rank, and the batch of a step."""

    def __init__(self, model: nn.Module, batch: Inputs) -> None:
        self.model, self.batch = model, batch
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def timed(self) -> float:
        """Seconds of forward and backward on the slowest rank; an update follows, so that values change."""
        dist.barrier()
        start = time.perf_counter()
        accumulate(self.model, ((), self.batch))
        taken = time.perf_counter() - start
        self.optimizer.step()
        self.optimizer.zero_grad()
        return worst_of(taken)

    def peak(self) -> int:
        """Bytes at the fullest point of a step on the fullest rank."""
        with LiveBytes(self.held()) as live:
            accumulate(self.model, ((), self.batch))
        self.optimizer.zero_grad()
        return int(worst_of(live.peak))

    def held(self) -> list[torch.Tensor]:
        """What the rank has between steps: parameters, buffers, constants and the optimizer's state."""
        state = [x for each in self.optimizer.state.values() for x in each.values()]
        assert isinstance(self.model, ParallelModule)
        constants = self.model._autoshard.constants.values()
        held = [*self.model.parameters(), *self.model.buffers(), *constants, *state]
        return [x.to_local() if isinstance(x, DTensor) else x for x in held if isinstance(x, torch.Tensor)]


def profiled(path: Path) -> None:
    """Measure the machine with all ranks, and write it as a cluster file."""
    first = dist.get_rank() == 0
    profile = measure("measured", Effort(), lambda text: print(text, file=sys.stderr) if first else None)
    if first:
        write_all(profile.texts(path))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    runs = [
        Measured(autoshard.load(folder / str(number), case.model()), case.step_batch())
        for number, case in enumerate(cases())
    ]
    times: list[list[float]] = []
    for number in range(PROFILES):
        profiled(cluster_file(folder, number))
        # the first round makes what lasts, and warms up what the profile has left cold
        times += [[run.timed() for run in runs] for _ in range(1 + ROUNDS)][1:]
    steps = [
        StepMeasured(statistics.median(row[k] for row in times), run.peak()) for k, run in enumerate(runs)
    ]
    if dist.get_rank() == 0:
        (folder / RESULTS).write_text(json.dumps([asdict(step) for step in steps]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
