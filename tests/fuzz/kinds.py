"""The kinds of cases: graphs, modules, steps, operators; how each is run, shown and made smaller."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fuzz.case import PLANS, Case, Outcome
from fuzz.chunk import Chunk, run_chunk
from fuzz.module_case import ModuleCase
from fuzz.operator_case import OperatorCase
from fuzz.shrink import shrunk
from fuzz.shrink_text import shrunk_text
from fuzz.step_runs import run_steps
from fuzz.steps import Steps

KINDS = ("graphs", "modules", "steps", "operators")
#: of ``all``: which part of the cases each kind has
PARTS = {"graphs": 0.5, "modules": 0.375, "steps": 0.125}
#: cases taken at a time
_SIZES = {"graphs": 4 * PLANS, "modules": 10, "steps": 24, "operators": 10}


@dataclass(frozen=True)
class Work:
    """Some cases of a kind."""

    kind: str
    numbers: range

    def run(self) -> Chunk:
        """In this process; steps on four others."""
        if self.kind == "graphs":
            return run_chunk(self.numbers)
        if self.kind == "steps":
            outcomes = run_steps([Steps.of(n) for n in self.numbers])
            return Chunk(tuple(zip(self.numbers, outcomes, strict=True)), frozenset())
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        case = OperatorCase if self.kind == "operators" else ModuleCase
        return Chunk(tuple((n, case.of(n).run()) for n in self.numbers), frozenset())


def run_work(work: Work) -> tuple[str, Chunk]:
    """For pools, which have to find it by name."""
    return work.kind, work.run()


def works(kind: str, first: int, cases: int) -> Iterator[Work]:
    """All cases of a kind, in portions."""
    size = _SIZES[kind]
    first -= first % PLANS if kind == "graphs" else 0
    for start in range(first, first + cases, size):
        yield Work(kind, range(start, min(start + size, first + cases)))


def mixed(kind: str, first: int, cases: int) -> list[Work]:
    """What is asked for, of ``all`` kinds in turns; steps last, which have processes of their own."""
    counts = {kind: cases} if kind != "all" else {k: max(1, round(cases * p)) for k, p in PARTS.items()}
    found = [(n / counts[k], w) for k in counts for n, w in enumerate(works(k, first, counts[k]))]
    return [w for _, w in sorted(found, key=lambda x: (x[1].kind == "steps", x[0]))]


def shown(kind: str, number: int) -> str:
    """The source of a case."""
    if kind == "graphs":
        case = Case.of(number)
        return f"mesh {case.mesh}\n\n{case.recipe.source()}"
    if kind == "operators":
        return OperatorCase.of(number).source()
    return (ModuleCase if kind == "modules" else Steps).of(number).source()


def reproduced(kind: str, number: int, outcome: Outcome | None = None, seconds: float = 60.0) -> str:
    """A failure with the smallest case found that fails alike. outcome: if known."""
    text: str
    if kind == "graphs":
        case = Case.of(number)
        found = outcome or case.run()
        if not found.failure.startswith("capture"):
            case, found = shrunk(case, found, seconds)
        text = f"mesh {case.mesh}, plan seed {case.plan_seed}\n{case.recipe.source()}"
    elif kind == "operators":
        operator = OperatorCase.of(number)
        found, text = outcome or operator.run(), operator.source()
    elif kind == "modules":
        module = ModuleCase.of(number)
        module, found = shrunk_text(module, outcome or module.run(), ModuleCase.run, seconds)
        text = module.source()
    else:
        steps = Steps.of(number)
        steps, found = shrunk_text(steps, outcome or _stepped(steps), _stepped, 2 * seconds)
        text = steps.source()
    again = f"run it again: PYTHONPATH=tests python -m fuzz --kind {kind} --case {number}"
    return f"{kind} case {number}, made smaller\n{found.failure}: {found.detail}\n\n{text}\n{again}"


def _stepped(steps: Steps) -> Outcome:
    return run_steps([steps])[0]


def left(deadline: float | None) -> float | None:
    """Seconds until then."""
    return None if deadline is None else max(0.1, deadline - time.perf_counter())
