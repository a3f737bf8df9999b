"""``python -m autoshard.bench [planning|steps ...]``: run benchmarks and print their tables."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autoshard.bench.planning import PlanningRow, measure

CONSOLE = Console(width=110)


def planning() -> None:
    """GPT-3 175B for dp=16,tp=8 from cold, and how depth counts once the model is captured."""
    CONSOLE.print("[bold]planning[/] (fresh process each, median of 3)")
    table = Table("case", "process s", "capture s", "after capture s", "peak GiB", "gap")
    rows: dict[int, PlanningRow] = {}
    for layers in (12, 96):
        runs = [measure(layers, 12288, 96, "dp=16,tp=8") for _ in range(3)]
        rows[layers] = row = sorted(runs, key=lambda r: r.seconds)[1]
        after = statistics.median(r.after_capture_s for r in runs)
        rows[layers] = PlanningRow(row.case, row.seconds, row.capture_s, after, row.peak_gib, row.gap)
        table.add_row(
            row.case,
            f"{row.seconds:.1f}",
            f"{row.capture_s:.1f}",
            f"{after:.2f}",
            f"{row.peak_gib:.2f}",
            f"{row.gap:.1%}",
        )
    CONSOLE.print(table)
    ratio = rows[96].after_capture_s / rows[12].after_capture_s
    CONSOLE.print(f"96 layers against 12 once captured: {ratio:.2f} x (goal 1.5)")


def steps() -> None:
    """Step time of emitted programs against torch by hand: 4 gloo processes, one thread each."""
    CONSOLE.print("[bold]step time[/] (Llama, 6 layers, hidden 256, batch 8 x 64; AdamW; alternating rounds)")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "steps.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "-m", "autoshard.bench.step_worker", str(out)], check=True, env=env)
        rows = json.loads(out.read_text())
    hands = {"fsdp=4": "FSDP2 fully_shard", "tp=4": "parallelize_module", "dp=4": "DDP"}
    table = Table("mesh", "autoshard ms", "by hand", "by hand ms", "median ratio")
    for row in rows:
        table.add_row(
            row["mesh"],
            f"{row['ours_s'] * 1e3:.0f}",
            hands[row["mesh"]],
            f"{row['by_hand_s'] * 1e3:.0f}",
            f"{row['ratio']:.2f}",
        )
    CONSOLE.print(table)


BENCHMARKS = {"planning": planning, "steps": steps}


def main(names: list[str]) -> None:
    unknown = set(names) - set(BENCHMARKS)
    if unknown:
        raise SystemExit(f"unknown benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    for name in names or list(BENCHMARKS):
        BENCHMARKS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
