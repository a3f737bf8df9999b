"""``autoshard inspect``: read a program, whole or for one rank, or the graph after any pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.cli import options as opt
from autoshard.cli.output import print_json, reporting, stdout

if TYPE_CHECKING:
    from autoshard.cluster import Cluster

AfterOption = Annotated[
    str | None,
    typer.Option("--after", metavar="PASS", help="the graph after a pass (060_bucket, 060, bucket)"),
]
RankOption = Annotated[int | None, typer.Option("--rank", min=0, help="with the local shapes of this rank")]
SegmentOption = Annotated[str | None, typer.Option("--segment", help="only this segment")]
PricesOption = Annotated[
    str | None, typer.Option("--cluster", metavar="NAME|FILE", help="prices [default: those planned with]")
]


def inspect_command(
    folder: opt.FolderArgument,
    after: AfterOption = None,
    rank: RankOption = None,
    segment: SegmentOption = None,
    cluster: PricesOption = None,
    json: opt.JsonOption = False,
    debug: opt.DebugOption = False,
) -> None:
    """Print a program with the cost and the reason of every op."""
    with reporting(debug):
        from autoshard.errors import UsageError
        from autoshard.program.store import load_program
        from autoshard.report.inspect import View, annotated, as_json, dump_after, pass_name

        program = load_program(folder, only_read=True)
        if after is not None:
            if rank is not None:
                raise UsageError(
                    "--after and --rank exclude each other", why="dumps of passes have global shapes"
                )
            text = dump_after(program, after, segment)
            if json:
                print_json({"command": "inspect", "after": pass_name(program, after), "text": text})
            else:
                print_code(text)
            return
        prices = _prices(program.plan, cluster)
        view = View(rank, segment)
        if json:
            print_json({"command": "inspect", "folder": str(folder), **as_json(program, prices, view)})
        else:
            print_code(annotated(program, prices, view))


def _prices(plan: str, named: str | None) -> Cluster:
    from autoshard.cluster import load_cluster
    from autoshard.errors import UsageError
    from autoshard.search.plan_json import plan_from_json

    name = named or plan_from_json(plan).cluster
    try:
        return load_cluster(name)
    except UsageError:
        if named is not None:
            raise
        raise UsageError(
            f"the program was planned with the cluster {name}, which the catalog does not have",
            hint="pass --cluster FILE",
        ) from None


def print_code(text: str) -> None:
    """Python, coloured if someone looks; lines are never cut or wrapped by us."""
    console = stdout()
    if not console.is_terminal:
        print(text, end="")
        return
    from rich.syntax import Syntax

    console.print(Syntax(text, "python", theme="ansi_dark").highlight(text), end="", soft_wrap=True)
