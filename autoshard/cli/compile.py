"""``autoshard compile``: the per-rank programs as a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.cli import options as opt
from autoshard.cli.from_options import with_options
from autoshard.cli.output import Progress, print_json, reporting, stdout
from autoshard.cli.plan import batch_options, make_plans
from autoshard.errors import UsageError
from autoshard.options import PassOptions, PlanOptions, chosen_of, for_plan, options_from

if TYPE_CHECKING:
    from autoshard.program.program import Program

PlanOption = Annotated[
    Path | None, typer.Option("--plan", metavar="DIR", help="compile this plan instead of planning")
]


@with_options
def compile_command(
    out: opt.OutOption,
    options: PlanOptions,
    passes: PassOptions,
    target: opt.MaybeTarget = None,
    mesh: opt.MeshOption = None,
    cluster: opt.ClusterOption = None,
    plan: PlanOption = None,
    batch: opt.BatchOption = None,
    seq: opt.SeqOption = None,
    also: opt.AlsoOption = "",
    overwrite: opt.OverwriteOption = False,
    rules: opt.RulesOption = None,
    without: opt.WithoutOption = "",
    json: opt.JsonOption = False,
    debug: opt.DebugOption = False,
) -> None:
    """Compile a model for a mesh into a program folder that `autoshard run` and `autoshard.load` take."""
    with reporting(debug):
        from autoshard import api
        from autoshard.ir.offload import Offload
        from autoshard.program.store import check_target, save_program

        check_target(out, overwrite=overwrite)
        Offload.parse(options.offload)
        say, options = Progress(), for_plan(options)
        passes = options_from(PassOptions, {"offload": options.offload, **_switched(without)}, passes)
        if plan is None:
            if target is None:
                raise UsageError(
                    "no target is given", hint="autoshard compile TARGET --mesh dp=2,tp=2 -o DIR"
                )
            if (Path(target) / "request.json").is_file():
                raise UsageError(
                    f"{target} is a plan folder", hint=f"autoshard compile --plan {target} -o {out}"
                )
            inputs = batch_options(target, batch, options.global_batch, seq)
            plans = make_plans(target, mesh, cluster, inputs, options, rules, say, also)
            programs = [api.compile_analysed(planned, say, passes) for planned in plans]
        else:
            asked = chosen_of(replace(options, offload=""))
            if target or mesh or batch or seq or also or asked:
                raise UsageError(
                    "--plan already says what to compile", hint="leave out the target and its options"
                )
            program, inputs = _from_plan(plan, cluster, rules, say, passes)
            programs = [program]
        programs = [api.with_options(p, **{k: str(v) for k, v in inputs.items()}) for p in programs]
        save_program(programs[0], out, overwrite=overwrite, also=programs[1:])
        _report(programs, out, json)


def _switched(without: str) -> dict[str, bool]:
    """Passes that are switched off, by name."""
    from autoshard.planner.lowering import OPTIONAL

    names = [n.strip() for n in without.split(",") if n.strip()]
    for name in names:
        if name not in OPTIONAL:
            raise UsageError(f"no pass is called {name!r}", hint=f"one of {', '.join(OPTIONAL)}")
    return dict.fromkeys(names, False)


def _from_plan(
    folder: Path, cluster: str | None, rules: Path | None, say: Progress, passes: PassOptions
) -> tuple[Program, dict[str, int]]:
    """The program of a stored plan; the model is captured again."""
    from autoshard import api
    from autoshard.cli.folders import read_plan
    from autoshard.cli.opened import Opener
    from autoshard.cluster import load_cluster

    stored, request = read_plan(folder)
    planned = Opener(rules, say).planned(stored, request, load_cluster(cluster) if cluster else None)
    return api.compile_analysed(planned, say, passes), dict(request.inputs)


def _report(programs: Sequence[Program], out: Path, json: bool) -> None:
    from autoshard.cluster import Mesh

    program, *others = programs
    ranks, *fewer = (Mesh.parse(p.full_mesh).world_size for p in programs)
    if json:
        document = {
            "command": "compile",
            "folder": str(out),
            "mesh": program.full_mesh,
            "ranks": ranks,
            "also": [{"ranks": n, "mesh": p.full_mesh} for n, p in zip(fewer, others, strict=True)],
            "target": program.target,
            "options": dict(program.options),
            "segments": list(program.lowered.segments),
            "dumps": sorted(program.dumps),
        }
        print_json(document)
        return
    console = stdout()
    console.print(f"[bold]{program.full_mesh}[/]  {ranks} rank{'s' * (ranks > 1)}, written to ", end="")
    console.print(str(out), markup=False)
    for count, other in zip(fewer, others, strict=True):
        console.print(f"[bold]{other.full_mesh}[/]  for {count} ranks, in the same folder")
    word = quote(str(out))
    console.print(f"verify   autoshard verify {word}", markup=False)
    console.print(f"read     autoshard inspect {word} --rank 0", markup=False)
    console.print(f"run      torchrun --nproc-per-node {ranks} -m autoshard run {word}", markup=False)
