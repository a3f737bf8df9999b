"""`autoshard.audit` names the fault of every program at its line, and says nothing of the sound twins."""

from __future__ import annotations

import cases_tensor
import pytest
from case import Case

CASES: list[Case] = [*cases_tensor.CASES]
NAMES = [case.name for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_faults_are_named_at_their_line(case: Case) -> None:
    report = case.audit(fault=True)
    assert case.kind in [finding.kind for finding in report.findings], report.text()
    assert case.word in report.text()
    named = {int(line.rpartition(":")[2]) for finding in report.findings for line in finding.lines}
    assert case.marked(), "the case marks no line"
    assert named & case.marked(), report.text()


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_sound_programs_raise_no_alarm(case: Case) -> None:
    assert case.audit(fault=False).ok, case.audit(fault=False).text()
