"""Parallel programs with a fault, each beside its sound twin: what `autoshard.audit` is measured by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autoshard
from autoshard.auditing.findings import AuditReport

#: at the end of a line of a case: the audit has to name it
MARK = "# fault:"


@dataclass(frozen=True)
class Case:
    """One program.

    name: of the fault. source: the public issue that describes it, or "" for a common mistake. mesh: of the
    ranks. model: the reference. step: of one device. rank_step: of a rank, ``rank_step(model, fault)``, with
    ``fault`` the name to do it wrong and "" to do it right. kind: of the finding. word: what its text has to
    say, or "".
    """

    name: str
    source: str
    mesh: str
    model: Callable[[], nn.Module]
    step: Callable[[Any], Any]
    rank_step: Callable[[Any, str], Any]
    kind: str = "gradient"
    word: str = ""

    def audit(self, fault: bool) -> AuditReport:
        """Run it, wrong or right."""
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            model = self.model()
        finally:
            torch.set_default_dtype(default)
        name = self.name if fault else ""
        with autoshard.audit(reference=model, mesh=self.mesh, step=self.step) as session:
            return session.rank(lambda copy: self.rank_step(copy, name))

    def marked(self) -> set[str]:
        """The lines that are marked with this case's name, as ``file.py:12``."""
        found = set()
        for path in Path(__file__).parent.glob("cases_*.py"):
            marks = [line.partition(MARK)[2] for line in path.read_text().splitlines()]
            for number, mark in enumerate(marks, 1):
                if self.name in [name.strip() for name in mark.split(",")]:
                    found.add(f"{path.name}:{number}")
        return found


def named(report: AuditReport) -> list[str]:
    """The lines that a report names, as ``file.py:12``, with those where their functions were called."""
    return [place for finding in report.findings for line in finding.lines for place in places(line)]


def places(line: str) -> list[str]:
    """The lines of ``file.py:12-14, called at other.py:3``."""
    found = []
    for place in line.split(", called at "):
        path, _, numbers = place.rpartition("/")[2].rpartition(":")
        first, _, last = numbers.partition("-")
        found += [f"{path}:{number}" for number in range(int(first), int(last or first) + 1)]
    return found
