"""Pipelines beside torch.distributed.pipelining, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.pipelines import HIDDEN, LAYERS, MICROBATCHES, PIECE, RANKS, SEQ, VOCAB, PipelineRow


def print_pipelines(console: Console, rows: Sequence[PipelineRow]) -> None:
    """One line per schedule."""
    console.print(
        f"[bold]pipelines[/] (Llama, {LAYERS} layers, hidden {HIDDEN}, vocabulary {VOCAB}; "
        f"{MICROBATCHES} microbatches of {PIECE} x {SEQ} in float32; {RANKS} gloo processes of one thread; "
        "forward and backward; both sides take turns)"
    )
    table = Table("schedule", "stages per rank", "autoshard ms", "torch ms", "median ratio", "differ by")
    for row in rows:
        table.add_row(
            row.schedule,
            str(row.chunks),
            f"{row.ours_s * 1e3:.0f}",
            f"{row.torch_s * 1e3:.0f}",
            f"{row.ratio:.2f}",
            f"{max(row.loss_error, row.grad_error):.0e}",
        )
    console.print(table)
