"""Prints the longest lengths that were predicted beside those that were published."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from benchmarks.max_lengths import LongestLength


def print_lengths(console: Console, rows: Sequence[LongestLength]) -> None:
    table = Table(box=None, pad_edge=False)
    names = ("recipe", "published", "predicted", "ratio", "bound by", "nvidia-smi", "predicted ", "error")
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number in (0, 4) else "right")
    for row in rows:
        recipe, error = row.recipe, row.shown_error
        shown = (
            ("", "", "")
            if error is None
            else (f"{recipe.shown:.1f} GB", f"{row.shown:.1f} GB", f"{error:+.1%}")
        )
        table.add_row(
            recipe.name + "*" * recipe.host_full,
            f"{recipe.published:,}",
            f"{row.predicted:,}",
            f"{row.ratio:.2f}",
            row.bound,
            *shown,
        )
    console.print(table)
    console.print("* the host was full, by the source")
    off = [abs(row.ratio - 1) for row in rows]
    errors = [abs(row.shown_error) for row in rows if row.shown_error is not None]
    order = spearmanr([r.predicted for r in rows], [r.recipe.published for r in rows]).statistic
    near = sum(x <= 0.1 for x in off)
    console.print(
        f"\n{near} of {len(rows)} within 10 %, mean error {mean(off):.1%}, rank correlation {order:.3f}; "
        f"memory at the published length: mean error {mean(errors):.1%} of {len(errors)}",
        highlight=False,
    )
