"""``autoshard plan --for TOOL`` and ``autoshard check-config``: configurations of other tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.cli import options as opt
from autoshard.cli.output import Progress, memory_of, print_json, print_table, reporting, stdout, table
from autoshard.errors import UsageError
from autoshard.options import PlanOptions

if TYPE_CHECKING:
    from autoshard.advise.judge import Judged
    from autoshard.advise.ours import OwnPlan
    from autoshard.advise.search import Advice
    from autoshard.advise.tool_config import ToolConfig
    from autoshard.advise.tools import Tool
    from autoshard.advise.work import Work

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="a config, or a script with flags", show_default=False)
]
ToolOption = Annotated[
    str | None, typer.Option("--tool", metavar="NAME", help="whose file it is [default: told by its keys]")
]
GpusOption = Annotated[int | None, typer.Option("--gpus", min=1, help="devices of the cluster to use")]
MicroBatch = Annotated[
    int | None, typer.Option("--micro-batch", min=1, help="sequences of a microbatch of a rank")
]
GlobalBatch = Annotated[
    int | None, typer.Option("--global-batch", min=1, help="sequences per optimizer step")
]
MemoryOption = Annotated[str | None, typer.Option("--memory", metavar="16GiB", help="bytes per device")]
#: configurations that are shown beside the best, and changes of one setting
_SHOWN = 5


def advise_tool(
    target: str,
    tool_name: str,
    cluster: str | None,
    options: PlanOptions,
    seq: int | None,
    out: Path | None,
    overwrite: bool,
    json: bool,
) -> None:
    """Print the best configuration of a tool, and write its file."""
    from autoshard.advise.formats.registry import written
    from autoshard.advise.ours import own_plan, own_program
    from autoshard.advise.search import advise
    from autoshard.advise.tools import tool_named

    tool = tool_named(tool_name)
    allowed = PlanOptions(devices=options.devices, global_batch=options.global_batch, memory=options.memory)
    if options != allowed:
        raise UsageError(
            "--for goes with --cluster, --gpus, --global-batch, --seq and --memory alone",
            why=f"the rest is what {tool.title} decides",
        )
    if options.global_batch is None:
        raise UsageError(
            "--for needs --global-batch", why="a tool's microbatches are part of its configuration"
        )
    if out is not None and out.exists() and not overwrite:
        raise UsageError(f"{out} exists", hint="--overwrite")
    say = Progress()
    work = _work(target, cluster, options.devices, options.global_batch, seq, options.memory, say)
    advice = advise(tool, work, say)
    program = own_program(work, say)
    ours = None if program is None else own_plan(program, work, tool)
    text = written(tool, advice.best.choice, work.batch, work.seq)
    if out is not None:
        out.write_text(text, encoding="utf-8")
    if json:
        print_json({"command": "plan --for", "tool": tool.name, "config": text, **_document(advice, ours)})
        return
    _print_advice(tool, work, advice, ours)
    stdout().print()
    stdout().print(text if out is None else f"config written to {out}", markup=False, highlight=False)


def check_config_command(
    config: ConfigArgument,
    target: opt.TargetArgument,
    cluster: opt.ClusterOption = None,
    gpus: GpusOption = None,
    global_batch: GlobalBatch = None,
    micro_batch: MicroBatch = None,
    seq: opt.SeqOption = None,
    memory: MemoryOption = None,
    tool: ToolOption = None,
    json: opt.JsonOption = False,
    debug: opt.DebugOption = False,
) -> None:
    """Say what a config of another tool takes, whether it fits, and which setting to change.

    Megatron flags or Bridge overrides, torchtitan TOML or flags, Accelerate YAML, DeepSpeed JSON, and
    transformers' DistributedConfig as JSON. What the file does not say is an option.
    """
    with reporting(debug):
        from autoshard.advise.formats.registry import read_config
        from autoshard.advise.judge import Judge
        from autoshard.advise.neighbours import neighbours
        from autoshard.advise.tools import tool_named
        from autoshard.planner.planned import WORTH

        name, settings = read_config(config, None if tool is None else tool_named(tool).name)
        kind = tool_named(name)
        micro = _one("microbatch", settings.micro, micro_batch, "--micro-batch")
        settings = replace(settings, micro=micro)
        batch = _one("global batch", settings.batch, global_batch, "--global-batch")
        if batch is None:
            raise UsageError(f"{config} does not say how many sequences a step has", hint="--global-batch")
        work = _work(
            target,
            cluster,
            _one("number of GPUs", settings.gpus, gpus, "--gpus"),
            batch,
            _one("sequence length", settings.seq, seq, "--seq"),
            memory_of(memory),
            Progress(),
        )
        choice = kind.plain(settings.choice(work.gpus, work.batch, work.layers))
        judge = Judge(kind, work)
        judged = judge.of(choice)
        if isinstance(judged, str):
            raise UsageError(f"{choice} cannot be simulated", where=str(config), why=judged)
        changes = [j for c in neighbours(choice, kind, work) if not isinstance(j := judge.of(c), str)]
        better = sorted(
            (j for j in changes if j.fits and (j.seconds < (1 - WORTH) * judged.seconds or not judged.fits)),
            key=lambda j: j.seconds,
        )
        rows = [(_difference(kind, judged, j, work), j) for j in better[:_SHOWN]]
        if json:
            document = {"tool": name, "config": _as_json(judged), "ignored": list(settings.ignored)}
            tried = [{"setting": words, **_as_json(j)} for words, j in rows]
            print_json({"command": "check-config", **document, "better": tried})
            return
        _print_check(kind, work, judged, rows, settings.ignored)


def _one(what: str, said: int | None, given: int | None, flag: str) -> int | None:
    if said is not None and given is not None and said != given:
        raise UsageError(f"the config says a {what} of {said}, and {flag} {given}", hint="leave one out")
    return said if said is not None else given


def _work(
    target: str,
    cluster: str | None,
    gpus: int | None,
    batch: int,
    seq: int | None,
    memory: int | None,
    say: Progress,
) -> Work:
    from autoshard.advise.work import work_of
    from autoshard.cluster import load_cluster
    from autoshard.interop.targets import SEQ

    where = load_cluster(cluster or "h100-dgx")
    count = gpus or where.devices
    if count is None:
        raise UsageError("it is not said how many GPUs there are", hint="--gpus N")
    say(f"capturing {target}")
    return work_of(target, where, count, batch, seq or SEQ, memory)


def _print_advice(tool: Tool, work: Work, advice: Advice, ours: OwnPlan | None) -> None:
    from autoshard.ir.units import seconds_text

    best = advice.best
    _heading(tool, work)
    _print_judged("best", best, work)
    share = 1 - advice.bound / best.seconds
    _row(
        "bound",
        f"none of the {advice.size:,} configurations of {tool.title} is faster than "
        f"{seconds_text(advice.bound)}"
        + (f", {share:.1%} below" if share > 1e-9 else "")
        + f"; {advice.simulated} were simulated",
    )
    if ours is not None:
        _row(
            "autoshard",
            f"{ours.mesh}: {seconds_text(ours.same_kernels)} simulated with the kernels of {tool.title} "
            f"({best.seconds / ours.same_kernels - 1:+.1%} in speed), "
            f"{seconds_text(ours.seconds)} with its own",
        )
    _print_notes(best.notes)
    if advice.others:
        stdout().print()
        _print_rows([(str(j.choice), j) for j in advice.others[:_SHOWN]], best.seconds, "next configurations")


def _print_check(
    tool: Tool, work: Work, judged: Judged, rows: Sequence[tuple[str, Judged]], ignored: Sequence[str]
) -> None:
    _heading(tool, work)
    _print_judged("config", judged, work)
    if not rows:
        _row("next", "no change of one setting is faster" if judged.fits else "no change of one setting fits")
    _print_notes((*ignored, *judged.notes))
    if rows:
        stdout().print()
        _print_rows(rows, judged.seconds, "change one setting")


def _heading(tool: Tool, work: Work) -> None:
    stdout().print(f"[bold]{tool.title}[/]", end="  ")
    stdout().print(
        f"{work.parameters / 1e9:.2f}B parameters on {work.gpus} of {work.cluster.name}, "
        f"{work.batch} sequences of {work.seq} tokens per step",
        markup=False,
        highlight=False,
    )


def _row(name: str, text: str) -> None:
    stdout().print(f"{name:<11}{text}", markup=False, highlight=False)


def _print_judged(name: str, judged: Judged, work: Work) -> None:
    from autoshard.ir.units import bytes_text, seconds_text

    _row(name, str(judged.choice))
    spent = judged.step.spent
    parts = {
        "compute": spent.compute,
        "exposed communication": spent.exposed,
        "messages between stages": spent.p2p,
        "bubble": spent.bubble,
        "optimizer": spent.update,
    }
    text = " + ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts.items() if seconds > 0)
    _row("step", f"{seconds_text(judged.seconds)} simulated, MFU {judged.step.mfu:.1%}: {text}")
    row = judged.step.fullest
    held = row.at_peak
    _row(
        "memory",
        f"{'fits' if judged.fits else 'DOES NOT FIT'}: {bytes_text(row.peak)} of tensors on the fullest rank "
        f"of {bytes_text(work.memory)}: parameters {bytes_text(held.parameters)} + gradients "
        f"{bytes_text(held.gradients)} + optimizer {bytes_text(held.optimizer)} + activations, gathered "
        f"parameters and temporaries {bytes_text(held.activations + row.peak - held.total)}",
    )


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        _row("note", note)


def _print_rows(rows: Sequence[tuple[str, Judged]], against: float, title: str) -> None:
    from autoshard.ir.units import bytes_text, seconds_text

    lines = table(title, "step", "relative", "memory", right=(1, 2, 3))
    for words, judged in rows:
        lines.add_row(
            words, seconds_text(judged.seconds), f"{judged.seconds / against:.3f} x", bytes_text(judged.peak)
        )
    print_table(lines)


def _difference(tool: Tool, old: Judged, new: Judged, work: Work) -> str:
    """The lines of the tool's own file that are others, or are gone."""

    from autoshard.advise.formats.registry import written

    def lines(choice: ToolConfig) -> list[str]:
        text = written(tool, choice, work.batch, work.seq).splitlines()
        return [line.strip().rstrip(",") for line in text if line.strip() and not line.startswith("#")]

    before, after = lines(old.choice), lines(new.choice)
    added = [line for line in after if line not in before]
    names = {_name(line) for line in added}
    gone = [f"no {_name(line)}" for line in before if line not in after and _name(line) not in names]
    return ", ".join((*added, *gone)) or str(new.choice)


def _name(line: str) -> str:
    return line.replace("=", " ").replace(":", " ").split()[0].strip('"')


def _document(advice: Advice, ours: OwnPlan | None) -> dict[str, Any]:
    return {
        "best": _as_json(advice.best),
        "others": [_as_json(j) for j in advice.others[:_SHOWN]],
        "configurations": advice.size,
        "simulated": advice.simulated,
        "bound_seconds": advice.bound,
        "autoshard": None if ours is None else asdict(ours),
    }


def _as_json(judged: Judged) -> dict[str, Any]:
    choice = judged.choice
    return {
        "tensor": choice.tensor,
        "pipeline": choice.pipeline,
        "stages_per_rank": choice.chunks,
        "schedule": choice.schedule if choice.pipeline > 1 else None,
        "shards": choice.shards,
        "replicas": choice.replicas,
        "zero": choice.zero,
        "microbatch": choice.micro,
        "recompute": choice.recompute,
        "off": list(choice.off),
        "seconds": judged.seconds,
        "mfu": judged.step.mfu,
        "peak_bytes": judged.peak,
        "fits": judged.fits,
        "notes": list(judged.notes),
    }
