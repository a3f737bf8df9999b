"""The planner's tables: cases from cold, then how depth and width count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from statistics import median

from rich.console import Console
from rich.table import Table

from autoshard.ir.units import seconds_text
from benchmarks.cases import CASES, DEPTH, DEPTH_GIVEN, DEPTH_GOAL, WIDTH, WIDTH_GOAL, Case
from benchmarks.planning import PlanningRow, by_turns, measure, median_of

Measure = Callable[[Case], PlanningRow]


def print_planning(console: Console, run: Measure = median_of, cases: Sequence[Case] = CASES) -> None:
    """Cases of `bench.cases`, each measured from cold."""
    runs = max((c.runs for c in cases), default=0)
    console.print(
        f"[bold]planning[/] (fresh processes, bf16 on h100-dgx, medians of {runs} unless said; "
        "whatever else the machine does counts, too)"
    )
    table = Table(
        "case",
        "GPUs",
        "s",
        "capture + search",
        "process s",
        "GiB",
        "plan",
        "step",
        "MFU",
        "gap",
        "best by hand",
        "goals",
    )
    measured = [(case, run(case)) for case in cases]
    for case, row in measured:
        table.add_row(
            case.name + (f" ({case.runs} run)" if case.runs == 1 else ""),
            f"{case.devices:,}",
            f"{row.planning_s:.1f}",
            f"{row.capture_s:.1f} + {row.search_s:.1f}",
            f"{row.process_s:.1f}",
            f"{row.peak_gib:.2f}",
            f"{row.mesh} x{row.microbatches}",
            seconds_text(row.step_s),
            f"{row.mfu:.1%}",
            f"{row.gap:.1%}",
            _baseline(case, row),
            goals_text(case, row),
        )
    console.print(table)
    console.print(
        "s: from a model that was built to its plan, which the goals are for; process s: with imports of "
        "torch and transformers and building the model"
    )
    console.print("best by hand: the fastest baseline at its best, its step over the plan's; x: microbatches")
    for case, row in measured:
        if row.baselines_why:
            console.print(f"no baseline of {case.name} on {case.devices:,} GPUs: {row.baselines_why}")


def print_scaling(console: Console, run: Measure = measure) -> None:
    """How seconds grow with layers and with devices: medians of ratios, both run by turns."""
    for name, pair, goal in (
        ("depth", DEPTH, DEPTH_GOAL),
        ("depth", DEPTH_GIVEN, DEPTH_GOAL),
        ("width", WIDTH, WIDTH_GOAL),
    ):
        for line in scaling_lines(name, pair, by_turns(pair, run), goal):
            console.print(line)


def scaling_lines(
    name: str, pair: Sequence[Case], rows: Sequence[tuple[PlanningRow, PlanningRow]], goal: float
) -> Iterator[str]:
    """The larger case against the smaller: once captured, and as a whole. pair, rows: larger first."""
    search = median(large.search_s / small.search_s for large, small in rows)
    whole = median(large.process_s / small.process_s for large, small in rows)
    searched, took = (
        ", ".join(f"{median(get(row[k]) for row in rows):.2f} s" for k in (0, 1))
        for get in (attrgetter("search_s"), attrgetter("process_s"))
    )
    yield (
        f"{name}: {pair[0].name} against {pair[1].name}: once captured {search:.2f} x ({searched}), "
        f"the whole process {whole:.2f} x ({took}); medians of {len(rows)} by turns; goal {goal:.1f}, "
        f"{_verdict(search <= goal)} once captured, {_verdict(whole <= goal)} as a whole"
    )


def goals_text(case: Case, row: PlanningRow) -> str:
    """``5 s met, 1 GiB met``; "" without goals."""
    pairs = ((case.goal_s, "s", row.planning_s), (case.goal_gib, "GiB", row.peak_gib))
    return ", ".join(
        f"{goal:g} {unit} {_verdict(got <= goal)}" for goal, unit, got in pairs if goal is not None
    )


def _baseline(case: Case, row: PlanningRow) -> str:
    if case.mesh:
        return ""
    return f"{row.baseline} {row.baseline_ratio:.2f} x" if row.baseline else "none can be used"


def _verdict(good: bool) -> str:
    return "met" if good else "missed"
