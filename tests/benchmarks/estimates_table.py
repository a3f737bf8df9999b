"""Predicted against measured steps, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.estimates import EstimateRow, mean_error
from benchmarks.estimates_cases import RANKS

_MIB = 2**20


def print_estimates(console: Console, rows: Sequence[EstimateRow]) -> None:
    """One line per program, and the means of the errors' sizes."""
    console.print(
        f"[bold]estimates[/] (float32, {RANKS} gloo processes of one thread; forward and backward, medians; "
        "bytes of the fullest rank with the moments of AdamW)"
    )
    table = Table("program", "measured ms", "predicted ms", "error", "measured MiB", "predicted MiB", "error")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.measured.seconds * 1e3:.0f}",
            f"{row.seconds * 1e3:.0f}",
            f"{row.time_error:+.0%}",
            f"{row.measured.peak / _MIB:.1f}",
            f"{row.peak / _MIB:.1f}",
            f"{row.peak_error:+.1%}",
        )
    console.print(table)
    time, peak = (mean_error([getattr(r, f"{of}_error") for r in rows]) for of in ("time", "peak"))
    console.print(f"mean error of time {time:.1%}, of bytes {peak:.1%}", highlight=False)
