"""``autoshard verify``: all ranks of a program against the model itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.cli import options as opt
from autoshard.cli.models import model_of
from autoshard.cli.output import Progress, memory_of, print_json, print_table, reporting, stdout, table
from autoshard.errors import UsageError, VerificationError

if TYPE_CHECKING:
    from autoshard.interop.targets import Built
    from autoshard.program.program import Program
    from autoshard.program.verify import Verification
    from autoshard.rules.user import Rules

StepsOption = Annotated[int, typer.Option("--steps", min=0, help="AdamW steps after the first backward")]
LimitOption = Annotated[
    str, typer.Option("--limit", metavar="2GiB", help="refuse models with more parameter bytes than this")
]


def verify_command(
    folder: opt.FolderArgument,
    steps: StepsOption = 3,
    seed: opt.SeedOption = 0,
    limit: LimitOption = "2GiB",
    target: opt.OtherTarget = None,
    rules: opt.RulesOption = None,
    json: opt.JsonOption = False,
    debug: opt.DebugOption = False,
) -> None:
    """Run all ranks of a program in this process on real data and compare with eager PyTorch."""
    with reporting(debug):
        from autoshard.api import split_inputs
        from autoshard.interop.targets import load_rules
        from autoshard.program.store import load_program
        from autoshard.program.verify import has_dropout, verify

        say = Progress()
        say(f"reading {folder}")
        own = load_rules(rules)
        program = load_program(folder, rules=own)
        _check_size(program, memory_of(limit) or 0)
        say(f"building {target or program.target} with real weights")
        built = model_of(program, folder, target, seed)
        one_rank = _for_one_rank(built, own, say) if has_dropout(program) else None
        args, kwargs = split_inputs(built.inputs)
        outcome = verify(
            program, built.model, args, kwargs, steps=steps, one_rank=one_rank, seed=seed, progress=say
        )
        if json:
            print_json(_document(outcome, str(folder)))
        else:
            _print(outcome)
        if not outcome.ok:
            raise _failure(outcome)


def _check_size(program: Program, limit: int) -> None:
    from autoshard.program.verify import parameter_bytes
    from autoshard.report.units import bytes_text

    size = parameter_bytes(program)
    if size > limit:
        raise UsageError(
            f"the model has {bytes_text(size)} of parameters, too much to verify here",
            why="verification holds about eight copies of them in this process; the limit is "
            f"{bytes_text(limit)}",
            hint="compile a smaller config of the same architecture on the same mesh and verify that, "
            "or raise --limit",
        )


def _for_one_rank(built: Built, rules: Rules, say: Progress) -> Program:
    """The program of the same model on one rank: it drops the same elements."""
    from autoshard import api

    say("the program has dropout: comparing with a program for one rank")
    planned = api.plan(
        built.model,
        "dp=1",
        example_inputs=built.inputs,
        replicate_unknown=True,
        rules=rules,
        progress=say,
    )
    return api.compile_analysed(planned)


def _document(outcome: Verification, folder: str) -> dict[str, object]:
    from math import isfinite

    return {
        "command": "verify",
        "folder": folder,
        "ok": outcome.ok,
        "mesh": outcome.mesh,
        "ranks": outcome.ranks,
        "steps": outcome.steps,
        "reference": outcome.reference,
        "tolerance": outcome.tolerance.error,
        "losses": list(outcome.losses),
        "quantised": [
            {
                "collective": r.kind,
                "bits": r.bits,
                "values": r.values,
                "mean_error": r.mean,
                "worst_error": r.worst,
                "worst": r.name,
            }
            for r in outcome.rounded
        ],
        "checks": [
            {"kind": c.kind, "tensor": c.name, "error": c.error if isfinite(c.error) else None, "ok": c.ok}
            for c in outcome.checks
        ],
    }


def _print(outcome: Verification) -> None:
    console = stdout()
    console.print(
        f"[bold]{outcome.mesh}[/]  {outcome.ranks} ranks in lockstep against {outcome.reference}, "
        f"relative errors, limit {outcome.tolerance.error:g}"
    )
    made = table("", "tensors", "worst", "at", "", right=(1, 2))
    for kind, checks in outcome.kinds().items():
        worst = max(checks, key=lambda c: c.error)
        bad = sum(not c.ok for c in checks)
        word = "[green]ok[/]" if not bad else f"[bold red]{bad} wrong[/]"
        made.add_row(kind, str(len(checks)), f"{worst.error:.1e}", worst.name, word)
    print_table(made)
    for r in outcome.rounded:
        what = "parameters gathered" if r.kind == "all_gather" else "gradients reduced"
        console.print(
            f"int{r.bits}    {r.values} {what}: relative error {r.mean:.1e} on average, {r.worst:.1e} "
            f"at worst ({r.name}), in the 2-norm",
            markup=False,
        )
    if outcome.losses:
        console.print("loss  " + "  ".join(f"{x:.6f}" for x in outcome.losses))
    if outcome.ok:
        console.print("[bold green]verified[/]")


def _failure(outcome: Verification) -> VerificationError:
    wrong = [c for c in outcome.checks if not c.ok]
    named = ", ".join(f"{c.kind} {c.name} ({c.error:.1e})" for c in wrong[:5])
    more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    return VerificationError(
        "the program does not compute what the model does: "
        f"{len(wrong)} of {len(outcome.checks)} tensors differ",
        where=named + more,
        hint="compile it again; if it stays wrong, report the target and the mesh",
    )
