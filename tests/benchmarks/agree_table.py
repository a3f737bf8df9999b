"""The table of `benchmarks.agree`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.agree import APART, FASTER, AgreeRow


def row_text(row: AgreeRow) -> str:
    """A case in a line, for whoever waits."""
    if row.reason:
        return f"{row.case}: {row.reason}"
    best = "nothing else fits"
    if row.best is not None:
        other, share = row.best
        best = f"{other} {share:+.1%}"
    seconds = f"{row.step:.4g} s, simulated {row.simulated:.4g} s ({row.ratio:.3f} x)"
    return f"{row.case}: {row.mesh}, {seconds}; {best}"


def print_agreement(console: Console, rows: Sequence[AgreeRow]) -> None:
    """A line per case that has a plan, and what came of all of them."""
    table = Table("case", "plan", "search s", "simulated s", "ratio", "best by hand", "faster by")
    planned = [row for row in rows if not row.reason]
    for row in planned:
        other, share = ("nothing fits", "") if row.best is None else (str(row.best[0]), f"{row.best[1]:+.1%}")
        figures = f"{row.step:.4g}", f"{row.simulated:.4g}", f"{row.ratio:.3f}"
        table.add_row(str(row.case).strip(), row.mesh, *figures, other, share)
    console.print(table)
    console.print(agreement_line(rows), highlight=False)


def agreement_line(rows: Sequence[AgreeRow]) -> str:
    """How often search and simulation disagree."""
    planned = [row for row in rows if not row.reason]
    tried = sum(len(row.simulated_of) for row in planned)
    return (
        f"{len(planned)} plans ({len(rows) - len(planned)} refused) against {tried} by hand: search and "
        f"simulation differ by more than {APART:.0%} in {sum(r.apart for r in planned)}, "
        f"one by hand is more than {FASTER:.0%} faster in {sum(r.beaten for r in planned)}"
    )
