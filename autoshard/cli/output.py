"""What the commands print: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from autoshard.errors import AutoshardError, UsageError

SCHEMA = 2
#: what a shell gives for a command that Ctrl-C ended
INTERRUPTED = 130


def stdout() -> Console:
    """For results. Made when needed, since tests and pipes replace the streams."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)


def stderr() -> Console:
    """For progress and errors."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


@contextmanager
def reporting(debug: bool) -> Iterator[None]:
    """Errors of autoshard as their own text and exit code; with ``debug``, as they are."""
    try:
        yield
    except AutoshardError as error:
        if debug:
            raise
        print_error(error)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        stderr().print("[bold red]interrupted:[/] nothing was written")
        raise typer.Exit(INTERRUPTED) from None


def print_error(error: AutoshardError) -> None:
    """Under torchrun, rank 0 says it all and the others one line."""
    rank = int(os.environ.get("RANK", 0))
    console = stderr()
    if rank:
        console.print(f"rank {rank}: {error.what}", markup=False)
        return
    head, *rest = str(error).splitlines()
    console.print("[bold red]error:[/] ", end="")
    console.print(head, markup=False)
    for line in rest:
        console.print(line, markup=False)


class Progress:
    """Lines on stderr, each with the seconds since the command began."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.start, self.quiet = time.perf_counter(), quiet

    def __call__(self, text: str) -> None:
        if not self.quiet:
            stderr().print(f"[dim]{time.perf_counter() - self.start:6.1f} s[/]  ", end="")
            stderr().print(text, markup=False)

    def note(self, text: str) -> None:
        """Something the reader should know."""
        stderr().print("[yellow]note:[/] ", end="")
        stderr().print(text, markup=False)


def print_json(document: Mapping[str, Any]) -> None:
    """The one document of a command."""
    print(json.dumps({"schema": SCHEMA, **document}, indent=2, allow_nan=False))


def table(*columns: str, title: str | None = None, right: tuple[int, ...] = ()) -> Table:
    """A table without frames; ``right``: columns of numbers."""
    result = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        result.add_column(
            column, justify="right" if number in right else "left", header_style="dim", overflow="fold"
        )
    return result


def print_table(rows: Table) -> None:
    """Folded to fit a terminal, as wide as it needs to be in a pipe or a file."""
    console = stdout()
    width = console.width if console.is_terminal else 1000
    Console(file=sys.stdout, highlight=False, width=width).print(rows)


def memory_of(text: str | None) -> int | None:
    """Bytes of a ``--memory`` option."""
    if text is None:
        return None
    from autoshard.ir.units import parse_bytes

    try:
        return parse_bytes(text)
    except (ValueError, OverflowError):
        raise UsageError(
            f"--memory {text} is not a size", hint="for instance 16GiB, 80GB or 512MiB"
        ) from None
