"""The ``autoshard`` command."""

from __future__ import annotations

from typing import Annotated

import typer

from autoshard._version import __version__
from autoshard.cli.check import check_command
from autoshard.cli.compile import compile_command
from autoshard.cli.export import export_command
from autoshard.cli.inspect import inspect_command
from autoshard.cli.plan import plan_command
from autoshard.cli.profile import profile_command
from autoshard.cli.run import run_command
from autoshard.cli.verify import verify_command

app = typer.Typer(
    name="autoshard",
    help="A PyTorch model and a device mesh in, one program per rank out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("check")(check_command)
app.command("plan")(plan_command)
app.command("compile")(compile_command)
app.command("verify")(verify_command)
app.command("inspect")(inspect_command)
app.command("export")(export_command)
app.command("run")(run_command)
app.command("profile")(profile_command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"autoshard {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point."""
    app()
