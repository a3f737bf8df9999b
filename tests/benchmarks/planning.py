"""Time and memory of planning big models, each in a fresh process: ``python -m benchmarks.planning``.

The worker reads a `Case` as JSON from its arguments and prints a `PlanningRow` as JSON.
"""

from __future__ import annotations

import compileall
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import autoshard

if TYPE_CHECKING:
    from benchmarks.cases import Case


@dataclass(frozen=True)
class PlanningRow:
    """What a process took and found.

    process_s: its whole life, seconds, imports of torch and transformers and building the model among it.
    capture_s: of the trace; search_s: from there to the plan, with baselines, other ways to run it and the
    allocator. peak_gib: of its resident memory, GiB. step_s: predicted, seconds. mfu, gap: shares of 1.
    baseline: the best one by hand with its mesh, "" if none can be used, and then baselines_why says why;
    baseline_ratio: its step over the plan's.
    """

    process_s: float
    capture_s: float
    search_s: float
    peak_gib: float
    mesh: str
    microbatches: int
    step_s: float
    mfu: float
    gap: float
    baseline: str = ""
    baseline_ratio: float = 0.0
    baselines_why: str = ""

    @property
    def planning_s(self) -> float:
        """Seconds from a model that was built to its plan."""
        return self.capture_s + self.search_s


def plan_case(case: Case) -> PlanningRow:
    """Plan a case in this process, as ``autoshard plan`` does; process_s is left to who started it.

    Raises what `autoshard.plan` raises.
    """
    from autoshard.options import PlanOptions
    from autoshard.report.summary import summarise
    from autoshard.validate.models import on_meta

    model, inputs = on_meta(case.model, case.batch, case.seq)
    begun: dict[str, float] = {}

    def begin(stage: str) -> None:
        begun.setdefault(stage, time.perf_counter())

    start = time.perf_counter()
    # as for `autoshard.plan`: a mesh alone has no limit of memory
    options = PlanOptions(optimizer=case.optimizer, baselines=not case.mesh)
    if not case.mesh:
        options = replace(options, devices=case.devices, global_batch=case.batch)
    planned = autoshard.plan(
        model,
        case.mesh or case.cluster,
        example_inputs=inputs,
        options=options,
        device=True,
        progress=begin,
    )
    end, captured = time.perf_counter(), begun["folding"]
    summary = summarise(planned.plan, planned.analysis, planned.solution, planned.staging, planned.peak)
    assert summary.step is not None
    usable = [(r.ratio, f"{r.name} {r.mesh}") for r in summary.baselines if r.ratio is not None]
    ratio, baseline = min(usable, default=(0.0, ""))
    return PlanningRow(
        0.0,
        captured - start,
        end - captured,
        _peak_gib(),
        summary.mesh,
        summary.microbatches,
        summary.step.seconds,
        summary.step.mfu,
        summary.gap,
        baseline,
        ratio,
        "" if usable else "; ".join(f"{r.name} {r.mesh}: {r.why}" for r in summary.baselines),
    )


def measure(case: Case) -> PlanningRow:
    """The same in a fresh process, whose whole life is timed, of a package that is installed.

    As for a command that is installed, the working folder is not searched for modules.
    """
    compile_package()
    here = str(Path(__file__).resolve())
    command = [sys.executable, "-P", "-m", "benchmarks.planning", json.dumps(asdict(case)), here]
    start = time.perf_counter()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"planning {case.name} on {case.devices} devices failed:\n{done.stderr}")
    return replace(PlanningRow(**json.loads(done.stdout.splitlines()[-1])), process_s=seconds)


def compile_package() -> None:
    """Write the bytecode of all modules, as pip does when it installs a package.

    A checkout has none where PYTHONDONTWRITEBYTECODE is set, and then every process compiles everything anew.
    Raises RuntimeError where it cannot be written.
    """
    package = Path(autoshard.__file__).resolve().parent
    # compile_dir passes over folders that are links, as `passes` and `kernels` are in a checkout
    links = (entry for entry in package.iterdir() if entry.is_symlink())
    folders = (package, *links, Path(__file__).parent)
    if not all([compileall.compile_dir(folder, quiet=2) for folder in folders]):
        raise RuntimeError(f"the bytecode of {package} cannot be written")


def by_turns(
    pair: tuple[Case, Case], run: Callable[[Case], PlanningRow] = measure
) -> list[tuple[PlanningRow, PlanningRow]]:
    """Two cases run one after the other, as often as the first has runs: a slow minute slows both."""
    return [(run(pair[0]), run(pair[1])) for _ in range(pair[0].runs)]


def median_of(case: Case, run: Callable[[Case], PlanningRow] = measure) -> PlanningRow:
    """Medians of seconds and memory over the runs of a case; the plan is the same in each."""
    rows = [run(case) for _ in range(case.runs)]
    return replace(
        rows[0],
        process_s=statistics.median(r.process_s for r in rows),
        capture_s=statistics.median(r.capture_s for r in rows),
        search_s=statistics.median(r.search_s for r in rows),
        peak_gib=statistics.median(r.peak_gib for r in rows),
    )


def _peak_gib() -> float:
    """Most resident memory of this process so far.

    From /proc: what getrusage gives may be that of the process that started this one.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kib = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kib) / 2**20


def _main(text: str) -> None:
    import msgspec

    from benchmarks.cases import Case

    print(json.dumps(asdict(plan_case(msgspec.json.decode(text, type=Case)))))


if __name__ == "__main__":
    from autoshard.cli.main import end_at_once

    if str(Path(__file__).resolve()) != sys.argv[2]:
        raise SystemExit(f"{sys.argv[2]} is not what is installed: run `pip install -e .` there")
    _main(sys.argv[1])
    end_at_once(0)
