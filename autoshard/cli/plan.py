"""``autoshard plan``: decide, and say why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from autoshard.cli import options as opt
from autoshard.cli.from_options import with_options
from autoshard.cli.output import INTERRUPTED, Progress, print_json, print_table, reporting, stdout, table
from autoshard.errors import UsageError
from autoshard.ir.similar_rows import RowGroups
from autoshard.options import PlanOptions

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from autoshard.cluster import Cluster, Mesh
    from autoshard.planner.length_plans import LengthPlans
    from autoshard.planner.length_range import LengthRange, RangePlan
    from autoshard.planner.planned import Planned
    from autoshard.report.summary import Decision, PlanSummary

_MOST_PARAMETERS = 16
_STRATEGIES = {"replicated": "replicated over data ranks", "sharded": "each data rank trains its shard"}
#: choices this close differ by nothing that a clock could show
TIE_SECONDS = 5e-8


@with_options
def plan_command(
    target: opt.TargetArgument,
    options: PlanOptions,
    mesh: opt.MeshOption = None,
    cluster: opt.ClusterOption = None,
    batch: opt.BatchOption = None,
    seq: opt.SeqOption = None,
    lengths: opt.LengthsOption = None,
    also: opt.AlsoOption = "",
    tool: opt.ForOption = None,
    out: opt.MaybeOut = None,
    overwrite: opt.OverwriteOption = False,
    rules: opt.RulesOption = None,
    json: opt.JsonOption = False,
    debug: opt.DebugOption = False,
) -> None:
    """Decide how a model runs on a mesh, without allocating it, and print why.

    Ctrl-C ends the search with the best plan found until then, and exit code 130.
    """
    with reporting(debug):
        from autoshard.cli.folders import Request, check_plan_folder, write_plan
        from autoshard.report.summary import summarise

        if tool is not None:
            if mesh is not None or lengths is not None or also or batch is not None or rules is not None:
                raise UsageError("--for goes without --mesh, --batch, --lengths, --also and --rules")
            from autoshard.cli.advise import advise_tool

            advise_tool(target, tool, cluster, options, seq, out, overwrite, json)
            return
        if out is not None:
            check_plan_folder(out, overwrite=overwrite)
        inputs = batch_options(target, batch, options.global_batch, seq)
        full_range = None if lengths is None else _range_of(lengths, also)
        if full_range is not None:
            from autoshard import api

            model, where, more = planning_arguments(target, mesh, cluster, inputs, options, rules, Progress())
            result = api.plan_length_range(model, where, lengths=full_range, target=target, **more)
            if out is not None:
                request = Request(target, inputs, options, "" if rules is None else str(rules))
                write_plan(out, result.planned.plan, request, overwrite=overwrite)
            print_range(result, json=json)
            return
        if lengths is not None:
            if out is not None:
                raise UsageError(
                    "--lengths goes without --out",
                    why="a plan folder is one plan, and there is one for each length",
                    hint="parallelize(..., lengths=...) compiles them all",
                )
            from autoshard import api
            from autoshard.planner.length_plans import parse_lengths

            parse_lengths(lengths)  # mistakes show before the model is built
            model, where, more = planning_arguments(target, mesh, cluster, inputs, options, rules, Progress())
            print_lengths(api.plan_lengths(model, where, lengths=lengths, **more), json=json)
            return
        priced = replace(options, baselines=True)
        plans = make_plans(target, mesh, cluster, inputs, priced, rules, Progress(), also)
        planned = next(plans)
        if out is not None:
            request = Request(target, inputs, options, "" if rules is None else str(rules))
            write_plan(out, planned.plan, request, overwrite=overwrite)
        summary, *also_summaries = (
            summarise(p.plan, p.analysis, p.solution, p.staging, p.peak, p.device) for p in (planned, *plans)
        )
        if json:
            document = {"command": "plan", "folder": str(out) if out else None, **summary.as_json()}
            print_json(document | ({"also": [s.as_json() for s in also_summaries]} if also_summaries else {}))
        else:
            print_summary(summary)
            for other in also_summaries:
                stdout().print()
                print_summary(other)
            if out is not None:
                stdout().print(f"\nplan written to {out}", markup=False)
        if planned.solution is not None and planned.solution.interrupted:
            raise typer.Exit(INTERRUPTED)


def _range_of(lengths: str, also: str) -> LengthRange | None:
    """None if they are a distribution."""
    from autoshard.planner.length_range import parse_range

    result = parse_range(lengths)
    if result is not None and also:
        raise UsageError(
            "--also goes without a range of --lengths", hint="plan each number of ranks by itself"
        )
    return result


def print_range(result: RangePlan, *, json: bool) -> None:
    """The plan of a range of lengths, and where its peak is."""
    from autoshard.ir.units import bytes_text
    from autoshard.report.summary import summarise

    one = result.planned
    summary = summarise(one.plan, one.analysis, one.solution, one.staging, one.peak, one.device)
    if json:
        peaks = [{"length": p.length, "peak_bytes": p.bytes, "own_plan": p.own} for p in result.peaks]
        ends = {"shortest": result.range.shortest, "longest": result.range.longest}
        document = {"lengths": {**ends, "looked_at": peaks, "fullest": result.fullest.length}}
        print_json({"command": "plan", **summary.as_json(), **document})
        return
    print_summary(summary)
    lines = table("length", "memory", "plan", right=(0, 1))
    for each in result.peaks:
        own = "its own, on the same parameters" if each.own else "that of the longest"
        lines.add_row(str(each.length), bytes_text(each.bytes), own)
    stdout().print()
    print_table(lines)
    tokens = f"{result.range.shortest} to {result.range.longest} tokens"
    most = f"{bytes_text(result.fullest.bytes)} at {result.fullest.length} tokens"
    stdout().print(f"\nany length of {tokens}: peak {most}; the step is that of the longest", markup=False)


def batch_options(
    target: str, batch: int | None, global_batch: int | None, seq: int | None
) -> dict[str, int]:
    """Options of the target; a global batch is what a config is first captured with."""
    from autoshard.interop.targets import is_config, options_of

    if batch is not None and global_batch is not None:
        raise UsageError(
            "--batch and --global-batch exclude each other",
            why="--batch is run in one piece, --global-batch in as many microbatches as is best",
        )
    return options_of(target, batch or (global_batch if is_config(target) else None), seq)


def make_plans(
    target: str,
    mesh: str | None,
    cluster: str | None,
    inputs: dict[str, int],
    options: PlanOptions,
    rules: Path | None,
    say: Progress,
    also: str,
) -> Iterator[Planned]:
    """Build the target on the meta device and plan it; then the same step for other numbers of ranks.

    inputs: sizes of the target's example inputs.
    """
    from autoshard import api

    others = _other_ranks(also, cluster, inputs, options)
    model, where, more = planning_arguments(target, mesh, cluster, inputs, options, rules, say)
    yield api.plan(model, where, target=target, device=True, **more)
    for other in others:
        more |= {"options": other, "cluster": None}
        yield api.plan(model, destination(None, cluster, other.devices), target=target, device=True, **more)


def _other_ranks(
    also: str, cluster: str | None, inputs: dict[str, int], options: PlanOptions
) -> list[PlanOptions]:
    """Of plans of the same step for the numbers of ranks in ``also``, whose best meshes are searched."""
    counts = [n.strip() for n in also.split(",") if n.strip()]
    if any(not n.isdigit() or int(n) < 1 for n in counts):
        raise UsageError(f"--also is {also!r}", hint="numbers of ranks: --also 24,16")
    if counts and cluster is None:
        raise UsageError(
            "--also needs a cluster",
            why="the mesh for another number of ranks is searched",
            hint="--cluster NAME, beside the mesh or instead of it",
        )
    batch = options.global_batch or inputs.get("batch")
    same = replace(options, global_batch=batch, microbatches=None, chunks=None, baselines=False)
    return [replace(same, devices=int(count)) for count in counts]


def planning_arguments(
    target: str,
    mesh: str | None,
    cluster: str | None,
    inputs: dict[str, int],
    options: PlanOptions,
    rules: Path | None,
    say: Progress,
) -> tuple[nn.Module, Mesh | Cluster, dict[str, Any]]:
    """Of `autoshard.plan`: the model, where it is planned for, and the other arguments by name."""
    # before the model is built: mistakes show at once
    planned_for = destination(mesh, cluster, options.devices)
    from autoshard.interop.targets import build, load_rules
    from autoshard.ir.offload import Offload

    Offload.parse(options.offload)
    custom_rules = load_rules(rules)
    say(f"building {target}")
    built = build(target, batch=inputs.get("batch"), seq=inputs.get("seq"))
    for note in built.notes:
        say.note(note)
    more = {
        "example_inputs": built.inputs,
        "cluster": cluster if mesh else None,
        "options": options,
        "rules": custom_rules,
        "progress": say,
    }
    return built.model, planned_for, more


def print_lengths(result: LengthPlans, *, json: bool) -> None:
    """The plans of a distribution of lengths."""
    from autoshard.cluster import Mesh
    from autoshard.ir.units import bytes_text, seconds_text
    from autoshard.planner.lowering import full_mesh

    notes = [f"{each.length} tokens: {w}" for each in result.plans for w in each.planned.plan.warnings]
    plan = result.plans[0].planned.plan
    mesh = str(full_mesh(Mesh.parse(plan.mesh), plan))
    if json:
        plans = [
            {
                "length": each.length,
                "share": each.share,
                "step_seconds": each.seconds,
                "alone_seconds": each.alone,
                "rank_bytes": each.bytes,
                "microbatches": each.planned.plan.microbatches,
            }
            for each in result.plans
        ]
        totals = {"step_seconds": result.seconds, "dual_bound": result.dual_bound, "gap": result.gap}
        print_json({"command": "plan", "mesh": mesh, "lengths": plans, "expected": totals, "warnings": notes})
        return
    lines = table("length", "steps", "step", "alone", "memory", "microbatches", right=(0, 1, 2, 3, 4, 5))
    for each in result.plans:
        lines.add_row(
            f"{each.length}",
            f"{each.share:.0%}",
            seconds_text(each.seconds),
            seconds_text(each.alone),
            bytes_text(each.bytes),
            str(each.planned.plan.microbatches or 1),
        )
    console = stdout()
    console.print(f"[bold]{mesh}[/]  one set of parameters, one program for each length\n")
    print_table(lines)
    gap = "optimal" if result.gap <= 1e-9 else f"gap at most {result.gap:.2%}"
    console.print(f"\nexpected step {seconds_text(result.seconds)}, {gap}", markup=False)
    _print_warnings(notes)


def _print_warnings(texts: Iterable[str]) -> None:
    console = stdout()
    for text in texts:
        console.print("[yellow]warning[/] ", end="")
        console.print(text, markup=False)


def destination(mesh: str | None, cluster: str | None, gpus: int | None) -> Mesh | Cluster:
    """What to plan for; UsageError if it is not said, said in two ways, or larger than the cluster."""
    from autoshard.cluster import Mesh, load_cluster

    if mesh is not None:
        given = Mesh.parse(mesh)
        if gpus not in (None, given.world_size):
            why = f"the mesh {mesh} has {given.world_size} ranks"
            raise UsageError(f"--gpus says {gpus}", why=why, hint="leave --gpus out")
        if cluster is not None:
            load_cluster(cluster).check_world_size(given.world_size)
        return given
    if cluster is None:
        raise UsageError(
            "no mesh is given", hint="--mesh dp=2,tp=2, or --cluster NAME --gpus N to search one"
        )
    searched = load_cluster(cluster)
    searched.check_world_size(gpus or 1)
    return searched


def print_summary(summary: PlanSummary) -> None:
    """The plan for a terminal."""
    console = stdout()
    console.print(
        f"[bold]{summary.mesh}[/]  {summary.ranks} rank{'s' * (summary.ranks > 1)}, "
        f"cost model of {summary.cluster}, {_budget(summary.budget_bytes)}"
    )
    for name, text in summary_lines(summary):
        console.print(f"{name:<11}", end="")
        console.print(text, markup=False)
    _print_warnings(summary.warnings)
    _print_pipeline(summary)
    _print_stages(summary)
    _print_baselines(summary)
    _print_decisions("parameters", summary.parameters, _MOST_PARAMETERS)
    if summary.ops:
        _print_decisions("ops with the largest margins", summary.ops, len(summary.ops))


def summary_lines(summary: PlanSummary) -> Iterator[tuple[str, str]]:
    """(name, text) of the model-wide decisions and the predicted figures."""
    from autoshard.ir.units import bytes_text, seconds_text

    if summary.mesh_reason:
        yield "mesh", summary.mesh_reason
    if summary.rank_order:
        yield "ranks", f"on devices {summary.rank_order}, by measured links"
    if summary.microbatch_size:
        plural = "es" if summary.microbatches > 1 else ""
        yield (
            "batch",
            f"{summary.microbatches * summary.microbatch_size} sequences per step: {summary.microbatches} "
            f"microbatch{plural} of {summary.microbatch_size}",
        )
    if summary.pipeline is not None:
        yield "stages", _pipeline_text(summary)
    stages = ", ".join(
        f"{_STRATEGIES.get(z.strategy, z.strategy)} for {z.parameters} parameters ({bytes_text(z.bytes)})"
        for z in summary.zero
    )
    if stages:
        yield "zero", stages
    rows = (f"{r.policy} for {r.calls} of {r.total_calls} {r.segment}" for r in summary.recompute)
    yield "recompute", ", ".join(rows) or "nothing"
    if summary.replicated_experts:
        yield "experts", f"{summary.replicated_experts} of a layer computed on every rank for its own tokens"
    if groups := RowGroups.parse(summary.allow):
        left = f"{groups.share:.3g} of the rows of experts are assumed to be left, as means of those alike"
        yield "allowed", f"{groups}: {left}; results are not the model's"
    if summary.expert_chunks > 1:
        yield "experts", f"tokens exchanged in {summary.expert_chunks} chunks, each beside another's products"
    step = summary.step
    if step is not None:
        yield (
            "step",
            f"{seconds_text(step.seconds)} predicted: compute {seconds_text(step.compute)} + exposed "
            f"communication {seconds_text(step.exposed)} ({seconds_text(step.overlapped)} overlapped) "
            f"+ optimizer {seconds_text(step.optimizer)}; MFU {step.mfu:.1%}",
        )
        if summary.simulated_seconds is not None:
            yield (
                "simulated",
                f"{seconds_text(summary.simulated_seconds)} with every collective of the program simulated; "
                f"MFU {step.mfu * step.seconds / summary.simulated_seconds:.1%}",
            )
    gap = "optimal" if summary.gap <= 1e-9 else f"gap at most {summary.gap:.2%}"
    if summary.gap > 1e-9 and summary.configuration_gap < summary.gap:
        gap_here = summary.configuration_gap
        chosen = "optimal" if gap_here <= 1e-9 else f"gap at most {gap_here:.2%}"
        gap = f"{chosen} for this configuration, {gap} over all"
    if step is not None and step.seconds < summary.dual_bound * (1 - 1e-9):
        # of a pipeline, whose stages are cut and played after the search
        under = 1 - step.seconds / summary.dual_bound
        gap = f"stages as they are cut take {under:.2%} less than the bound of equal ones"
    yield (
        "optimality",
        f"{gap}, by this cost model: dual bound {seconds_text(summary.dual_bound)} "
        f"({summary.method}, {summary.variables} decisions, {summary.states} states)",
    )
    share = summary.parameter_bytes / max(1.0, summary.parameter_bytes_total)
    yield (
        "per rank",
        f"parameters {bytes_text(summary.parameter_bytes)} ({share:.0%} of the model's "
        f"{summary.parameter_count:,}) + gradients {bytes_text(summary.gradient_bytes)} "
        f"+ optimizer {bytes_text(summary.optimizer_bytes)}",
    )
    if summary.peak is not None:
        peak = summary.peak
        yield (
            "memory",
            f"{bytes_text(peak.bytes)} at the simulated peak of the fullest rank: parameters with gathered "
            f"copies {bytes_text(peak.parameters)} + gradients {bytes_text(peak.gradients)} + optimizer "
            f"{bytes_text(peak.optimizer)} + saved for backward {bytes_text(peak.saved_for_backward)} "
            f"+ temporaries {bytes_text(peak.temporaries)}",
        )
    elif summary.memory is not None:
        yield (
            "memory",
            f"{bytes_text(summary.memory.total)} at the peak: parameters with gathered copies, gradients and "
            f"optimizer {bytes_text(summary.memory.state)} + saved for backward "
            f"{bytes_text(summary.memory.activations)}",
        )
    if summary.device is not None:
        from autoshard.report.simulation import device_text

        yield "device", device_text(summary.device)
    if summary.offload:
        yield "host", _host_text(summary)


def _host_text(summary: PlanSummary) -> str:
    """What is offloaded, and its bytes where the program of the plan was simulated."""
    from autoshard.ir.units import bytes_text, seconds_text

    words = summary.offload.replace(",", ", ")
    if summary.peak is None or not summary.peak.host:
        return f"{words} in host memory"
    resident = " + ".join(f"{name} {bytes_text(n)}" for name, n in summary.peak.host.items() if n)
    total, node = bytes_text(sum(summary.peak.host.values())), bytes_text(summary.peak.node_host_bytes)
    waits = f"; {seconds_text(summary.peak.host_wait_seconds)} of exposed host transfers per step"
    return f"{words}: {total} of host memory per rank ({resident or 'nothing'}), {node} per node{waits}"


def _pipeline_text(summary: PlanSummary) -> str:
    """The pipeline in one line: schedule, bubble, and the schedules that were tried."""
    from autoshard.ir.units import bytes_text, seconds_text

    row = summary.pipeline
    assert row is not None
    chunks = f", {row.chunks} stages per rank" if row.chunks > 1 else ""
    chunks += f", {row.slices} slices of each sequence" if row.slices > 1 else ""
    if row.parts:
        chunks += f" ({' + '.join(map(str, row.parts))} of {sum(row.parts)} parts)"
    times = [s.forward + s.backward for s in row.stages]
    text = (
        f"{len(row.stages)} of {seconds_text(min(times))} to {seconds_text(max(times))} per microbatch, "
        f"{row.schedule}{chunks}: bubble {row.bubble:.1%}"
    )
    if "activations" not in summary.offload:  # stages are cut as if all of them stayed
        text += f", at most {bytes_text(row.peak_bytes)} on a rank"
    if row.equal_stages_seconds is not None and summary.step is not None:
        cut = summary.step.seconds
        equal = cut + row.equal_stages_seconds - min(x for x in row.tried.values() if x is not None)
        text += f"; equal layers per stage would take {equal / cut:.3f} x"
    return text


def _print_pipeline(summary: PlanSummary) -> None:
    from autoshard.ir.units import bytes_text, seconds_text

    row = summary.pipeline
    if row is None:
        return
    stdout().print()
    stage_table = table(
        "stage", "rank", "ends after", "forward", "backward", "saved per microbatch", right=(1, 3, 4, 5)
    )
    for number, stage in enumerate(row.stages):
        stage_table.add_row(
            str(number),
            str(stage.rank),
            stage.ends,
            seconds_text(stage.forward),
            seconds_text(stage.backward),
            bytes_text(stage.saved_bytes),
        )
    print_table(stage_table)
    others = [(n, s) for n, s in row.tried.items()]
    if len(others) > 1:
        stdout().print()
        stage_table = table("schedule, best stages", "pipeline time per step", right=(1,))
        for name, seconds in sorted(others, key=lambda o: (o[1] is None, o[1] or 0.0)):
            stage_table.add_row(name, "does not fit" if seconds is None else seconds_text(seconds))
        print_table(stage_table)


def _print_stages(summary: PlanSummary) -> None:
    from autoshard.ir.units import bytes_text, seconds_text

    if not summary.tactics:
        return
    stdout().print()
    tactic_table = table("after the tactic", "mesh", "step", "bytes per rank", right=(2, 3))
    for row in summary.tactics:
        tactic_table.add_row(row.tactic, row.mesh, seconds_text(row.seconds), bytes_text(row.bytes))
    print_table(tactic_table)


def _print_baselines(summary: PlanSummary) -> None:
    from autoshard.ir.units import seconds_text

    if not summary.baselines:
        return
    stdout().print()
    rows = table("baseline, tuned", "mesh", "microbatches", "step", "relative to the plan", right=(2, 3, 4))
    for r in summary.baselines:
        if r.seconds is None or r.ratio is None:
            rows.add_row(r.name, r.mesh, "", "", r.why)
        else:
            rows.add_row(r.name, r.mesh, str(r.microbatches), seconds_text(r.seconds), f"{r.ratio:.2f} x")
    print_table(rows)


def _budget(budget: int | None) -> str:
    from autoshard.ir.units import bytes_text

    return "no memory budget" if budget is None else f"{bytes_text(budget)} per rank"


def _print_decisions(title: str, rows: tuple[Decision, ...], most: int) -> None:
    from autoshard.ir.units import seconds_text

    stdout().print()
    decision_table = table(title, "count", "placement", "next best", "adds", right=(1, 4))
    for row in rows[:most]:
        tie = "+0 us" if row.alternative else ""
        cost = f"+{seconds_text(row.margin)}" if row.margin >= TIE_SECONDS else tie
        decision_table.add_row(row.what, str(row.count), row.choice, row.alternative or row.reason, cost)
    if len(rows) > most:
        decision_table.add_row(f"... {len(rows) - most} more kinds", "", "", "", "")
    print_table(decision_table)
