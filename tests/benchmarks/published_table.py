"""The table of `compare`, and what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from autoshard.ir.units import seconds_text

if TYPE_CHECKING:
    from benchmarks.published import Comparison
    from benchmarks.published_programs import Programs
    from benchmarks.published_rows import Skipped


def comparisons_table(found: Sequence[Comparison]) -> Table:
    """One row per comparison; ``*`` marks published plans over our count of memory."""
    table = Table("run", "GPUs", "published plan", "its step", "measured", "our plan", "step", "ratio")
    for c in sorted(found, key=lambda c: c.row.id):
        row = c.row
        pieces = row.batch // row.micro
        ratio = "" if c.ratio is None else f"{c.ratio:.3f}" + (" SLOWER" if c.slower else "")
        table.add_row(
            row.id,
            str(row.devices),
            f"{row.name} x{pieces} {row.recompute}" + ("" if c.fits else " *"),
            seconds_text(c.published_s),
            seconds_text(row.seconds),
            c.why or f"{c.mesh} x{c.microbatches}",
            "" if c.ours_s is None else seconds_text(c.ours_s),
            ratio,
        )
    return table


def print_comparisons(console: Console, found: Sequence[Comparison], skipped: Sequence[Skipped]) -> None:
    """The table, its summary, and the counts of what was skipped by reason."""
    console.print(comparisons_table(found))
    over = [c for c in found if not c.fits]
    ratios = [c.ratio for c in found if c.fits and c.ratio is not None]
    console.print(
        "both steps are predictions of one model of cost; x: microbatches; *: over our count of memory, so "
        f"priced without a limit, which our plan keeps ({len(over)} rows, not in the figures below)"
    )
    if ratios:
        console.print(
            f"{len(ratios)} rows that fit: our step over the published one, median {median(ratios):.3f}, "
            f"least {min(ratios):.3f}, most {max(ratios):.3f} (goal: at most 1)"
        )
    for c in (c for c in found if c.slower):
        console.print(f"[red]slower than published[/]: {c.row.id} {c.row.name}, ours {c.mesh or c.why}")
    _print_skipped(console, skipped)


def programs_table(found: Sequence[Programs]) -> Table:
    """One row per comparison of programs; ``*`` marks published plans whose programs do not fit."""
    table = Table("run", "GPUs", "published plan", "simulated", "measured", "our plan", "simulated", "ratio")
    for p in sorted(found, key=lambda p: p.row.id):
        row = p.row
        table.add_row(
            row.id,
            str(row.devices),
            f"{row.name} x{row.batch // row.micro} {row.recompute}" + ("" if p.fits else " *"),
            seconds_text(p.published_s),
            seconds_text(row.seconds),
            f"{p.mesh} x{p.microbatches}",
            seconds_text(p.ours_s),
            f"{p.ratio:.3f}" + (" SLOWER" if p.slower else ""),
        )
    return table


def print_programs(console: Console, found: Sequence[Programs], skipped: Sequence[Skipped]) -> None:
    """The table, its summary, and the counts of what was skipped by reason."""
    console.print(programs_table(found))
    ratios = [p.ratio for p in found if p.fits]
    console.print(
        f"both steps are simulations of programs; x: microbatches; *: its simulated peak is over the memory, "
        f"which ours is not ({len(found) - len(ratios)} rows, not in the figures below)"
    )
    if ratios:
        good = sum(not p.slower for p in found if p.fits)
        console.print(
            f"{len(ratios)} rows that fit: our step over the published one, median {median(ratios):.3f}, "
            f"least {min(ratios):.3f}, most {max(ratios):.3f}; {good} of {len(ratios)} at most 1 (goal: all)"
        )
    _print_skipped(console, skipped)


def _print_skipped(console: Console, skipped: Sequence[Skipped]) -> None:
    for why, count in Counter(s.why for s in skipped).most_common():
        studies = Counter(s.study for s in skipped if s.why == why)
        names = ", ".join(f"{name} {n}" for name, n in studies.most_common())
        console.print(f"skipped {count}: {why} ({names})", soft_wrap=True)
