"""``python -m benchmarks.kernels [NAME ...]``: kernels on this machine's GPU, in one table.

Every kernel is first compared with its reference in fp64 on fresh random inputs, in three element types. Then
it is timed in bf16 beside the reference in eager mode, the reference under torch.compile, and Liger-Kernel
if that is installed. Bytes are those of the cost function that the planner uses, and their rate is given as a
part of what a plain copy reaches in the same run. Exit code 1 if a kernel is wrong. Without a GPU the table
says what would be moved, and that nothing was measured.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from autoshard.kernels.launch import has_triton
from autoshard.kernels.registry import specs
from benchmarks.kernels_measure import Stopwatch
from benchmarks.kernels_rows import Row, cells_of, check, rows

CONSOLE = Console(width=170)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="kernels; default: all")
    parser.add_argument("--seed", type=int, default=None, help="of the inputs [default: a new one]")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which is slow")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the rows there")
    told = parser.parse_args()
    unknown = set(told.names) - {s.name for s in specs().values()}
    if unknown:
        parser.error(f"no kernel {', '.join(sorted(unknown))}; there are {', '.join(_names())}")
    seed = secrets.randbelow(2**31) if told.seed is None else told.seed
    measured = torch.cuda.is_available() and has_triton()
    watch = Stopwatch.on(torch.device("cuda", torch.cuda.current_device())) if measured else None
    errors = _checked(told.names, seed, watch.device) if watch is not None else {}
    bandwidth = watch.copy_bandwidth() if watch is not None else None
    found = list(rows(watch, told.names, compiled=not told.no_compile))
    _print(found, errors, bandwidth, seed)
    if told.json is not None:
        _write(told.json, found, errors, bandwidth, seed)
    wrong = [n for n, e in errors.items() if isinstance(e, str) or e > 1]
    failed = [r.name for r in found if r.failure]
    if wrong or failed:
        print(f"wrong: {', '.join(sorted({*wrong, *failed}))}", file=sys.stderr)
    return int(bool(wrong or failed))


def _names() -> list[str]:
    return [s.name for s in specs().values()]


def _checked(names: Sequence[str], seed: int, device: torch.device) -> dict[str, float | str]:
    """Kernel -> worst error over what is allowed, or what failed."""
    found: dict[str, float | str] = {}
    for spec in specs().values():
        if names and spec.name not in names:
            continue
        try:
            found[spec.name] = check(spec, seed, device)
        except (AssertionError, RuntimeError) as error:
            found[spec.name] = str(error)[:60]
    return found


def _print(found: Sequence[Row], errors: dict[str, float | str], bandwidth: float | None, seed: int) -> None:
    if bandwidth is None:
        CONSOLE.print("[bold]kernels[/] (no GPU with triton here: not measured)")
    else:
        device = (
            f"{torch.cuda.get_device_name()}, bf16, a copy moves {bandwidth / 1e12:.2f} TB/s, seed {seed}"
        )
        CONSOLE.print(f"[bold]kernels[/] ({device})")
    table = Table(
        "kernel",
        "largest tensor",
        "error",
        "MB",
        "us",
        "issue",
        "of a copy",
        "goal",
        "eager",
        "compile",
        "liger",
    )
    for row in found:
        name, sizes, *rest = cells_of(row, bandwidth, ("eager", "compile", "liger"))
        table.add_row(name, sizes, _error_text(errors.get(row.name)), *rest)
    CONSOLE.print(table)
    CONSOLE.print(
        "error: the worst in fp32, bf16 and fp16, over what is allowed; issue: us of the host; "
        "eager, compile, liger: times ours"
    )


def _error_text(error: float | str | None) -> str:
    if error is None:
        return "not measured"
    return f"{error:.2f}" if isinstance(error, float) else error


def _write(
    file: Path, found: Sequence[Row], errors: dict[str, float | str], bandwidth: float | None, seed: int
) -> None:
    device = torch.cuda.get_device_name() if bandwidth is not None else None
    document = {
        "device": device,
        "torch": torch.__version__,
        "copy_bytes_per_s": bandwidth,
        "seed": seed,
        "errors": errors,
        "rows": [asdict(r) for r in found],
    }
    file.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
