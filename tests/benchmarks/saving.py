"""How long a checkpoint keeps training from going on: written at once, or copied and written beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

#: bytes of a rank's state: parameters and two moments in float32, of 7e9 parameters on 8 ranks
LARGE = 7e9 * 12 / 8


def measured() -> dict[str, Any]:
    """Figures of `benchmarks.saving_worker`, on 4 gloo processes of one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "saving.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "-m", "benchmarks.saving_worker", str(out)], check=True, env=env)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def print_saving(console: Console, found: dict[str, Any]) -> None:
    gb, seconds = found["bytes"] / 1e9, found["seconds"]
    console.print(
        f"[bold]saving[/] (Llama and AdamW, {gb:.2f} GB on each rank of fsdp=4 on {found['device']}; medians "
        "of alternating rounds, of the slowest rank)"
    )
    table = Table("training waits for", "s", "s per GB of a rank", "7B, AdamW, 8 ranks, s")
    for name, what in (
        ("save", "Checkpoints.save(step): all is written"),
        ("dcp.async_save", "dcp.async_save: copied to new memory"),
        ("async_save", "Checkpoints.save(step, wait=False): copied to kept memory"),
    ):
        each = seconds[name] / gb
        table.add_row(what, f"{seconds[name]:.2f}", f"{each:.2f}", f"{each * LARGE / 1e9:.1f}")
    console.print(table)
    console.print(
        f"a step {seconds['step']:.2f} s, while a checkpoint is written {seconds['step while writing']:.2f} s"
    )
