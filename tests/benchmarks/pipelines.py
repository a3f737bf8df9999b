"""Steps of pipelines on gloo, measured beside torch.distributed.pipelining."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster
from autoshard.errors import VerificationError
from autoshard.planner.analysis import analyse
from autoshard.planner.planned import Planned
from autoshard.planner.planning import plan_analysed
from autoshard.program.program import Program
from autoshard.program.store import save_program
from autoshard.search.plan.plan import Cut, Pipeline
from benchmarks.models import bench_batch, bench_llama

RANKS, MICROBATCHES = 4, 8
LAYERS, HIDDEN, VOCAB = 8, 256, 2048
#: sequences of a microbatch, and tokens of a sequence
PIECE, SEQ = 4, 128
#: name of a schedule, stages per rank
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))
#: the two sides add the same float32 numbers in another order
TOLERANCE = 1e-4


@dataclass(frozen=True)
class PipelineRow:
    """Both sides of one schedule.

    chunks: stages per rank. ours_s, torch_s: medians of the seconds of a step, forward and backward of all
    microbatches without the optimizer, of the slowest rank. ratio: median over the steps of ours / torch's.
    loss_error, grad_error: largest relative difference between the sides, over all ranks and parameters.
    """

    schedule: str
    chunks: int
    ours_s: float
    torch_s: float
    ratio: float
    loss_error: float
    grad_error: float


def pipeline_llama() -> nn.Module:
    """The model that both sides run, the same in every process."""
    return bench_llama(LAYERS, HIDDEN, VOCAB)


def layers_of(stage: int, stages: int) -> range:
    """The layers of a stage; the first also has the embedding, the last the norm, head and loss."""
    return range(LAYERS * stage // stages, LAYERS * (stage + 1) // stages)


def measured() -> list[PipelineRow]:
    """Every schedule on four gloo processes of one thread each; some minutes.

    Raises VerificationError if losses or gradients of the two sides are not the same.
    """
    with tempfile.TemporaryDirectory() as folder:
        _save_programs(Path(folder))
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", "-m", "benchmarks.pipeline_worker", folder, str(out)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rows = [PipelineRow(**row) for row in json.loads(out.read_text())]
    check_equal(rows)
    return rows


def check_equal(rows: Sequence[PipelineRow]) -> None:
    """VerificationError if a row compares two sides that do not compute the same."""
    for row in rows:
        if not (row.loss_error <= TOLERANCE and row.grad_error <= TOLERANCE):
            raise VerificationError(
                f"autoshard and torch.distributed.pipelining differ on {row.schedule}",
                why=f"relative difference of the losses {row.loss_error:.1e}, "
                f"of the gradients {row.grad_error:.1e}",
                hint="their times cannot be compared: run the tests of pipelines",
            )


def _save_programs(folder: Path) -> None:
    model, batch = pipeline_llama(), bench_batch(PIECE, SEQ, VOCAB)
    analysis = analyse(capture(model, (), batch))
    found = plan_analysed(analysis, [Mesh.parse("dp=1")], load_cluster("cpu-gloo"))
    for schedule, chunks in SCHEDULES:
        save_program(_program(found, schedule, chunks), folder / schedule)


def _program(found: Planned, schedule: str, chunks: int) -> Program:
    """Cut after whole layers: the first call of forward is the embedding, then comes a call per layer."""
    stages = RANKS * chunks
    cuts = tuple(Cut(layers_of(stage, stages)[-1] + 1) for stage in range(stages - 1))
    pipeline = Pipeline(RANKS, 0, schedule, chunks, cuts)
    return compile_analysed(
        replace(found, plan=replace(found.plan, pipeline=pipeline, microbatches=MICROBATCHES))
    )
