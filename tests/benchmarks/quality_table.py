"""The table of `quality_of`."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from autoshard.ir.units import bytes_text, seconds_text
from benchmarks.quality import Quality


def print_quality(console: Console, found: Iterable[Quality]) -> None:
    """Per case and budget: chosen, best of all, their ratio, and whether the claimed bound holds."""
    console.print("[bold]quality[/] (every mesh, microbatch and recomputation, against the search)")
    table = Table("case", "ranks", "cluster", "budget", "chosen", "best", "ratio", "bound", "solved")
    rows = list(found)
    for q in rows:
        table.add_row(
            q.case.name,
            str(q.case.devices),
            q.case.cluster,
            bytes_text(q.budget),
            _plan(q.chosen, q.chosen_mesh),
            _plan(q.best, q.best_mesh),
            "" if q.ratio is None else f"{q.ratio:.4f}",
            "holds" if q.bound_holds else "BROKEN",
            str(q.tried),
        )
    console.print(table)
    ratios = [q.ratio for q in rows if q.ratio is not None]
    if ratios:
        best = sum(r <= 1 + 1e-9 for r in ratios)
        console.print(f"{best} of {len(ratios)} are the best there is; worst ratio {max(ratios):.4f}")
    for q in rows:
        if (q.chosen is None) != (q.best is None):
            console.print(f"[red]only one side fits[/]: {q.case.name} in {bytes_text(q.budget)}")


def _plan(seconds: float | None, mesh: str) -> str:
    return "does not fit" if seconds is None else f"{seconds_text(seconds)} {mesh}"
