"""``python -m benchmarks.gpu``: everything that one GPU can tell, written to ``docs/benchmarks/gpu.md``.

The program of one rank beside eager mode and torch.compile, and beside what the simulation says of it: with a
process group of ranks that do not exist, whose messages are copies on this device. Then the kernels. On a
machine without a GPU, ``--small`` runs the same code at small sizes.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from autoshard.cluster import Cluster, load_cluster
from autoshard.kernels.launch import has_triton
from autoshard.runtime.profile.device import measure_device
from benchmarks.gpu_ranks import RANK_CASES, SMALL_RANK_CASES, rank_row
from benchmarks.gpu_steps import SMALL, STEPS, step_rows
from benchmarks.kernels_measure import Stopwatch
from benchmarks.kernels_peers import loss_rows
from benchmarks.kernels_rows import cells_of, rows

STEPS_TEXT = """
## A step beside eager mode and torch.compile

One GPU, bf16, forward, backward and fused AdamW; all make the same steps. `kernels`: with the kernels around
norms (`kernels=True`). `graphs`: recorded (`cuda_graphs=True`); its peak is what the
allocator has. `float8`: products of 8-bit operands (`products=`), whose steps are not quite the same."""
RANKS_TEXT = """
## One rank's program beside its simulation

Rank 0 of a mesh whose other ranks do not exist: messages copy on this device, which is not counted, nor is
what the device waits for the host. The device of the cluster is the one measured here (`autoshard profile`).
Op by op (`codegen="interpreter"`), and compiled, where chains of elementwise ops are simulated as a kernel
each."""
KERNELS_TEXT = """
## Kernels

bf16. `of a copy`: bytes of the planner's cost function over the time, as a part of what a copy moves.
`issue`: microseconds of the host per call. Eager, Liger: their time over ours."""
OUT = Path("docs/benchmarks/gpu.md")


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--small", action="store_true", help="small sizes, on whatever device there is")
    parser.add_argument("-o", "--out", type=Path, default=OUT, metavar="FILE")
    told = parser.parse_args()
    if unknown := set(told.names) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if not torch.cuda.is_available() and not told.small:
        print("no GPU here; --small runs the same on the CPU", file=sys.stderr)
        return 1
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    lines = list(_head(device))
    for name in told.names or SECTIONS:
        for line in SECTIONS[name](device, told.small):
            print(line, flush=True)
            lines.append(line)
    told.out.parent.mkdir(parents=True, exist_ok=True)
    told.out.write_text("\n".join(lines) + "\n")
    return 0


def _head(device: torch.device) -> Iterator[str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "a CPU"
    yield "# One GPU"
    yield ""
    yield f"`make gpu` on {name}, torch {torch.__version__}, {datetime.now(UTC).date()}. One run, medians."


def _steps(device: torch.device, small: bool) -> Iterator[str]:
    yield from STEPS_TEXT.splitlines()
    for case in (SMALL,) if small else STEPS:
        yield ""
        yield f"{case.text}:"
        yield ""
        head = ("", "step", "of torch.compile", "peak", "first step", "loss")
        yield from table(head, step_rows(case, device))


def _ranks(device: torch.device, small: bool) -> Iterator[str]:
    yield from RANKS_TEXT.splitlines()
    yield ""
    cluster = _measured(device)
    found = [rank_row(case, cluster, device) for case in (SMALL_RANK_CASES if small else RANK_CASES)]
    yield from table(
        (
            "program",
            "computing",
            "simulated",
            "off",
            "peak",
            "simulated",
            "off",
            "compiled",
            "simulated",
            "off",
        ),
        [row.cells for row in found],
    )
    yield ""
    yield "By part of the program:"
    yield ""
    head = ("program", "part", "calls", "measured", "simulated")
    yield from table(head, [cells for row in found for cells in row.parts])


def _measured(device: torch.device) -> Cluster:
    """A node of H100 with this device in place of its own."""
    found = measure_device(device, 1, 3, lambda text: None)
    node = load_cluster("h100-dgx")
    return replace(node, device=replace(found.device, overlap=node.device.overlap))


def _kernels(device: torch.device, small: bool) -> Iterator[str]:
    watch = Stopwatch.on(device) if device.type == "cuda" and has_triton() else None
    copied = watch.copy_bandwidth() if watch is not None else None
    yield from KERNELS_TEXT.splitlines()
    yield ""
    yield f"A copy moves {'?' if copied is None else f'{copied / 1e12:.2f}'} TB/s, read and written."
    yield ""
    head = ("kernel", "largest tensor", "MB", "us", "issue", "of a copy", "goal", "eager", "Liger")
    yield from table(
        head, (cells_of(row, copied, ("eager", "liger")) for row in rows(watch, (), compiled=False))
    )
    if watch is not None:
        yield ""
        yield from table(("loss and its gradient", "8,192 x 131,072, bf16"), loss_rows(watch))


def table(head: Sequence[str], cells: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of a table in Markdown."""
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in cells:
        yield f"| {' | '.join(row)} |"


SECTIONS = {"steps": _steps, "ranks": _ranks, "kernels": _kernels}

if __name__ == "__main__":
    sys.exit(main())
