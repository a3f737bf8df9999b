"""`autoshard.audit` on the faulty programs of tests/audit: how many are named, how many twins alarm."""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table


def print_audit(console: Console) -> None:
    """One row per file of programs."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "audit"))
    case_module, files = import_module("case"), import_module("test_audit_cases").FILES
    warnings.simplefilter("ignore")
    table = Table("programs", "faulty", "named", "in the first line", "sound", "alarms", "proved", "s each")
    totals: Counter[str] = Counter()
    for file in files:
        row: Counter[str] = Counter()
        start = time.perf_counter()
        for case in file.CASES:
            report = case.audit(fault=True)
            lines, marked = case_module.named(report), case.marked()
            kinds = [finding.kind for finding in report.findings]
            first = next((line for finding in report.findings for line in finding.lines), "")
            row["faulty"] += 1
            row["named"] += case.kind in kinds and bool(marked & set(lines))
            row["first"] += bool(first) and bool(marked & set(case_module.places(first)))
            sound = case.audit(fault=False)
            row["alarms"] += not sound.ok
            row["proved"] += sound.proof is not None and not sound.proof.why
        each = (time.perf_counter() - start) / max(2 * row["faulty"], 1)
        totals += row
        _add(table, file.__name__.removeprefix("cases_"), row, f"{each:.2f}")
    _add(table, "all", totals, "")
    console.print("[bold]audit[/] (faulty parallel programs, each beside its sound twin)")
    console.print(table)


def _add(table: Table, name: str, row: Counter[str], seconds: str) -> None:
    figures = (row["faulty"], row["named"], row["first"], row["faulty"], row["alarms"], row["proved"])
    table.add_row(name, *map(str, figures), seconds)
