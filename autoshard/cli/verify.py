"""``autoshard verify``: a program proved without running it, then run against the model itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.cli import options as opt
from autoshard.cli.models import model_of
from autoshard.cli.output import Progress, memory_of, print_json, print_table, reporting, stdout, table
from autoshard.errors import UsageError, VerificationError

if TYPE_CHECKING:
    from pathlib import Path

    from autoshard.cluster import Cluster
    from autoshard.program.program import Program
    from autoshard.rules.user import Rules
    from autoshard.verify.lockstep import Verification
    from autoshard.verify.result import StaticReport
    from autoshard.verify.scaled_down_model import Twin

StepsOption = Annotated[int, typer.Option("--steps", min=0, help="AdamW steps after the first backward")]
LimitOption = Annotated[
    str,
    typer.Option("--limit", metavar="2GiB", help="models with more bytes of parameters are not run"),
]
StaticOption = Annotated[
    bool, typer.Option("--static", help="only prove, do not run: seconds for thousands of ranks")
]
LockstepOption = Annotated[bool, typer.Option("--lockstep", help="run all ranks even if a rule is broken")]
TwinOption = Annotated[
    bool, typer.Option("--twin", help="run a scaled-down model of the same architecture instead")
]
ModelOption = Annotated[
    bool, typer.Option("--recapture", help="capture the model again and compare it with the stored one")
]


def verify_command(
    folder: opt.FolderArgument,
    static: StaticOption = False,
    lockstep: LockstepOption = False,
    twin: TwinOption = False,
    recapture: ModelOption = False,
    cluster: opt.CostModelOption = None,
    steps: StepsOption = 3,
    seed: opt.SeedOption = 0,
    limit: LimitOption = "2GiB",
    target: opt.OtherTarget = None,
    rules: opt.RulesOption = None,
    json: opt.JsonOption = False,
    debug: opt.DebugOption = False,
) -> None:
    """Prove what can be proved of all ranks; then run them in this process on real data against PyTorch."""
    with reporting(debug):
        from autoshard.interop.targets import load_rules
        from autoshard.program.store import load_program

        if static + lockstep + twin > 1:
            raise UsageError("--static, --lockstep and --twin exclude each other", hint="give one of them")
        say = Progress(quiet=json)
        say(f"reading {folder}")
        custom_rules = load_rules(rules)
        program = load_program(folder, rules=custom_rules)
        limit_bytes = memory_of(limit) or 0
        if lockstep:
            _check_size(program, limit_bytes)
        proved = _proved(program, custom_rules, cluster, say)
        document: dict[str, object] = {"command": "verify", "folder": str(folder), "ok": proved.ok}
        if not json:
            _print_static(proved, program.allow)
        if recapture:
            _check_model(program, folder, target, custom_rules, say)
        outcome, small = None, None
        if lockstep or (not static and not twin and proved.ok and _runs(program, limit_bytes)):
            outcome = _run(program, folder, custom_rules, target, steps, seed, say)
            document |= _document(outcome)
        elif not static and proved.ok:
            small = _twin(program, folder, target, steps, seed, say, needed=twin)
            if small is None:
                say.note(_not_run(program, limit_bytes))
            else:
                document |= _document(small.outcome) | {"scaled_down": _twin_document(small)}
        ran = outcome or (small.outcome if small is not None else None)
        document["ok"] = proved.ok and (ran is None or ran.ok) and (small is None or small.static.ok)
        if json:
            from autoshard.report.verification import as_json

            print_json({**document, "static": as_json(proved)})
        elif ran is not None:
            if small is not None:
                _print_twin(small)
            _print(ran)
        if not proved.ok:
            raise _broken(proved)
        if small is not None and not small.static.ok:
            raise _broken(small.static)
        if ran is not None and not ran.ok:
            raise _failure(ran)
        if not json:
            missing = ", ".join(c.name for c in proved.uncovered)
            stdout().print("[bold green]verified[/]" + (f" but for: {missing}" if missing else ""))


def _proved(program: Program, rules: Rules, cluster: str | None, say: Progress) -> StaticReport:
    from autoshard.verify.static import verify_static

    say(f"proving {program.full_mesh} without running it")
    return verify_static(program, rules=rules, cluster=_machine(program, cluster))


def _machine(program: Program, named: str | None) -> Cluster | None:
    """Whose memory the program must fit: the cluster that is named, or that it was planned to fit."""
    from autoshard.cli.inspect import prices_of
    from autoshard.search.plan.plan_json import plan_from_json

    if named is None and plan_from_json(program.plan).budget is None:
        return None
    return prices_of(program.plan, named)


def _check_model(program: Program, folder: Path, other: str | None, rules: Rules, say: Progress) -> None:
    """Whether the model stored with the program is what its target is captured as now."""
    from autoshard.verify.model import same_model

    say("capturing the model again")
    same_model(program, _target_of(program, folder, other), rules)
    say("it is the model stored with the program")


def _target_of(program: Program, folder: Path, other: str | None) -> str:
    target = other or program.target
    if not target:
        raise UsageError(
            f"{folder} does not say which model it is for",
            why="it was compiled from Python, not by `autoshard compile`",
            hint="pass --target module:callable",
        )
    return target


def _runs(program: Program, limit_bytes: int) -> bool:
    """Whether the model is small enough to be run here."""
    from autoshard.verify.lockstep import parameter_bytes

    return parameter_bytes(program) <= limit_bytes


def _not_run(program: Program, limit_bytes: int) -> str:
    from autoshard.ir.units import bytes_text
    from autoshard.verify.lockstep import parameter_bytes

    size = bytes_text(parameter_bytes(program))
    return f"not run: {size} of parameters, limit {bytes_text(limit_bytes)}; only configs are scaled down"


def _twin(
    program: Program,
    folder: Path,
    target: str | None,
    steps: int,
    seed: int,
    say: Progress,
    *,
    needed: bool,
) -> Twin | None:
    """A small twin, verified; None if the target is no config, unless it was asked for."""
    from autoshard.interop.targets import is_config
    from autoshard.verify.scaled_down_model import verify_twin

    source = target or program.target
    if not needed and not is_config(source):
        return None
    return verify_twin(program, _target_of(program, folder, target), steps=steps, seed=seed, progress=say)


def _twin_document(twin: Twin) -> dict[str, object]:
    from autoshard.report.verification import as_json

    document = {"mesh": twin.mesh, "config": twin.config, "unchanged": list(twin.kept)}
    return {**document, "static": as_json(twin.static)}


def _print_twin(twin: Twin) -> None:
    console = stdout()
    sizes = ", ".join(f"{k}={v}" for k, v in twin.config.items())
    console.print(f"scaled-down model  {sizes}", markup=False)
    console.print(f"as in the program  {'; '.join(twin.kept)}", markup=False)


def _run(
    program: Program,
    folder: Path,
    rules: Rules,
    target: str | None,
    steps: int,
    seed: int,
    say: Progress,
) -> Verification:
    """All ranks in lockstep against the model."""
    from autoshard.runtime.arguments import split_inputs
    from autoshard.verify.lockstep import needs_one_rank, verify
    from autoshard.verify.single_rank import single_rank_program

    say(f"building {target or program.target} with real weights")
    built = model_of(program, folder, target, seed)
    one_rank = None
    if needs_one_rank(program):
        say("the program is not equal to the model itself: comparing with a program for one rank")
        one_rank = single_rank_program(program, built.model, built.inputs, rules, say)
    args, kwargs = split_inputs(built.inputs)
    return verify(program, built.model, args, kwargs, steps=steps, one_rank=one_rank, seed=seed, progress=say)


def _print_static(report: StaticReport, allowed: str) -> None:
    from autoshard.report.verification import lines_of, rows_of

    console = stdout()
    ranks = f"{report.ranks:,} rank{'s' * (report.ranks > 1)}"
    console.print(f"[bold]{report.mesh}[/]  {ranks} proved without running, {report.seconds:.1f} s")
    rule_table = table("rules", "checked", "", "")
    for name, count, note, outcome in rows_of(report):
        colour = "green" if outcome == "ok" else "yellow" if outcome == "not covered" else "bold red"
        rule_table.add_row(name, count, f"[{colour}]{outcome}[/]", note)
    print_table(rule_table)
    for finding in report.findings:
        console.print()
        for line in lines_of(finding):
            console.print(line, markup=False)
    if allowed:
        console.print(f"allowed: {allowed}. What is proved is the model with rows of experts grouped so.")
    console.print()


def _broken(report: StaticReport) -> VerificationError:
    """The first finding as an error; all of them stand on stdout."""
    from autoshard.report.verification import place_of

    first = report.findings[0]
    finding, more = first.finding, len(report.findings) - 1
    yours = f"; yours: {first.source}" if first.source else ""
    return VerificationError(
        f"{finding.what} (rule: {finding.rule})" + (f", and {more} more" if more else ""),
        where=place_of(first) + yours,
        why=finding.why,
        hint="compile it again; if it stays wrong, report the target and the mesh",
    )


def _check_size(program: Program, limit: int) -> None:
    from autoshard.ir.units import bytes_text
    from autoshard.verify.lockstep import parameter_bytes

    size = parameter_bytes(program)
    if size > limit:
        raise UsageError(
            f"the model has {bytes_text(size)} of parameters, too much to verify here",
            why="verification holds about eight copies of them in this process; the limit is "
            f"{bytes_text(limit)}",
            hint="compile a smaller config of the same architecture on the same mesh and verify that, "
            "or raise --limit",
        )


def _document(outcome: Verification) -> dict[str, object]:
    from math import isfinite

    return {
        "mesh": outcome.mesh,
        "ranks": outcome.ranks,
        "steps": outcome.steps,
        "reference": outcome.reference,
        "tolerance": outcome.tolerance.error,
        "losses": list(outcome.losses),
        "quantized": [
            {
                "collective": r.kind,
                "of": r.what,
                "bits": r.bits,
                "values": r.values,
                "mean_error": r.mean,
                "worst_error": r.worst,
                "worst": r.name,
                "share": r.share,
            }
            for r in outcome.rounded
        ],
        "cast_loss": list(outcome.cast_loss),
        "checks": [
            {
                "kind": c.kind,
                "tensor": c.name,
                "error": c.error if isfinite(c.error) else None,
                "noise": c.noise,
                "ok": c.ok,
            }
            for c in outcome.checks
        ],
    }


def _print(outcome: Verification) -> None:
    console = stdout()
    console.print(
        f"[bold]{outcome.mesh}[/]  {outcome.ranks} ranks in lockstep against {outcome.reference}, "
        f"relative errors, limit {outcome.tolerance.error:g}"
    )
    check_table = table("", "tensors", "worst", "at", "", right=(1, 2))
    for kind, checks in outcome.kinds().items():
        worst = max(checks, key=lambda c: c.error)
        bad = sum(not c.ok for c in checks)
        word = "[green]ok[/]" if not bad else f"[bold red]{bad} wrong[/]"
        check_table.add_row(kind, str(len(checks)), f"{worst.error:.1e}", worst.name, word)
    print_table(check_table)
    if loose := [c for c in outcome.checks if c.ok and c.noise]:
        least = min(c.noise for c in loose)
        console.print(
            f"{len(loose)} gradients are above the limit, by at most twice what rounding parameters moves "
            f"the model itself (by {least:.1e} or more): verify the model in float32 as well",
            markup=False,
        )
    for r in outcome.rounded:
        if r.kind == "group":
            console.print(
                f"lsh-moe  {r.share:.1%} of the rows of experts are left, means from which rows differ by "
                f"{r.mean:.1e} on average, {r.worst:.1e} at worst ({r.name}), in the 2-norm",
                markup=False,
            )
            continue
        done = {"all_gather": "gathered", "cast": "cast for products"}.get(r.kind, "reduced")
        word = "float" if r.kind == "cast" else "int"
        console.print(
            f"{word}{r.bits}  {r.values} {r.what} {done}: relative error {r.mean:.1e} on average, "
            f"{r.worst:.1e} at worst ({r.name}), in the 2-norm",
            markup=False,
        )
    if outcome.cast_loss:
        kinds = {"cast": "casts", "group": "groups of rows"}
        what = " and ".join(
            word for kind, word in kinds.items() if any(r.kind == kind for r in outcome.rounded)
        )
        console.print(f"loss  {outcome.cast_loss[0]:.6f} with {what or 'casts'}, at the first step")
    if outcome.losses:
        console.print("loss  " + "  ".join(f"{x:.6f}" for x in outcome.losses))


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
