"""The best configuration of every tool for large models, beside our own plan with the same kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from autoshard.advise.ours import OwnPlan, own_plan, own_program
from autoshard.advise.search import Advice, advise
from autoshard.advise.tools import Tool, tools
from autoshard.advise.work import work_on
from autoshard.cluster import load_cluster
from autoshard.errors import InfeasibleError
from autoshard.validate.captured import Captures
from autoshard.validate.models import Architecture, on_meta
from benchmarks.cases import LLAMA3_8B, Case

#: Llama Team, The Llama 3 Herd of Models (2024), table 3
LLAMA3_70B = Architecture("llama", 80, 8192, 64, 8, 28672, 128256, 8192)
CASES = (
    Case("Llama-3 8B", LLAMA3_8B, 64, 128, 8192),
    Case("Llama-3 70B", LLAMA3_70B, 64, 256, 8192),
)


@dataclass(frozen=True)
class RivalRow:
    """advice, ours: None where nothing fits."""

    case: Case
    tool: Tool
    advice: Advice | None
    ours: OwnPlan | None

    def __str__(self) -> str:
        """A row of the table in the documentation."""
        cells = [self.case.name, str(self.case.devices), self.tool.title]
        if self.advice is None:
            cells += ["does not fit", "", "", ""]
        else:
            best = self.advice.best
            cells += [
                f"`{best.choice}`",
                f"{best.seconds:.2f} s",
                f"{best.step.mfu:.1%}",
                f"{self.advice.bound:.2f} s",
            ]
        if self.ours is None:
            cells += ["", ""]
        else:
            gain = (
                "" if self.advice is None else f"{self.advice.best.seconds / self.ours.same_kernels - 1:+.1%}"
            )
            cells += [f"`{self.ours.mesh}`, {self.ours.same_kernels:.2f} s", gain]
        return f"| {' | '.join(cells)} |"


def rows(say: Callable[[str], None]) -> Iterator[RivalRow]:
    for case in CASES:
        build = partial(on_meta, case.model, seq=case.seq)
        cluster = load_cluster(case.cluster)
        work = work_on(case.name, build, Captures(build), cluster, case.devices, case.batch, case.seq, None)
        program = own_program(work, say)
        for tool in tools().values():
            say(f"{case.name}, {tool.title}")
            try:
                advice = advise(tool, work)
            except InfeasibleError:
                advice = None
            ours = None if program is None else own_plan(program, work, tool)
            yield RivalRow(case, tool, advice, ours)
