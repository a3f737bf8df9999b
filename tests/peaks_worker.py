"""Started by torchrun: the bytes of a step of the programs ``0``, ``1``, ... of a folder.

Argument: the folder, to which ``peaks.json`` is written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from estimated import CASES
from leaving import leave

import autoshard
from benchmarks.estimates_worker import Measured


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    peaks = []
    for number, case in enumerate(CASES):
        run = Measured(autoshard.load(folder / str(number), case.model()), case.step_batch())
        run.timed()  # makes the optimizer's state
        peaks.append(run.peak())
    if dist.get_rank() == 0:
        (folder / "peaks.json").write_text(json.dumps(peaks))
    leave()


if __name__ == "__main__":
    main()
