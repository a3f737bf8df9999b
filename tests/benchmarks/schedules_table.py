"""Pipeline schedules side by side: how long their ranks are idle, and what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from autoshard.schedules.check import check, in_flight
from autoshard.schedules.registry import (
    SCHEDULES,
    default_chunks,
    default_slices,
    ideal_bubble_fraction,
    make,
    names,
)
from autoshard.schedules.spec import PipeSize
from autoshard.schedules.timeline import StageCosts, simulate

RANKS, MICROBATCHES = 8, (8, 16, 32, 64)


@dataclass(frozen=True)
class ScheduleRow:
    """A schedule of equal stages with F = I = W = 1 and B = 2 seconds a rank and microbatch, no sends.

    chunks: stages per rank. bubble: idle share of the step. ideal: the same by formula; None: there is none.
    inside: share of the step that a rank is idle between its first action and its last, the most of any rank.
    held: activations in flight at most, per rank; all stages of a rank for one microbatch are 1.
    """

    name: str
    ranks: int
    chunks: int
    microbatches: int
    bubble: float
    ideal: float | None
    inside: float
    held: tuple[float, ...]


def rows(ranks: int = RANKS, microbatches: Sequence[int] = MICROBATCHES) -> list[ScheduleRow]:
    """Every named schedule; those that may have one stage per rank or more, with two and four."""
    several = [n for n, spec in SCHEDULES.items() if spec.chunks is None and spec.default_chunks > 1]
    kinds = [(n, c) for n in names() for c in ((2, 4) if n in several else (default_chunks(n),))]
    kinds.append(("searched", 2))
    return [_row(name, ranks, m, chunks) for name, chunks in kinds for m in microbatches]


def _row(name: str, ranks: int, microbatches: int, chunks: int) -> ScheduleRow:
    slices = default_slices(name)
    schedule = make(name, ranks, microbatches, chunks, slices)
    check(schedule)
    timeline = simulate(schedule, StageCosts.uniform(ranks, chunks, slices=slices))
    return ScheduleRow(
        name,
        ranks,
        chunks,
        microbatches,
        bubble=timeline.bubble,
        ideal=ideal_bubble_fraction(name, PipeSize(ranks, microbatches, chunks, slices)),
        inside=max(timeline.gaps) / timeline.makespan,
        held=tuple(n / (chunks * slices) for n in in_flight(schedule)),
    )


def print_schedules(console: Console, found: Iterable[ScheduleRow]) -> None:
    """One line per schedule and number of stages per rank, all numbers of microbatches beside each other."""
    found = list(found)
    if not found:
        return
    counts = list(dict.fromkeys(row.microbatches for row in found))
    console.print(
        f"[bold]schedules[/] ({found[0].ranks} ranks, F = I = W = 1, B = 2, no sends; m microbatches; "
        "idle share of the step: simulated, (by formula), and the part of it in between the work of a rank; "
        "microbatches held: first rank … last rank)"
    )
    table = Table("schedule", "stages per rank", *(f"m = {m}" for m in counts))
    lines: dict[tuple[str, int], list[str]] = {}
    for row in found:
        ideal = "" if row.ideal is None else f" ({100 * row.ideal:.1f})"
        held = f"{row.held[0]:g} … {row.held[-1]:g}"
        cell = f"{100 * row.bubble:.1f} %{ideal}, in {100 * row.inside:.1f} %\nholds {held}"
        lines.setdefault((row.name, row.chunks), []).append(cell)
    for (name, chunks), cells in lines.items():
        table.add_row(name, str(chunks), *cells)
    console.print(table)
