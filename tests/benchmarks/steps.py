"""Step times of emitted programs, and how many collectives are in them without and with the passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

#: models of the table of collectives: name, `transformers` class, what differs from its small config
MODELS = ("llama", "gpt2", "t5", "mixtral")
MESHES = ("fsdp=4", "tp=4", "dp=2,tp=2", "dp=4")


@dataclass(frozen=True)
class Messages:
    """Of one step on one rank. wire: bytes that it sends."""

    model: str
    mesh: str
    before: int
    after: int
    wire_before: float
    wire_after: float


def measured(worker: str = "step_worker") -> list[dict[str, Any]]:
    """Rows of a worker, on 4 gloo processes of one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "steps.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "-m", f"benchmarks.{worker}", str(out)], check=True, env=env)
        rows: list[dict[str, Any]] = json.loads(out.read_text())
    return rows


def messages() -> Iterator[Messages]:
    """Collectives of small models on 4 ranks, without any optional pass and with all of them."""
    import autoshard
    from autoshard.cluster import load_cluster
    from autoshard.simulate.estimate import Estimator
    from benchmarks.models import small_model
    from benchmarks.step_worker import OFF

    cluster = load_cluster("cpu-gloo")
    settings: tuple[dict[str, Any], ...] = (OFF, {})
    for name in MODELS:
        for mesh in MESHES:
            model, inputs = small_model(name)
            planned = autoshard.plan(model, mesh, example_inputs=inputs, cluster=cluster)
            rows = [
                Estimator(autoshard.compile(model, planned, **passes).program, cluster).traffic()
                for passes in settings
            ]
            counts = [sum(r.count for r in row) for row in rows]
            wires = [sum(r.wire for r in row) for row in rows]
            yield Messages(name, mesh, counts[0], counts[1], wires[0], wires[1])


def print_steps(
    console: Console, rows: list[dict[str, Any]], what: str = "Llama, 6 layers, hidden 256, batch 8 x 64"
) -> None:
    console.print(f"[bold]step time[/] ({what}; AdamW; alternating rounds)")
    table = Table("case", "autoshard ms", "against", "ms", "median ratio")
    for row in rows:
        others = row["other_s"]
        table.add_row(
            row["case"],
            f"{row['ours_s'] * 1e3:.0f}",
            ", ".join(others),
            ", ".join(f"{s * 1e3:.0f}" for s in others.values()),
            f"{row['ratio']:.2f}",
        )
    console.print(table)


def print_messages(console: Console, rows: Iterator[Messages]) -> None:
    console.print("[bold]collectives of a step[/] (small models, 4 ranks, prices of cpu-gloo)")
    table = Table("model", "mesh", "messages without passes", "with", "MiB sent per rank without", "with")
    for row in rows:
        table.add_row(
            row.model,
            row.mesh,
            str(row.before),
            str(row.after),
            f"{row.wire_before / 2**20:.2f}",
            f"{row.wire_after / 2**20:.2f}",
        )
    console.print(table)
