"""``autoshard audit``: a parallel program that is not ours, compared with its model of one device."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from autoshard.cli import options as opt
from autoshard.cli.output import Progress, print_json, reporting, stdout
from autoshard.errors import VerificationError

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="module:callable or file.py:callable that returns (model, step, rank_step)",
        show_default=False,
    ),
]
RanksOption = Annotated[
    str, typer.Option("--ranks", metavar="dp=2,tp=2", help="mesh of the ranks, row-major", show_default=False)
]
ToleranceOption = Annotated[
    float | None,
    typer.Option("--tolerance", min=0.0, help="largest relative error of a gradient", show_default=False),
]
ProveOption = Annotated[
    bool, typer.Option("--prove/--no-prove", help="run sound steps in exact arithmetic as well")
]


def audit_command(
    target: TargetArgument,
    ranks: RanksOption,
    tolerance: ToleranceOption = None,
    prove: ProveOption = True,
    seed: opt.SeedOption = 0,
    json: opt.JsonOption = False,
    debug: opt.DebugOption = False,
) -> None:
    """Run the step of every rank in this process, in float64, and name what differs from one device.

    Where nothing does, both steps run once more in exact arithmetic: a proof that their formulas are equal.
    """
    with reporting(debug):
        from autoshard.auditing.session import audit_target

        say = Progress(quiet=json)
        say(f"building and running {target} on {ranks}")
        report = audit_target(target, ranks, tolerance=tolerance, seed=seed, prove=prove)
        if json:
            print_json({"command": "audit", "target": target, "ok": report.ok, **asdict(report)})
        else:
            stdout().print(report.text(), markup=False)
        if not report.ok:
            raise typer.Exit(VerificationError.exit_code)
