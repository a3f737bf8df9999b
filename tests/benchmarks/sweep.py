"""Random cases of real models on real machines, each planned by the command in a process of its own."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from resource import struct_rusage
from typing import Any

from autoshard.cluster.load import catalog_names
from benchmarks.sweep_configs import published
from benchmarks.sweep_options import drawn_options, unlike_cluster, unlike_text

GPUS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 96, 128, 256, 512, 1000, 1024, 2048, 4096)
BATCHES = (1, 7, 8, 16, 32, 64, 96, 128, 256, 512, 1000, 1024, 2048)
LENGTHS = (128, 512, 1000, 1024, 2048, 4096, 4097, 8192)
#: exit codes of a command that says why there is no plan
REFUSED = (2, 3, 4)
#: share of cases on two kinds of nodes, beside those of the catalog that are so
_UNLIKE = 0.1
#: between two looks at a process, seconds; and how many times the limit one that waits may take
_LOOK, _WAITS = 0.05, 10


@dataclass(frozen=True)
class SweepCase:
    """number: of the draw. config: a `config.json`. cluster: of the catalog, or as `unlike_text` reads it.
    batch: sequences of a step. length: tokens of each. options: more words of the command."""

    number: int
    name: str
    config: dict[str, Any]
    cluster: str
    gpus: int
    batch: int
    length: int
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"{self.name} on {self.gpus} x {self.cluster}"
        text = f"{self.number:>4} {where}, batch {self.batch}, length {self.length}"
        return " ".join([text, *self.options])


@dataclass(frozen=True)
class SweepRow:
    """What came of a case.

    seconds: of the processor that the process took. peak_gib: of its resident memory. code: its exit code,
    None where it was over the limit. text: mesh and step of the plan, or the first line of the reason.
    """

    case: SweepCase
    seconds: float
    peak_gib: float
    code: int | None
    text: str

    @property
    def kind(self) -> str:
        """``plan``, ``refused``, ``late`` or ``crash``."""
        if self.code is None:
            return "late"
        return "plan" if self.code == 0 else "refused" if self.code in REFUSED else "crash"

    def __str__(self) -> str:
        end = {"late": "OVER THE LIMIT", "crash": "CRASH", "refused": f"exit {self.code}", "plan": "plan"}
        return f"{self.case}: {self.seconds:.1f} s, {self.peak_gib:.2f} GiB, {end[self.kind]}: {self.text}"


def case_of(seed: int, number: int) -> SweepCase:
    """The case of a number, whatever other cases there are."""
    draw = random.Random(f"{seed}/{number}")
    name, config = draw.choice(list(published()))
    cluster, gpus, batch = draw.choice(catalog_names()), draw.choice(GPUS), draw.choice(BATCHES)
    positions = config.get("max_position_embeddings", config.get("n_positions", LENGTHS[-1]))
    length = draw.choice([n for n in LENGTHS if n <= positions])
    return SweepCase(number, name, config, cluster, gpus, batch, length)


def with_options(seed: int, case: SweepCase) -> SweepCase:
    """The same with options that users give, and on unlike nodes now and then."""
    draw = random.Random(f"{seed}/{case.number}/options")
    cluster = unlike_cluster(draw, case.gpus) if draw.random() < _UNLIKE else case.cluster
    options = drawn_options(draw, case.gpus, case.batch)
    # the published ones are in bfloat16, which computing in another type does not start from
    config = {**case.config, "dtype": "float32"} if "--precision" in options else case.config
    return replace(case, cluster=cluster, options=options, config=config)


def sweep(cases: Iterable[SweepCase], limit_s: float) -> Iterator[SweepRow]:
    """Every case in a process, one after the other.

    limit_s: seconds of the processor after which one is ended: a machine that others use does not count.
    """
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            yield _run(case, Path(folder), limit_s)


def closing_line(rows: Iterable[SweepRow]) -> tuple[str, bool]:
    """(what came of all of them, whether none crashed or was over the limit)."""
    rows = list(rows)
    count = {kind: sum(r.kind == kind for r in rows) for kind in ("plan", "refused", "late", "crash")}
    codes = {code: sum(r.code == code for r in rows) for code in REFUSED}
    by_code = ", ".join(f"exit {code}: {n}" for code, n in codes.items() if n)
    text = (
        f"{count['plan']} plans, {count['refused']} refused{f' ({by_code})' if by_code else ''}, "
        f"{count['late']} over the limit, {count['crash']} crashed"
    )
    return text, not count["late"] and not count["crash"]


def write_case(case: SweepCase, folder: Path) -> list[str]:
    """Write the config; the words of the command that plans it."""
    (folder / "config.json").write_text(json.dumps(case.config), encoding="utf-8")
    cluster = case.cluster
    if "+" in cluster:
        (folder / "cluster.toml").write_text(unlike_text(cluster), encoding="utf-8")
        cluster = str(folder / "cluster.toml")
    gpus = [] if "--mesh" in case.options else ["--gpus", case.gpus]
    words = ["plan", f"hf:{folder}", "--cluster", cluster, *gpus, "--json"]
    return list(map(str, [*words, "--global-batch", case.batch, "--seq", case.length, *case.options]))


def _run(case: SweepCase, folder: Path, limit_s: float) -> SweepRow:
    words = write_case(case, folder)
    out, err = folder / "out", folder / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "autoshard", *words],
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        code, used = _waited(process.pid, limit_s)
    lines = err.read_text(encoding="utf-8", errors="replace").splitlines()
    text = _plan_text(json.loads(out.read_text(encoding="utf-8"))) if code == 0 else _reason(code, lines)
    return SweepRow(case, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20, code, text)


def _waited(pid: int, limit_s: float) -> tuple[int | None, struct_rusage]:
    """(exit code, None of a process that was late and is ended; what it used)."""
    start, killed = time.perf_counter(), False
    while True:
        done, status, used = os.wait4(pid, os.WNOHANG)
        if done:
            return None if killed else os.waitstatus_to_exitcode(status), used
        late = _processor_s(pid) > limit_s or time.perf_counter() - start > _WAITS * limit_s
        if late and not killed:
            os.killpg(pid, signal.SIGKILL)
            killed = True
        time.sleep(_LOOK)


def _processor_s(pid: int) -> float:
    """Seconds of the processor that a process has taken; from /proc, as it still runs."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _plan_text(plan: dict[str, Any]) -> str:
    if "lengths" in plan:
        return f"{plan['mesh']}, expected step {plan['expected']['step_seconds']:.4g} s"
    step, simulated = plan["step"]["seconds"], plan["simulated_seconds"]
    pieces = f"{plan['mesh']} x {plan['microbatches']}, step {step:.4g} s"
    return (
        pieces if simulated is None else f"{pieces}, simulated {simulated:.4g} s ({simulated / step:.3f} x)"
    )


def _reason(code: int | None, lines: list[str]) -> str:
    """The first line of an error; of a crash or a late process, the last line it printed."""
    errors = [line for line in lines if line.startswith("error:")]
    if code in REFUSED and errors:
        return errors[0].removeprefix("error:").strip()
    last = lines[-1].strip() if lines else ""
    return last if code is None else f"exit {code}: {last}"
