"""``autoshard run``: train a program, under torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.cli import options as opt
from autoshard.cli.models import model_of
from autoshard.cli.output import Progress, print_json, reporting, stdout
from autoshard.errors import UsageError

if TYPE_CHECKING:
    from autoshard.cluster import Mesh
    from autoshard.program.program import Program
    from autoshard.runtime.step_log import StepWork
    from autoshard.runtime.train import StepReport

StepsOption = Annotated[int, typer.Option("--steps", min=1, help="optimizer steps")]
LrOption = Annotated[float, typer.Option("--lr", min=0.0, help="of AdamW")]
DataOption = Annotated[
    Path | None,
    typer.Option("--data", help="a text file or folder [default: the sources of Python's library]"),
]
ClipOption = Annotated[
    float, typer.Option("--clip", min=0.0, help="largest norm of all gradients together; 0: no clipping")
]
MetricsOption = Annotated[
    Path | None,
    typer.Option("--metrics", metavar="FILE", help="a line of JSON per step; refused if FILE exists"),
]
PeakOption = Annotated[
    str | None,
    typer.Option("--cluster", metavar="NAME|FILE", help="whose peak the mfu of --metrics is a share of"),
]

CodegenOption = Annotated[
    str,
    typer.Option("--codegen", metavar="inductor|interpreter", help="instead of the program's"),
]

GraphsOption = Annotated[
    bool | None,
    typer.Option("--cuda-graphs/--no-cuda-graphs", help="instead of the program's"),
]

CacheOption = Annotated[
    Path | None,
    typer.Option("--code-cache", metavar="DIR", help="keeps compiled code; a folder that you trust"),
]


def run_command(
    folder: opt.FolderArgument,
    steps: StepsOption = 20,
    lr: LrOption = 1e-3,
    data: DataOption = None,
    seed: opt.SeedOption = 0,
    clip: ClipOption = 1.0,
    metrics: MetricsOption = None,
    cluster: PeakOption = None,
    codegen: CodegenOption = "",
    cuda_graphs: GraphsOption = None,
    code_cache: CacheOption = None,
    target: opt.OtherTarget = None,
    rules: opt.RulesOption = None,
    json: opt.JsonOption = False,
    debug: opt.DebugOption = False,
) -> None:
    """Train the model of a program: torchrun --nproc-per-node N -m autoshard run DIR."""
    with reporting(debug):
        from autoshard import api
        from autoshard.cluster import Mesh
        from autoshard.interop.targets import load_rules
        from autoshard.program.store import folder_for, load_program
        from autoshard.runtime.arguments import split_inputs
        from autoshard.runtime.corpus import load_corpus
        from autoshard.runtime.groups import world_size
        from autoshard.runtime.microbatch import full_batch
        from autoshard.runtime.module import ParallelModule
        from autoshard.runtime.step_log import StepLog
        from autoshard.runtime.train import feed_of, parameter_bytes, train, vocabulary_of

        custom_rules = load_rules(rules)
        folder = folder_for(folder, world_size())
        program = load_program(folder, rules=custom_rules)
        first = int(os.environ.get("RANK", 0)) == 0
        say = Progress(quiet=not first)
        # before anything that takes time, since it may be refused
        steps_log = None if metrics is None else StepLog(metrics, _work(program, cluster), first=first)
        with _process_group(Mesh.parse(program.full_mesh), folder):
            say(f"building {target or program.target}")
            built = model_of(program, folder, target, seed)
            example = full_batch(program, split_inputs(built.inputs))
            feed, source = feed_of(example, load_corpus(data), vocabulary_of(built.model), seed)
            model = api.load(
                folder,
                built.model,
                seed=seed,
                rules=custom_rules,
                codegen=codegen,
                cuda_graphs=cuda_graphs,
                code_cache=code_cache or "",
            )
            rank_bytes, model_bytes = parameter_bytes(model)
            pieces = f", {program.microbatches} microbatches a step" if program.microbatches > 1 else ""
            say(f"training on {source}{pieces}")
            show = _printer(steps, first, say if json else None)

            def on_step(report: StepReport) -> None:
                for tell in (show, steps_log):
                    if tell is not None:
                        tell(report)

            reports = train(model, feed, steps=steps, lr=lr, clip=clip or None, on_step=on_step)
            assert isinstance(model, ParallelModule)
            model.release_graphs()
            if first:
                _report(folder, program, source, reports, rank_bytes, model_bytes, json)


@contextmanager
def _process_group(mesh: Mesh, folder: Path) -> Iterator[None]:
    """The process group of the run, closed at its end. A program for one rank needs no torchrun.

    Raises UsageError, before any model is built, if the world is missing or has the wrong size.
    """
    import torch
    import torch.distributed as dist

    from autoshard.runtime.groups import device_mesh_for

    if "RANK" not in os.environ:
        if mesh.world_size > 1:
            raise UsageError(
                f"the program is for {mesh.world_size} processes, and this is one",
                where=f"mesh {mesh}",
                hint=f"torchrun --nproc-per-node {mesh.world_size} -m autoshard run {folder}",
            )
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    device_mesh_for(str(mesh))
    try:
        yield
    finally:
        dist.destroy_process_group()


def _work(program: Program, cluster: str | None) -> StepWork:
    """What a step does. The peak is that of the cluster that is named, else on CUDA of the plan's: that of
    another CPU says nothing of this one."""
    import torch

    from autoshard.cli.inspect import prices_of
    from autoshard.cluster import Mesh
    from autoshard.report.simulation import items_of
    from autoshard.runtime.step_log import StepWork
    from autoshard.simulate.pricing import Pricer
    from autoshard.simulate.step import program_flop

    what, items = items_of(program)
    if cluster is None and not torch.cuda.is_available():
        return StepWork(what, items, 0.0, None)
    machine = prices_of(program.plan, cluster)
    flop, dtype = program_flop(Pricer(program, machine))
    return StepWork(what, items, flop, machine.peak(dtype, Mesh.parse(program.full_mesh).world_size))


def _printer(steps: int, first: bool, say: Progress | None) -> Callable[[StepReport], None] | None:
    """Prints a line per step on rank 0; with ``say``, five lines in all, as progress."""
    if not first:
        return None
    width = len(str(steps))
    every = max(1, steps // 5)

    def show(report: StepReport) -> None:
        norm = "" if report.grad_norm is None else f"  gradient norm {report.grad_norm:7.3f}"
        line = f"step {report.step + 1:>{width}}/{steps}  loss {report.loss:8.5f}{norm}"
        if say is None:
            stdout().print(f"{line}  {report.seconds * 1e3:6.0f} ms")
        elif (report.step + 1) % every == 0:
            say(line)

    return show


def _report(
    folder: Path,
    program: Program,
    source: str,
    reports: list[StepReport],
    rank_bytes: int,
    model_bytes: int,
    json: bool,
) -> None:
    from statistics import median

    from autoshard.ir.units import bytes_text

    typical = median(r.seconds for r in reports)
    if json:
        document = {
            "command": "run",
            "folder": str(folder),
            "mesh": program.full_mesh,
            "microbatches": program.microbatches,
            "data": source,
            "losses": [r.loss for r in reports],
            "grad_norms": [r.grad_norm for r in reports],
            "seconds": [r.seconds for r in reports],
            "parameter_bytes_rank": rank_bytes,
            "parameter_bytes_model": model_bytes,
        }
        print_json(document)
        return
    console = stdout()
    console.print(f"loss {reports[0].loss:.5f} -> {reports[-1].loss:.5f} in {len(reports)} steps")
    console.print(f"{typical * 1e3:.0f} ms a step (median)")
    console.print(f"{bytes_text(rank_bytes)} of {bytes_text(model_bytes)} of parameters on rank 0")
