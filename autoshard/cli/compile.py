"""``autoshard compile``: the per-rank programs as a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.cli import options as opt
from autoshard.cli.output import Progress, memory_of, print_json, reporting, stdout
from autoshard.cli.plan import Wishes, batch_options, make_plan
from autoshard.errors import UsageError

if TYPE_CHECKING:
    from autoshard.program.program import Program

PlanOption = Annotated[
    Path | None, typer.Option("--plan", metavar="DIR", help="compile this plan instead of planning")
]


def compile_command(
    out: opt.OutOption,
    target: opt.MaybeTarget = None,
    mesh: opt.MeshOption = None,
    cluster: opt.ClusterOption = None,
    gpus: opt.GpusOption = None,
    plan: PlanOption = None,
    global_batch: opt.GlobalBatchOption = None,
    batch: opt.BatchOption = None,
    seq: opt.SeqOption = None,
    memory: opt.MemoryOption = None,
    schedule: opt.ScheduleOption = "",
    chunks: opt.ChunksOption = None,
    microbatches: opt.MicrobatchesOption = None,
    slices: opt.SlicesOption = None,
    overwrite: opt.OverwriteOption = False,
    replicate_unknown: opt.ReplicateOption = False,
    rules: opt.RulesOption = None,
    allow: opt.AllowOption = "",
    hierarchy: opt.HierarchyOption = "off",
    offload: opt.OffloadOption = "",
    without: opt.WithoutOption = "",
    kernels: opt.KernelsOption = False,
    ring: opt.RingOption = True,
    json: opt.JsonOption = False,
    debug: opt.DebugOption = False,
) -> None:
    """Compile a model for a mesh into a program folder that `autoshard run` and `autoshard.load` take."""
    with reporting(debug):
        from autoshard import api
        from autoshard.ir.offload import Offload
        from autoshard.program.store import check_target, save_program

        check_target(out, overwrite=overwrite)
        Offload.parse(offload)
        say = Progress()
        passes = {
            "allow": allow,
            "hierarchy": hierarchy,
            "kernels": kernels,
            "ring": ring,
            "offload": offload,
            **_switched(without),
        }
        if plan is None:
            if target is None:
                raise UsageError(
                    "no target is given", hint="autoshard compile TARGET --mesh dp=2,tp=2 -o DIR"
                )
            options = batch_options(target, batch, global_batch, seq)
            wishes = Wishes(
                memory_of(memory),
                global_batch,
                schedule=schedule,
                chunks=chunks,
                microbatches=microbatches,
                slices=slices,
                replicate_unknown=replicate_unknown,
                rules=rules,
                offload=offload,
            )
            planned = make_plan(target, mesh, cluster, gpus, options, wishes, say)
            program = api.compile_analysed(planned, say, **passes)
        else:
            if target or mesh or gpus or global_batch or batch or seq or memory:
                raise UsageError(
                    "--plan already says what to compile", hint="leave out the target and its options"
                )
            program, options = _from_plan(plan, cluster, rules, say, passes)
        program = api.with_options(program, **{k: str(v) for k, v in options.items()})
        save_program(program, out, overwrite=overwrite)
        _report(program, out, json)


def _switched(without: str) -> dict[str, bool]:
    """Passes that are switched off, by name."""
    from autoshard.planner.lowering import OPTIONAL

    names = [n.strip() for n in without.split(",") if n.strip()]
    for name in names:
        if name not in OPTIONAL:
            raise UsageError(f"no pass is called {name!r}", hint=f"one of {', '.join(OPTIONAL)}")
    return dict.fromkeys(names, False)


def _from_plan(
    folder: Path, cluster: str | None, rules: Path | None, say: Progress, passes: Mapping[str, Any]
) -> tuple[Program, dict[str, int]]:
    """The program of a stored plan; the model is captured again. passes: see `emitting.Emission`."""
    from autoshard import api
    from autoshard.cli.folders import read_plan
    from autoshard.interop.targets import build, load_rules

    stored, request = read_plan(folder)
    options = dict(request.options)
    own = load_rules(rules)
    say(f"building {request.target}")
    built = build(request.target, batch=options.get("batch"), seq=options.get("seq"))
    compiled = api.compile(
        built.model,
        stored,
        example_inputs=built.inputs,
        cluster=cluster or stored.cluster,
        rules=own,
        progress=say,
        **passes,
    )
    return compiled.program, options


def _report(program: Program, out: Path, json: bool) -> None:
    from autoshard.cluster import Mesh

    ranks = Mesh.parse(program.whole_mesh).world_size
    if json:
        document = {
            "command": "compile",
            "folder": str(out),
            "mesh": program.whole_mesh,
            "ranks": ranks,
            "target": program.target,
            "options": dict(program.options),
            "segments": list(program.lowered.segments),
            "dumps": sorted(program.dumps),
        }
        print_json(document)
        return
    console = stdout()
    console.print(f"[bold]{program.whole_mesh}[/]  {ranks} rank{'s' * (ranks > 1)}, written to ", end="")
    console.print(str(out), markup=False)
    word = quote(str(out))
    console.print(f"verify   autoshard verify {word}", markup=False)
    console.print(f"read     autoshard inspect {word} --rank 0", markup=False)
    console.print(f"run      torchrun --nproc-per-node {ranks} -m autoshard run {word}", markup=False)
