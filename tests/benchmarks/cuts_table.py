"""What planned cuts and interleaving gain, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from autoshard.ir.units import seconds_text
from benchmarks import cuts, cuts_measured
from benchmarks.cuts import CutRow, Interleaving
from benchmarks.cuts_measured import CutMeasured


def print_cuts(
    console: Console, head: Sequence[CutRow], measured: CutMeasured, runs: Sequence[Interleaving]
) -> None:
    """All three tables."""
    print_head(console, head)
    print_measured(console, measured)
    print_interleaving(console, runs)


def print_head(console: Console, rows: Sequence[CutRow]) -> None:
    """One line per schedule."""
    console.print(
        f"[bold]planned cuts[/] (Llama-3 8B, vocabulary 128k, pp={cuts.RANKS} on H100s, "
        f"{cuts.MICROBATCHES} microbatches of {cuts.PIECE} x {cuts.SEQ}; simulated)"
    )
    table = Table("schedule", "stages per rank", "equal layers", "planned", "gain", "stages end with")
    for row in rows:
        table.add_row(
            row.schedule,
            str(row.chunks),
            "" if row.equal_s is None else seconds_text(row.equal_s),
            seconds_text(row.planned_s),
            _percent(row.gain),
            ", ".join(row.cuts),
        )
    console.print(table)


def print_measured(console: Console, found: CutMeasured) -> None:
    """Wall and processor seconds, with what was simulated."""
    m = cuts_measured
    console.print(
        f"[bold]planned cuts, measured[/] (Llama, {m.LAYERS} layers, hidden {m.HIDDEN}, "
        f"vocabulary {m.VOCAB}; 1F1B, {m.MICROBATCHES} microbatches of {m.PIECE} x {m.SEQ} in float32; "
        f"{m.RANKS} gloo processes of one thread on {found.cores} cores, taking turns; "
        f"losses differ by {found.loss_error:.0e}; stages end with {', '.join(found.row.cuts)})"
    )
    table = Table("", "equal layers", "planned", "equal / planned")
    equal = found.row.equal_s
    table.add_row(
        "simulated step",
        "" if equal is None else seconds_text(equal),
        seconds_text(found.row.planned_s),
        "" if equal is None else f"{equal / found.row.planned_s:.2f}",
    )
    table.add_row("step", seconds_text(found.equal_s), seconds_text(found.planned_s), f"{found.ratio:.2f}")
    table.add_row(
        "processor time of the busiest rank",
        seconds_text(found.equal_busy_s),
        seconds_text(found.planned_busy_s),
        f"{found.busy_ratio:.2f}",
    )
    console.print(table)
    if found.cores < m.RANKS:
        console.print(
            f"{m.RANKS} processes on {found.cores} cores wait for a core rather than for the slowest stage: "
            "the step then says little of the cut, the busiest rank still does"
        )


def print_interleaving(console: Console, rows: Sequence[Interleaving]) -> None:
    """One line per run; the gain that the paper reports stands above."""
    console.print(
        "[bold]interleaving[/] (Narayanan et al., SC'21, on A100s; everything computed again; simulated; the "
        "paper measures 10 % and more for figure 12, less at larger batches)"
    )
    table = Table(
        "run", "pipeline", "microbatches", "1F1B", "interleaved", "gain", "with planned cuts", "formula"
    )
    for row in rows:
        table.add_row(
            row.name,
            str(row.pipe),
            str(row.microbatches),
            seconds_text(row.plain_s),
            seconds_text(row.interleaved_s),
            _percent(row.gain),
            _percent(row.planned_gain),
            _percent(row.formula),
        )
    console.print(table)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:+.1f} %"
