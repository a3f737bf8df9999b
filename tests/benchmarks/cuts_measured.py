"""A planned cut beside one of equal layers, measured on gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from torch import nn

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.errors import VerificationError
from autoshard.planner.analysis import analyse
from autoshard.planner.planned import Planned
from autoshard.program.store import save_program
from autoshard.search.plan.plan import Cut
from benchmarks.cuts import CutRow, planned, row_of
from benchmarks.models import bench_batch, bench_llama

RANKS, MICROBATCHES = 4, 8
#: a head of about the work of two layers, as in `cuts.heads`
LAYERS, HIDDEN, VOCAB = 8, 128, 8192
#: sequences of a microbatch, and tokens of a sequence
PIECE, SEQ = 4, 128
CLUSTER = "cpu-gloo"
SIDES = ("planned", "equal")
#: both cuts add the same float32 numbers in the same order but for the sum of the losses
TOLERANCE = 1e-5


@dataclass(frozen=True)
class CutMeasured:
    """Both cuts, 1F1B, forward and backward of all microbatches without the optimizer.

    planned_s, equal_s: medians of the seconds of a step, of the slowest rank. ratio: median over the steps of
    equal / planned. planned_busy_s, equal_busy_s, busy_ratio: the same of the processor seconds of the
    busiest rank, which is what a step tends to where every rank has a core of its own. loss_error: largest
    relative difference of the losses. cores: that the processes shared. row: what was simulated.
    """

    planned_s: float
    equal_s: float
    ratio: float
    planned_busy_s: float
    equal_busy_s: float
    busy_ratio: float
    loss_error: float
    cores: int
    row: CutRow


def cut_llama() -> nn.Module:
    """The model of both cuts, the same in every process."""
    return bench_llama(LAYERS, HIDDEN, VOCAB)


def equal_cuts(layers: int, stages: int) -> tuple[Cut, ...]:
    """As many layers in every stage: the first call of forward is the embedding, then comes one per layer."""
    return tuple(Cut(layers * stage // stages) for stage in range(1, stages))


def measured() -> CutMeasured:
    """Four gloo processes of one thread each; about a minute.

    Raises VerificationError if the losses of the two cuts are not the same.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = save_programs(Path(folder))
        out = Path(folder) / "times.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", "-m", "benchmarks.cuts_worker", folder, str(out)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        times = json.loads(out.read_text())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    row = CutMeasured(**times, cores=cores, row=row_of(found))
    check_equal(row.loss_error)
    return row


def check_equal(loss_error: float) -> None:
    """VerificationError if the two cuts do not compute the same."""
    if not loss_error <= TOLERANCE:
        raise VerificationError(
            "the planned cut and the one of equal layers differ",
            why=f"relative difference of the losses {loss_error:.1e}",
            hint="their times cannot be compared: run the tests of pipelines",
        )


def save_programs(folder: Path) -> Planned:
    """A program per side; returns the plan."""
    analysis = analyse(capture(cut_llama(), (), bench_batch(PIECE, SEQ, VOCAB)))
    found = planned(analysis, CLUSTER, RANKS, MICROBATCHES, "1f1b", 1)
    pipeline = found.plan.pipeline
    assert pipeline is not None
    sides = {"planned": pipeline, "equal": msgspec.structs.replace(pipeline, cuts=equal_cuts(LAYERS, RANKS))}
    for name in SIDES:
        plan = replace(found.plan, pipeline=sides[name])
        save_program(compile_analysed(replace(found, plan=plan)), folder / name)
    return found
