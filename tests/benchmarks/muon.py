"""Steps of Muon on sharded matrices: `autoshard.Muon` beside torch's on the same DTensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table


def measured() -> dict[str, dict[str, float]]:
    """Figures of `benchmarks.muon_worker`, on 4 gloo processes of one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "muon.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "-m", "benchmarks.muon_worker", str(out)], check=True, env=env)
        found: dict[str, dict[str, float]] = json.loads(out.read_text())
    return found


def print_muon(console: Console, found: dict[str, dict[str, float]]) -> None:
    console.print(
        "[bold]muon[/] (28 matrices of 4 layers, hidden 192; medians of 3 turns, of the slowest rank)"
    )
    table = Table("mesh", "torch.optim.Muon, ms", "autoshard.Muon, ms", "ratio", "largest difference")
    for mesh, row in found.items():
        table.add_row(
            mesh,
            f"{1e3 * row['torch']:.0f}",
            f"{1e3 * row['ours']:.0f}",
            f"{row['ours'] / row['torch']:.2f}",
            f"{row['difference']:.1e}",
        )
    console.print(table)
