"""A static verification as rows for people, and as JSON."""

from __future__ import annotations

from typing import Any

from autoshard.verify.result import Checked, Located, StaticReport


def rows_of(report: StaticReport) -> list[tuple[str, str, str, str]]:
    """(rule group, what was looked at, note, outcome) of every group of rules."""
    return [(c.name, f"{c.count:,} {c.of}", c.note, _outcome(c)) for c in report.checked]


def _outcome(checked: Checked) -> str:
    if checked.broken:
        return f"{checked.broken} broken"
    return "ok" if checked.covered else "not covered"


def place_of(located: Located) -> str:
    """``ranks 8-15 (stage 1), program.py:120: mm_3: "f32[8, 4] tp:P" = mm(x, y)``"""
    at = located.finding.at
    words = [located.ranks]
    if at.action:
        words.append(f"action {at.action}")
    if located.line:
        words.append(f"{located.file}:{located.line}")
    elif at.value:
        words.append(f"value {at.value}")
    return ", ".join(words) + (f": {located.text}" if located.text else "")


def lines_of(located: Located) -> list[str]:
    """A finding in lines: what, where in the program, where in the user's code, why."""
    finding = located.finding
    lines = [f"{finding.rule}: {finding.what}", f"  where: {place_of(located)}"]
    if located.source:
        lines.append(f"  yours: {located.source}")
    if finding.why:
        lines.append(f"  why:   {finding.why}")
    return lines


def as_json(report: StaticReport) -> dict[str, Any]:
    """The report as plain values; seconds that it took."""
    return {
        "ok": report.ok,
        "mesh": report.mesh,
        "ranks": report.ranks,
        "seconds": report.seconds,
        "checked": [
            {
                "rules": c.name,
                "count": c.count,
                "of": c.of,
                "broken": c.broken,
                "covered": c.covered,
                "note": c.note,
            }
            for c in report.checked
        ],
        "findings": [
            {
                "rule": f.finding.rule,
                "what": f.finding.what,
                "why": f.finding.why,
                "ranks": f.ranks,
                "file": f.file,
                "line": f.line,
                "text": f.text,
                "source": f.source,
                "value": f.finding.at.value,
                "action": f.finding.at.action,
            }
            for f in report.findings
        ],
    }
