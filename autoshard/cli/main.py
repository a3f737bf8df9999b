"""The ``autoshard`` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from autoshard._version import __version__
from autoshard.capture.garbage import collected_rarely
from autoshard.cli.advise import check_config_command
from autoshard.cli.audit import audit_command
from autoshard.cli.check import check_command
from autoshard.cli.compile import compile_command
from autoshard.cli.diff import diff_command
from autoshard.cli.explain import explain_command
from autoshard.cli.export import export_command
from autoshard.cli.inspect import inspect_command
from autoshard.cli.output import print_error
from autoshard.cli.plan import plan_command
from autoshard.cli.profile import profile_command
from autoshard.cli.run import run_command
from autoshard.cli.simulate import simulate_command
from autoshard.cli.validate import validate_command
from autoshard.cli.verify import verify_command
from autoshard.errors import UsageError

#: of wrong options and arguments; typer has a copy of click in some versions, and names it nowhere
_USAGE: type[Any] = typer.BadParameter.__mro__[1]


@contextmanager
def _worded() -> Iterator[None]:
    """Wrong options and arguments in the words of all other errors."""
    try:
        yield
    except _USAGE as error:
        what, why = error.format_message().rstrip("."), ""
        if isinstance(error, typer.BadParameter):
            what, _, why = what.partition(": ")
        hint = f"{error.ctx.command_path} --help" if error.ctx else ""
        print_error(UsageError(what[:1].lower() + what[1:], why=why, hint=hint))
        raise typer.Exit(UsageError.exit_code) from None


class _Commands(TyperGroup):
    """The commands, with errors of their options in the words of all others."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args:
            return super().parse_args(ctx, args)  # help
        with _worded():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _worded():
            return super().invoke(ctx)


app = typer.Typer(
    name="autoshard",
    cls=_Commands,
    help="A PyTorch model and a device mesh in, one program per rank out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("check")(check_command)
app.command("check-config")(check_config_command)
app.command("plan")(plan_command)
app.command("compile")(compile_command)
app.command("verify")(verify_command)
app.command("audit")(audit_command)
app.command("inspect")(inspect_command)
app.command("diff")(diff_command)
app.command("explain")(explain_command)
app.command("export")(export_command)
app.command("run")(run_command)
app.command("simulate")(simulate_command)
app.command("profile")(profile_command)
app.command("validate")(validate_command)


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


#: commands that start no process group and leave nothing open, so that nothing is lost by ending at once
_OFFLINE = frozenset(("check", "plan", "validate"))


def main() -> None:
    """Entry point.

    A command is short and makes millions of objects that live to its end: collecting garbage rarely saves a
    tenth of the time, and not taking everything apart at the end a second (measured on a plan of Llama-3 8B).
    """
    with collected_rarely():
        try:
            app()
        except SystemExit as end:
            if not _OFFLINE & set(sys.argv[1:2]) or not isinstance(end.code, int | None):
                raise
            end_at_once(end.code or 0)


def end_at_once(code: int) -> NoReturn:
    """End the process without taking its objects apart."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
