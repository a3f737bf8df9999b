"""A file with a line of JSON for every optimizer step."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from autoshard.errors import UsageError
from autoshard.runtime.train import StepReport


@dataclass(frozen=True)
class StepWork:
    """What a step does, on all ranks. what: ``tokens`` or ``samples``; items: how many. flop: of the model.
    peak: FLOP/s of all devices at their peaks, None where they are not known."""

    what: str
    items: int
    flop: float
    peak: float | None


class StepLog:
    """Takes the reports of `runtime.train.train`, as ``on_step``, on every rank; rank 0 writes.

    Raises UsageError if the file exists, or cannot be made: a log has the steps of one run.
    """

    def __init__(self, path: str | os.PathLike[str], work: StepWork, *, first: bool) -> None:
        """first: whether this is rank 0; there may be no process group yet."""
        self.work = work
        self._file = _created(Path(path)) if first else None

    def __call__(self, report: StepReport) -> None:
        """Write a step; collective, for the fullest rank."""
        name, peak = _peak_bytes()
        if self._file is None:
            return
        work, seconds = self.work, report.seconds
        row = {
            "step": report.step + 1,
            "loss": _number(report.loss),
            "grad_norm": _number(report.grad_norm),
            "seconds": seconds,
            work.what: work.items,
            f"{work.what}_per_second": work.items / seconds,
            name: peak,
            "mfu": None if work.peak is None else work.flop / seconds / work.peak,
        }
        self._file.write(json.dumps(row, allow_nan=False) + "\n")


def _created(path: Path) -> TextIO:
    try:
        return path.open("x", encoding="utf-8", buffering=1)  # a line is in the file once it is written
    except FileExistsError:
        why, hint = "a log has the steps of one run, and none is overwritten", "another file, or remove it"
        raise UsageError(f"{path} exists already", why=why, hint=hint) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written", why=error.strerror or str(error)) from None


def _number(x: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return x if x is not None and math.isfinite(x) else None


def _peak_bytes() -> tuple[str, int]:
    """(key, bytes of the rank that has most) since the process began: allocated by torch on CUDA, resident in
    the memory of the process elsewhere."""
    if torch.cuda.is_available():
        name, device, own = "cuda_peak_bytes", "cuda", torch.cuda.max_memory_allocated()
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        name, device = "process_peak_bytes", "cpu"
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    most = torch.tensor(own, dtype=torch.int64, device=device)
    if dist.is_initialized():
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return name, int(most)
