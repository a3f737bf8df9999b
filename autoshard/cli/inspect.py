"""``autoshard inspect``: print a program, all of it or for one rank, or the graph after any pass."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.cli import options as opt
from autoshard.cli.output import print_json, print_table, reporting, stdout, table
from autoshard.errors import UsageError

if TYPE_CHECKING:
    from autoshard.cluster import Cluster
    from autoshard.program.program import Program

AfterOption = Annotated[
    str | None,
    typer.Option("--after", metavar="PASS", help="the graph after a pass (060_bucket, 060, bucket)"),
]
RankOption = Annotated[int | None, typer.Option("--rank", min=0, help="show local shapes of this rank")]
SegmentOption = Annotated[str | None, typer.Option("--segment", help="only this segment")]
StageOption = Annotated[int | None, typer.Option("--stage", min=0, help="only this pipeline stage")]
TimelineOption = Annotated[
    bool, typer.Option("--timeline", help="the simulated pipeline schedule, and the memory of every rank")
]
SvgOption = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="write the timeline as a picture")
]
PerfettoOption = Annotated[
    Path | None,
    typer.Option("--perfetto", metavar="FILE", help="write the timeline as JSON for ui.perfetto.dev"),
]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="write everything as one page for a browser")
]
DotOption = Annotated[
    Path | None,
    typer.Option("--dot", metavar="FILE", help="write the graph, or that of --segment, for Graphviz"),
]


def inspect_command(
    folder: opt.FolderArgument,
    after: AfterOption = None,
    rank: RankOption = None,
    segment: SegmentOption = None,
    stage: StageOption = None,
    timeline: TimelineOption = False,
    svg: SvgOption = None,
    perfetto: PerfettoOption = None,
    html: HtmlOption = None,
    dot: DotOption = None,
    cluster: opt.CostModelOption = None,
    json: opt.JsonOption = False,
    debug: opt.DebugOption = False,
) -> None:
    """Print a program with the cost and the reason of every op, or the timeline of its step."""
    with reporting(debug):
        from autoshard.program.store import load_program
        from autoshard.report.inspect import InspectView, annotated, as_json, dump_after, pass_name

        wants_timeline = timeline or svg is not None or perfetto is not None
        given = {"--after": after, "--rank": rank, "--segment": segment, "--stage": stage}
        names = {name for name, value in given.items() if value is not None}
        _check_options(names, wants_timeline)
        pages = {"--html": html, "--dot": dot}
        _check_pages({k for k, path in pages.items() if path is not None}, names, wants_timeline)
        program = load_program(folder, only_read=True)
        if after is not None:
            text = dump_after(program, after, segment)
            if json:
                print_json({"command": "inspect", "after": pass_name(program, after), "text": text})
            else:
                print_code(text)
            return
        prices = prices_of(program.plan, cluster)
        if html is not None or dot is not None:
            _write_pages(program, prices, folder, html, dot, segment, json)
            return
        if wants_timeline:
            _show_timeline(program, prices, folder, svg, perfetto, json)
            return
        view = InspectView(rank, segment, stage)
        if json:
            print_json({"command": "inspect", "folder": str(folder), **as_json(program, prices, view)})
        else:
            print_code(annotated(program, prices, view))


def _check_options(given: set[str], timeline: bool) -> None:
    """UsageError for options that do not go together."""
    if timeline and given:
        raise UsageError(
            f"--timeline and {min(given)} exclude each other", why="the timeline is that of all ranks"
        )
    for other, why in (
        ("--rank", "dumps of passes have global shapes"),
        ("--stage", "passes have the whole model; one of its segments is shown with --segment"),
    ):
        if {"--after", other} <= given:
            raise UsageError(f"--after and {other} exclude each other", why=why)


def _check_pages(pages: set[str], given: set[str], timeline: bool) -> None:
    """UsageError for options that do not go with a page."""
    others = given - ({"--segment"} if pages == {"--dot"} else set())
    if pages and (others or timeline):
        other = min(others) if others else "--timeline"
        raise UsageError(f"{min(pages)} and {other} exclude each other", why="it shows the whole program")


def _write_pages(
    program: Program,
    prices: Cluster,
    folder: Path,
    html: Path | None,
    dot: Path | None,
    segment: str | None,
    json: bool,
) -> None:
    """Write the page and the graph that are asked for."""
    from autoshard.report.document import document
    from autoshard.report.dot import dot_text
    from autoshard.report.html import page

    data = document(program, prices)
    written: dict[str, str] = {}
    if html is not None:
        write_text(html, page(data), "--html")
        written["html"] = str(html)
    if dot is not None:
        write_text(dot, dot_text(data, segment), "--dot")
        written["dot"] = str(dot)
    if json:
        print_json({"command": "inspect", "folder": str(folder), "written": written, "document": data})
        return
    for path in written.values():
        stdout().print(f"written {path}", markup=False)


def _show_timeline(
    program: Program, prices: Cluster, folder: Path, svg: Path | None, perfetto: Path | None, json: bool
) -> None:
    """Print the simulated step, and write its pictures."""
    from json import dumps

    from autoshard.report import gantt
    from autoshard.report.stage_table import (
        COLUMNS,
        RIGHT,
        memory_text,
        stage_rows,
        step_text,
        timeline_json,
    )
    from autoshard.simulate.step import estimate_step

    estimate = estimate_step(program, prices)
    written: dict[str, str] = {}
    if svg is not None:
        write_text(svg, gantt.svg(estimate.timeline), "--svg")
        written["svg"] = str(svg)
    if perfetto is not None:
        write_text(perfetto, dumps(gantt.perfetto(estimate.timeline)) + "\n", "--perfetto")
        written["perfetto"] = str(perfetto)
    if json:
        document = {
            "command": "inspect",
            "folder": str(folder),
            "mesh": program.full_mesh,
            "cluster": prices.name,
            "microbatches": program.microbatches,
            "timeline": timeline_json(estimate),
            "written": written,
        }
        print_json(document)
        return
    console = stdout()
    count = f"{program.microbatches} microbatch{'es' * (program.microbatches > 1)}"
    console.print(f"[bold]{program.full_mesh}[/]  {count}, cost model of {prices.name}\n")
    console.print(gantt.text(estimate.timeline, console.width if console.is_terminal else 100))
    console.print("[dim]update: gradients are reduced over ranks and stages, then AdamW[/]")
    if program.mesh != program.full_mesh:
        console.print(f"[dim]one row per pipeline rank; all ranks of {program.mesh} in it do the same[/]")
    console.print()
    stage_table = table(*COLUMNS, right=RIGHT)
    for row in stage_rows(estimate):
        stage_table.add_row(*row)
    print_table(stage_table)
    console.print(f"\nstep time  {step_text(estimate)}", markup=False)
    console.print(f"memory     {memory_text(estimate, prices)}", markup=False)
    for what in program.alone:
        console.print(f"per microbatch, not over the global batch: {what}", markup=False)
    for path in written.values():
        console.print(f"written {path}", markup=False)


def write_text(path: Path, text: str, option: str) -> None:
    """UsageError if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written", where=option, why=error.strerror or str(error)
        ) from None


def prices_of(plan: str, named: str | None) -> Cluster:
    """The cluster that is named, or the one that the program was planned for; where its links were measured,
    with the ranks on the devices that the plan says."""
    from autoshard.cluster import load_cluster
    from autoshard.planner.lowering import laid_for
    from autoshard.search.plan.plan_json import plan_from_json

    planned = plan_from_json(plan) if plan or named is None else None
    name = named or (planned.cluster if planned is not None else "")
    try:
        machine = load_cluster(name)
    except UsageError:
        if named is not None:
            raise
        raise UsageError(
            f"the program was planned with the cluster {name}, which the catalog does not have",
            hint="pass --cluster FILE",
        ) from None
    return machine if planned is None or machine.links is None else laid_for(planned, machine)


def print_code(text: str) -> None:
    """Python, coloured if someone looks; lines are never cut or wrapped by us."""
    console = stdout()
    if not console.is_terminal:
        print(text, end="")
        return
    from rich.syntax import Syntax

    console.print(Syntax(text, "python", theme="ansi_dark").highlight(text), end="", soft_wrap=True)
