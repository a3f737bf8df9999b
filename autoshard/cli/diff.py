"""``autoshard diff``: decisions that differ between two plans or programs, and their effect on a step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.cli import options as opt
from autoshard.cli.output import Progress, print_json, print_table, reporting, stdout, table

if TYPE_CHECKING:
    from autoshard.report.diff import Decided, Diff, Figure

FirstFolder = Annotated[
    Path, typer.Argument(metavar="DIR_A", help="a plan folder or a program folder", show_default=False)
]
SecondFolder = Annotated[Path, typer.Argument(metavar="DIR_B", help="another one", show_default=False)]
AllOption = Annotated[bool, typer.Option("--all", help="list every op whose placement differs")]
#: ops that are listed without --all
_MOST_OPS = 12


def diff_command(
    a: FirstFolder,
    b: SecondFolder,
    cluster: opt.CostModelOption = None,
    rules: opt.RulesOption = None,
    all: AllOption = False,
    json: opt.JsonOption = False,
    debug: opt.DebugOption = False,
) -> None:
    """Compare two plans or programs: decisions, step time, memory and payloads; repeated layers once."""
    with reporting(debug):
        from autoshard.cli.inspect import prices_of
        from autoshard.cli.opened import Opener
        from autoshard.report.diff import Side, diff_of

        opener = Opener(rules, Progress(quiet=json))
        opened = [opener.open(folder) for folder in (a, b)]
        sides = [Side(str(o.folder), o.program, prices_of(o.program.plan, cluster)) for o in opened]
        diff = diff_of(*sides)
        if json:
            print_json({"command": "diff", "version": 2, **diff.as_json()})
        else:
            _print(diff, all)


def _print(diff: Diff, all: bool) -> None:
    console = stdout()
    for side, which in enumerate(("a", "b")):
        target = f"  {diff.targets[side]}" if diff.targets[side] else ""
        console.print(
            f"{which}  {diff.meshes[side]}  {diff.names[side]}{target}  cost model of {diff.clusters[side]}",
            markup=False,
        )
    for note in diff.notes:
        console.print("[yellow]note[/] ", end="")
        console.print(note, markup=False)
    if diff.identical:
        console.print(f"\nidentical: all {diff.identical_decisions} decisions", markup=False)
    console.print()
    _print_figures("metric", diff.figures)
    if diff.payloads:
        console.print()
        _print_figures("payload per rank and step", diff.payloads)
    _print_decisions("model-wide decision", diff.model_wide, len(diff.model_wide))
    _print_decisions("parameter placement", diff.parameters, len(diff.parameters))
    if diff.ops:
        _print_decisions("op placement", diff.ops, len(diff.ops) if all else _MOST_OPS)
    if not diff.identical:
        console.print(f"\nidentical: {diff.identical_decisions} decisions", markup=False)


def _print_figures(title: str, rows: tuple[Figure, ...]) -> None:
    figure_table = table(title, "a", "b", "b - a", "", right=(1, 2, 3, 4))
    for row in rows:
        figure_table.add_row(row.name, *_cells(row))
    print_table(figure_table)


def _cells(row: Figure) -> tuple[str, str, str, str]:
    if row.a is None or row.b is None:
        return *(("" if x is None else _text(x, row.unit)) for x in (row.a, row.b)), "", ""  # type: ignore[return-value]
    difference = row.b - row.a
    if not difference:
        return _text(row.a, row.unit), _text(row.b, row.unit), "", ""
    sign = "+" if difference > 0 else "-"
    share = _share(row.a, row.b) if row.a and row.unit != "%" else ""
    return _text(row.a, row.unit), _text(row.b, row.unit), sign + _text(abs(difference), row.unit), share


def _share(a: float, b: float) -> str:
    return f"{b / a - 1:+.1%}" if b < 10 * a else f"x {b / a:,.0f}"


def _text(value: float, unit: str) -> str:
    from autoshard.ir.units import bytes_text, seconds_text

    match unit:
        case "s":
            return seconds_text(value)
        case "B":
            return bytes_text(value)
        case "%":
            return f"{value:.1%}"
    return f"{value:,.0f}"


def _print_decisions(title: str, rows: tuple[Decided, ...], most: int) -> None:
    if not rows:
        return
    stdout().print()
    decision_table = table(title, "count", "a", "b", right=(1,))
    for row in rows[:most]:
        decision_table.add_row(row.what, str(row.count), row.a, row.b)
    if len(rows) > most:
        decision_table.add_row(f"... {len(rows) - most} more (--all)", "", "", "")
    print_table(decision_table)
