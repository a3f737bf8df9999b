"""``autoshard profile``: measure this machine and write its cluster file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.cli import options as opt
from autoshard.cli.output import Progress, memory_of, print_json, reporting, stdout
from autoshard.errors import UsageError

if TYPE_CHECKING:
    from autoshard.runtime.profile.machine import MachineProfile

#: error of a fit, as a share of what was measured, that is worth a word
_DOUBTFUL = 0.5

FileOption = Annotated[
    Path, typer.Option("-o", "--out", metavar="FILE.toml", help="the cluster file to write")
]
RepeatsOption = Annotated[int, typer.Option("--repeats", min=1, help="timings that a median is taken of")]
LargestOption = Annotated[
    str | None,
    typer.Option("--largest", metavar="16MiB", help="largest message [default: 16MiB, on GPUs 256MiB]"),
]
MatrixOption = Annotated[
    bool, typer.Option("--matrix", help="measure every pair of ranks too, one by one, and write them as CSV")
]
ReplaceOption = Annotated[bool, typer.Option("--overwrite", help="replace files of an older profile")]


def profile_command(
    out: FileOption,
    repeats: RepeatsOption = 5,
    largest: LargestOption = None,
    matrix: MatrixOption = False,
    overwrite: ReplaceOption = False,
    json: opt.JsonOption = False,
    debug: opt.DebugOption = False,
) -> None:
    """Measure devices and links: torchrun --nproc-per-node N -m autoshard profile -o FILE.toml."""
    with reporting(debug):
        from autoshard.cluster.write import write_all
        from autoshard.runtime.profile.machine import Effort, measure

        effort = Effort(repeats, memory_of(largest), matrix)
        first = int(os.environ.get("RANK", 0)) == 0
        say = Progress(quiet=not first)
        with _process_group():
            _check_free(out, matrix, overwrite, first)
            profile = measure(out.stem, effort, say)
            if first:
                texts = profile.texts(out)
                write_all(texts)
                for each in profile.levels:
                    if each.worst > _DOUBTFUL:
                        say.note(
                            f"{each.level.name}: times are up to {each.worst:.0%} off; was the machine idle?"
                        )
                _report(profile, list(texts), json)
            _wait()  # so that a failure to write ends all ranks


@contextmanager
def _process_group() -> Iterator[None]:
    """The process group of torchrun; none, if this process was started on its own."""
    if "RANK" not in os.environ:
        yield
        return
    import torch
    import torch.distributed as dist

    from autoshard.runtime.profile.machine import own_device

    own_device()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _wait() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def _check_free(out: Path, matrix: bool, overwrite: bool, first: bool) -> None:
    """UsageError on every rank, before anything is measured, if rank 0 could not write the files."""
    import torch.distributed as dist

    obstacle: list[tuple[str, str] | None] = [_obstacle(out, matrix, overwrite) if first else None]
    if dist.is_initialized():
        dist.broadcast_object_list(obstacle, src=0)
    if obstacle[0] is not None:
        what, hint = obstacle[0]
        raise UsageError(what, hint=hint)


def _obstacle(out: Path, matrix: bool, overwrite: bool) -> tuple[str, str] | None:
    """(what, what to try) if the files cannot be written."""
    if out.suffix != ".toml":
        return f"{out} is not a .toml file", "cluster files end in .toml, for instance -o my.toml"
    if not out.parent.is_dir():
        return f"there is no folder {out.parent}", "make it first"
    files = [out, *((out.with_suffix(".csv"), out.with_suffix(".latency.csv")) if matrix else ())]
    existing = next((path for path in files if path.exists() and not (overwrite and path.is_file())), None)
    if existing is not None:
        return f"{existing} exists already", "choose another name, or pass --overwrite"
    if not os.access(out.parent, os.W_OK):
        return f"{out.parent} cannot be written to", "choose another folder"
    return None


def _report(profile: MachineProfile, files: list[Path], json: bool) -> None:
    cluster = profile.cluster
    if json:
        levels = [
            {
                "name": each.level.name,
                "size": each.level.size,
                "latency": each.level.latency,
                "bandwidth": each.level.bandwidth,
                "shared_by": each.level.shared_by,
                "worst_error": each.worst,
            }
            for each in profile.levels
        ]
        document = {
            "command": "profile",
            "files": [str(path) for path in files],
            "devices": cluster.devices,
            "device": {
                "name": cluster.device.name,
                "memory_bytes": cluster.device.memory_bytes,
                "peak_flops": dict(cluster.device.peak_flops),
                "memory_bandwidth": cluster.device.memory_bandwidth,
                "matmul_efficiency": cluster.device.matmul_efficiency,
                "launch_overhead": cluster.device.launch_overhead,
            },
            "levels": levels,
        }
        print_json(document)
        return
    console = stdout()
    if not profile.levels:
        console.print(
            "one device measured; no links were: start under torchrun to measure them", markup=False
        )
    console.print(f"wrote {', '.join(map(str, files))}", markup=False)
