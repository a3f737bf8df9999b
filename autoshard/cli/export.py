"""``autoshard export``: a stored plan in the words of another runtime."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.cli import options as opt
from autoshard.cli.output import Progress, print_json, reporting, stdout
from autoshard.errors import UsageError

if TYPE_CHECKING:
    from autoshard.interop.targets import BuiltModel
    from autoshard.planner.planning import Planned

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
        from autoshard.interop.export import FORMATS, export

        if format not in FORMATS:
            raise UsageError(f"there is no format {format!r}", hint=f"--format {' or '.join(FORMATS)}")
        if out is not None:
            check_file(out, overwrite=overwrite)
        say = Progress()
        planned, built = _planned(plan, rules, say)
        say("reading it by modules")
        exported = export(planned, format, model=built.model, example_inputs=built.inputs)
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


def _planned(folder: Path, rules: Path | None, say: Progress) -> tuple[Planned, BuiltModel]:
    """A stored plan with its model, which is captured again."""
    from autoshard.capture.capture import capture
    from autoshard.cli.folders import read_plan
    from autoshard.cluster import load_cluster
    from autoshard.interop.targets import build, load_rules
    from autoshard.planner.analysis import analyse
    from autoshard.planner.planning import Planned
    from autoshard.runtime.arguments import split_inputs

    stored, request = read_plan(folder)
    custom_rules = load_rules(rules)
    say(f"building {request.target}")
    built = build(request.target, batch=request.inputs.get("batch"), seq=request.inputs.get("seq"))
    args, kwargs = split_inputs(built.inputs)
    say("capturing")
    joint = capture(built.model, args, kwargs)
    analysis = analyse(joint, replicate_unknown=bool(stored.replicated), rules=custom_rules, progress=say)
    return Planned(stored, analysis, load_cluster(stored.cluster)), built


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
