"""Steps of Muon on sharded matrices: `autoshard.Muon` beside torch's on the same DTensors."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_muon(console: Console, rows: list[dict[str, Any]]) -> None:
    console.print(
        "[bold]muon[/] (28 matrices of 4 layers, hidden 192; medians of 3 turns, of the slowest rank)"
    )
    table = Table("mesh", "torch.optim.Muon, ms", "autoshard.Muon, ms", "ratio", "largest difference")
    for row in rows:
        table.add_row(
            row["mesh"],
            f"{1e3 * row['torch']:.0f}",
            f"{1e3 * row['ours']:.0f}",
            f"{row['ours'] / row['torch']:.2f}",
            f"{row['difference']:.1e}",
        )
    console.print(table)
