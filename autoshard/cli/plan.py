"""``autoshard plan``: decide, and say why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoshard.cli import options as opt
from autoshard.cli.output import Progress, memory_of, print_json, print_table, reporting, stdout, table
from autoshard.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from autoshard.api import Planned
    from autoshard.cluster import Cluster, Mesh
    from autoshard.report.summary import Decision, Summary

_MOST_PARAMETERS = 16
#: choices this close differ by nothing that a clock could show
TIE_SECONDS = 5e-8


def plan_command(
    target: opt.TargetArgument,
    mesh: opt.MeshOption = None,
    cluster: opt.ClusterOption = None,
    gpus: opt.GpusOption = None,
    batch: opt.BatchOption = None,
    seq: opt.SeqOption = None,
    memory: opt.MemoryOption = None,
    out: opt.MaybeOut = None,
    overwrite: opt.OverwriteOption = False,
    replicate_unknown: opt.ReplicateOption = False,
    rules: opt.RulesOption = None,
    json: opt.JsonOption = False,
    debug: opt.DebugOption = False,
) -> None:
    """Decide how a model runs on a mesh, without allocating it, and print why."""
    with reporting(debug):
        from autoshard.cli.folders import Request, check_plan_folder, write_plan
        from autoshard.interop.targets import options_of
        from autoshard.report.summary import summarise

        if out is not None:
            check_plan_folder(out, overwrite=overwrite)
        options = options_of(target, batch, seq)
        planned = make_plan(
            target, mesh, cluster, gpus, options, memory_of(memory), replicate_unknown, rules, Progress()
        )
        if out is not None:
            write_plan(out, planned.plan, Request(target, options, replicate_unknown), overwrite=overwrite)
        summary = summarise(planned.plan, planned.analysis)
        if json:
            print_json({"command": "plan", "folder": str(out) if out else None, **summary.as_json()})
            return
        print_summary(summary)
        if out is not None:
            stdout().print(f"\nplan written to {out}", markup=False)


def make_plan(
    target: str,
    mesh: str | None,
    cluster: str | None,
    gpus: int | None,
    options: dict[str, int],
    memory: int | None,
    replicate_unknown: bool,
    rules: Path | None,
    say: Progress,
) -> Planned:
    """Build the target on the meta device and plan it."""
    where = destination(mesh, cluster, gpus)  # before the model is built: mistakes show at once
    from autoshard import api
    from autoshard.interop.targets import build, load_rules

    own = load_rules(rules)
    say(f"building {target}")
    built = build(target, batch=options.get("batch"), seq=options.get("seq"))
    for note in built.notes:
        say.note(note)
    return api.plan(
        built.model,
        where,
        example_inputs=built.inputs,
        cluster=cluster if mesh else None,
        memory=memory,
        devices=gpus,
        replicate_unknown=replicate_unknown,
        rules=own,
        target=target,
        progress=say,
    )


def destination(mesh: str | None, cluster: str | None, gpus: int | None) -> Mesh | Cluster:
    """What to plan for; UsageError if it is not said, or said twice."""
    from autoshard.cluster import Mesh, load_cluster

    if mesh is not None and gpus is not None:
        raise UsageError(
            "--gpus goes with --cluster alone", why=f"the mesh {mesh} says how many", hint="leave one out"
        )
    if mesh is not None:
        return Mesh.parse(mesh)
    if cluster is None:
        raise UsageError(
            "no mesh is given", hint="--mesh dp=2,tp=2, or --cluster NAME --gpus N to search one"
        )
    return load_cluster(cluster)


def print_summary(summary: Summary) -> None:
    """The plan as people read it."""
    from autoshard.report.units import bytes_text, seconds_text

    console = stdout()
    console.print(
        f"[bold]{summary.mesh}[/]  {summary.ranks} rank{'s' * (summary.ranks > 1)}, "
        f"prices of {summary.cluster}, {_budget(summary.budget_bytes)}"
    )
    gap = "proven best" if summary.gap <= 1e-9 else f"at most {summary.gap:.2%} from the best"
    if summary.mesh_reason:
        console.print(f"mesh    {summary.mesh_reason}")
    console.print(f"step    {seconds_text(summary.seconds)} predicted, nothing overlapped")
    console.print(
        f"proof   {gap} for these prices: lower bound {seconds_text(summary.lower_bound)}, "
        f"gap {summary.gap:.2%} ({summary.method}, {summary.variables} decisions, {summary.states} choices)"
    )
    share = summary.parameter_bytes / max(1.0, summary.parameter_bytes_total)
    console.print(
        f"rank    parameters {bytes_text(summary.parameter_bytes)} ({share:.0%} of the model's "
        f"{summary.parameter_count:,}) + gradients {bytes_text(summary.gradient_bytes)} "
        f"+ optimizer {bytes_text(summary.optimizer_bytes)}"
    )
    for warning in summary.warnings:
        console.print("[yellow]warning[/] ", end="")
        console.print(warning, markup=False)
    _print_decisions("parameters", summary.parameters, _MOST_PARAMETERS)
    if summary.ops:
        _print_decisions("ops that matter most", summary.ops, len(summary.ops))


def _budget(budget: int | None) -> str:
    from autoshard.report.units import bytes_text

    return "any memory" if budget is None else f"{bytes_text(budget)} per rank"


def _print_decisions(title: str, rows: tuple[Decision, ...], most: int) -> None:
    from autoshard.report.units import seconds_text

    stdout().print()
    made = table(title, "count", "placement", "next best", "would cost", right=(1, 4))
    for row in rows[:most]:
        tie = "the same" if row.alternative else ""
        cost = f"+{seconds_text(row.margin)}" if row.margin >= TIE_SECONDS else tie
        made.add_row(row.what, str(row.count), row.choice, row.alternative or row.reason, cost)
    if len(rows) > most:
        made.add_row(f"... {len(rows) - most} more kinds", "", "", "", "")
    print_table(made)
