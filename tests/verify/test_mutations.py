"""The static verifier is tested by what it must not let through: every kind of fault, in good programs."""

from __future__ import annotations

import pytest
from faults.kinds import KINDS, some
from faulty import good, is_near, report_of

from autoshard.report.verification import place_of
from autoshard.verify.static import verify_static

PROGRAMS = sorted({on for kind in KINDS.values() for on in kind.on})


@pytest.mark.parametrize("name", PROGRAMS)
def test_good_programs_are_good(name: str) -> None:
    report = verify_static(good(name))
    assert report.ok, report.findings[0]
    assert not report.uncovered


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_kind_of_fault_is_caught_at_its_place(name: str) -> None:
    """A fault of each kind in the first program that can have it; ``python tests/faulty.py 40`` puts in
    more, and counts."""
    kind = KINDS[name]
    faults = next(filter(None, (some(kind, good(on), 1) for on in kind.on)))
    for fault in faults:
        report = report_of(fault)
        assert not report.ok
        fitting = [f for f in report.findings if f.finding.rule in fault.rules]
        assert fitting, (fault.near, report.findings[0])
        assert any(is_near(fault, f) for f in fitting), (fault.near, fitting[0])
        first = fitting[0]
        assert first.ranks and first.finding.what
        assert fault.memory or first.line or first.finding.at.action or first.finding.at.value, place_of(
            first
        )


def test_a_finding_names_ranks_line_and_the_users_line() -> None:
    kind = KINDS["drop a collective"]
    inside = [f for f in some(kind, good("pipeline"), 20) if f.near[0].startswith("layers")]
    found = next(f for f in report_of(inside[0]).findings if f.finding.at.segment)
    assert found.ranks.startswith("ranks ") and "stage" in found.ranks
    assert "modeling_llama.py:" in found.source
    assert found.text.startswith(found.finding.at.value)
