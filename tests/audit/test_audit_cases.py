"""`autoshard.audit` names the fault of every program at its line, and says nothing of the sound twins."""

from __future__ import annotations

import cases_data
import cases_experts
import cases_fsdp
import cases_hangs
import cases_sequence
import cases_stages
import cases_tensor
import cases_torch
import cases_vocabulary
import pytest
from case import Case, named

FILES = (
    *(cases_tensor, cases_vocabulary, cases_sequence, cases_data, cases_experts, cases_hangs),
    *(cases_torch, cases_fsdp, cases_stages),
)
CASES: list[Case] = [case for file in FILES for case in file.CASES]
NAMES = [case.name for case in CASES]
#: programs that send a token where an expert's weight is above 0: that exp is has no exact form
BY_NUMBERS = (
    "divided along the hidden dim",
    "experts not divided",
    "wrong order of received tokens",
    "balance by local counts",
)


def test_names_are_not_used_twice() -> None:
    assert len(set(NAMES)) == len(NAMES) > 90


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_faults_are_named_at_their_line(case: Case) -> None:
    report = case.audit(fault=True)
    assert case.kind in [finding.kind for finding in report.findings], report.text()
    assert case.word in report.text()
    assert case.marked() & set(named(report)), report.text()
    sound = case.audit(fault=False)
    assert sound.ok, sound.text()
    assert bool(sound.proof.why) == (case.name in BY_NUMBERS), sound.text()
