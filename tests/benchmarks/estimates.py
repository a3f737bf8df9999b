"""Predicted against measured: the time and the bytes of steps of small programs on gloo."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from autoshard.cluster import load_cluster
from autoshard.cluster.cluster import Cluster
from autoshard.cost.recipe import Recipe
from autoshard.errors import UsageError
from autoshard.program.program import Program
from autoshard.program.store import load_program, save_program
from autoshard.runtime.launch import torchrun
from autoshard.simulate.behaviour import Behaviour
from autoshard.simulate.step import estimate_step
from benchmarks.estimates_cases import RANKS, cases, program_of

#: our runtime on the CPU; the clock stops before the optimizer, whose state is in memory all the same
WITHOUT_UPDATE = Behaviour(
    recipe=Recipe("adamw, its update not timed", touched=0), transport="memory", sum_bytes=None
)
RESULTS = "steps.json"
#: the machine is measured so often, each time before a part of the rounds of steps
PROFILES = 3


@dataclass(frozen=True)
class StepMeasured:
    """A step on four processes. seconds: forward and backward of all microbatches with the reduction of
    gradients, of the slowest rank, a median. peak: bytes of the fullest rank: parameters, gradients, the
    moments of AdamW, and every other tensor alive at the same time.
    """

    seconds: float
    peak: int


@dataclass(frozen=True)
class EstimateRow:
    """A program, what was measured, and what was predicted of the same.

    seconds: the median over the profiles of the machine.
    """

    name: str
    measured: StepMeasured
    seconds: float
    peak: float

    @property
    def time_error(self) -> float:
        """Predicted over measured seconds, less 1."""
        return self.seconds / self.measured.seconds - 1

    @property
    def peak_error(self) -> float:
        """Predicted over measured bytes, less 1."""
        return self.peak / self.measured.peak - 1


def measured_rows() -> list[EstimateRow]:
    """All cases on four gloo processes of one thread each; some minutes.

    Raises UsageError if the processes fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        save_programs(Path(folder))
        run(Path(folder))
        return rows_of(Path(folder))


def save_programs(folder: Path) -> None:
    """Compile every case into a folder of its number."""
    for number, case in enumerate(cases()):
        save_program(program_of(case), folder / str(number))


def run(folder: Path) -> None:
    """Measure this machine and the steps of all programs, and write both into the folder."""
    done = torchrun(["-m", "benchmarks.estimates_worker", str(folder)], RANKS)
    if done.returncode:
        raise UsageError("the processes that run the steps have failed", why=f"exit code {done.returncode}")


def cluster_file(folder: Path, number: int) -> Path:
    """Where a profile of the machine lies."""
    return folder / f"measured-{number}.toml"


def rows_of(folder: Path) -> list[EstimateRow]:
    """Predictions on the measured machine beside what was measured."""
    clusters = [load_cluster(cluster_file(folder, number)) for number in range(PROFILES)]
    steps = [StepMeasured(**step) for step in json.loads((folder / RESULTS).read_text())]
    programs = [load_program(folder / str(number), only_read=True) for number in range(len(steps))]
    return [
        predicted(case.text, program, clusters, step)
        for case, program, step in zip(cases(), programs, steps, strict=True)
    ]


def predicted(name: str, program: Program, clusters: Sequence[Cluster], step: StepMeasured) -> EstimateRow:
    """A row of a step that was measured."""
    found = [estimate_step(program, cluster, behaviour=WITHOUT_UPDATE) for cluster in clusters]
    return EstimateRow(name, step, median(each.seconds for each in found), found[0].fullest.peak)


def mean_error(errors: Sequence[float]) -> float:
    """Of their sizes."""
    return sum(map(abs, errors)) / len(errors)
