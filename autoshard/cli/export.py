"""``autoshard export``: a stored plan in the words of another runtime."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from autoshard.cli import options as opt
from autoshard.cli.output import Progress, print_json, reporting, stdout
from autoshard.errors import UsageError

PlanFolder = Annotated[
    Path, typer.Argument(metavar="PLAN_DIR", help="a folder that `autoshard plan` wrote", show_default=False)
]
FormatOption = Annotated[
    str, typer.Option("--format", metavar="torch|tp-plan", help="a Python module, or JSON for transformers")
]
FileOption = Annotated[
    Path | None, typer.Option("-o", "--out", metavar="FILE", help="file to write [default: stdout]")
]
OverwriteFile = Annotated[bool, typer.Option("--overwrite", help="replace an older file")]


def export_command(
    plan: PlanFolder,
    format: FormatOption = "torch",
    out: FileOption = None,
    overwrite: OverwriteFile = False,
    rules: opt.RulesOption = None,
    json: opt.JsonOption = False,
    debug: opt.DebugOption = False,
) -> None:
    """Write a plan for torch's own parallel APIs, or as a tp_plan for transformers."""
    with reporting(debug):
        from autoshard.cli.folders import read_plan
        from autoshard.cli.opened import Opener
        from autoshard.interop.export import FORMATS, export

        if format not in FORMATS:
            raise UsageError(f"there is no format {format!r}", hint=f"--format {' or '.join(FORMATS)}")
        if out is not None:
            check_file(out, overwrite=overwrite)
        say = Progress()
        planned = Opener(rules, say).planned(*read_plan(plan))
        source = planned.source
        assert source is not None
        say("reading it by modules")
        inputs = source.args, source.kwargs
        exported = export(planned, format, model=source.model, example_inputs=inputs)
        if out is not None:
            write_atomically(out, exported.text)
        if json:
            place = str(out) if out else None
            document = {
                "command": "export",
                "format": format,
                "file": place,
                "remarks": list(exported.remarks),
            }
            print_json(document if out else {**document, "text": exported.text})
            return
        for remark in exported.remarks:
            say.note(remark)
        if out is None:
            print(exported.text, end="")
        else:
            stdout().print(f"written to {out}", markup=False)


def check_file(out: Path, *, overwrite: bool) -> None:
    """UsageError if something would be lost, or is no file."""
    if out.is_dir() or (out.exists() and not overwrite):
        raise UsageError(
            f"{out} exists already",
            why="it is a folder" if out.is_dir() else "files are not replaced unasked",
            hint="choose another file" + ("" if out.is_dir() else ", or pass --overwrite"),
        )


def write_atomically(out: Path, text: str) -> None:
    """Write a file that appears complete or, on any error, not at all. Raises UsageError if it cannot be."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, staging = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
    except OSError as error:
        raise UsageError(
            f"{out} cannot be written",
            why=f"{error.strerror or error}: {error.filename}",
            hint="choose a place that can be written to",
        ) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(staging, 0o644)
        os.replace(staging, out)
    except BaseException:
        Path(staging).unlink(missing_ok=True)
        raise
