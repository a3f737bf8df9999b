"""Plans of two checkouts for the same random real cases: mesh, step and memory that each chose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sweep import SweepCase, write_case

#: a step or a peak that is larger by less is one of rounding
_ROUNDING = 1e-6


@dataclass(frozen=True)
class PlanFigures:
    """What a checkout planned. step, simulated: seconds. memory: bytes of a rank. reason: of no plan."""

    mesh: str = ""
    microbatches: int = 0
    step: float = 0.0
    simulated: float = 0.0
    memory: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        return (
            f"{self.mesh} x {self.microbatches}, step {self.step:.6g} s, simulated {self.simulated:.6g} s, "
            f"{self.memory / 2**30:.2f} GiB"
        )


@dataclass(frozen=True)
class PlanPair:
    """A case with the plans of both checkouts."""

    case: SweepCase
    before: PlanFigures
    after: PlanFigures

    @property
    def kind(self) -> str:
        """``same``, ``better``, or ``worse``: a slower simulated step, or no plan where there was one."""
        one, other = self.before, self.after
        if one.reason or other.reason:
            return "same" if bool(one.reason) == bool(other.reason) else "worse" if other.reason else "better"
        if (one.mesh, one.microbatches) == (other.mesh, other.microbatches):
            equal = abs(one.simulated - other.simulated) <= _ROUNDING * one.simulated
            if equal and other.memory <= one.memory * (1 + _ROUNDING):
                return "same"
        return "better" if other.simulated < one.simulated * (1 - _ROUNDING) else "worse"

    def __str__(self) -> str:
        lines = [f"{self.case}: {self.kind}", f"     {self.after}"]
        return "\n".join(lines if self.kind == "same" else [*lines, f"     before: {self.before}"])


def compare(cases: Iterable[SweepCase], before: Path) -> Iterator[PlanPair]:
    """Every case by this checkout and by the one at ``before``, each in a process of its own."""
    here = Path(__file__).resolve().parents[2]
    for case in cases:
        yield PlanPair(case, _planned(case, before), _planned(case, here))


def _planned(case: SweepCase, checkout: Path) -> PlanFigures:
    with tempfile.TemporaryDirectory() as folder:
        words = write_case(case, Path(folder))
        env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "autoshard", *words]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        return PlanFigures(reason=f"exit {done.returncode}")
    plan: dict[str, Any] = json.loads(done.stdout)
    peak, memory = plan["peak"], plan["memory"]
    held = peak["bytes"] if peak else sum(memory.values())
    step = plan["step"]["seconds"]
    # checkouts whose documents have schema 1 say it in another word
    simulated = plan["simulated_seconds" if "simulated_seconds" in plan else "simulated"]
    return PlanFigures(plan["mesh"], plan["microbatches"], step, simulated or step, held)
