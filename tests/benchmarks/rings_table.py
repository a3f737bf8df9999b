"""The table of `bench.rings`."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from benchmarks.rings import RingRow


def print_rings(console: Console, found: Iterable[RingRow]) -> None:
    """One line per stack and place; pairs are without rings and with them."""
    console.print(
        "[bold]rings[/] (8 layers with embedding and head, bf16, weights divided as Megatron-LM does; whole "
        "steps, simulated; without rings, with rings)"
    )
    table = Table(
        "cluster",
        "mesh",
        "layers of",
        "tokens",
        "step ms",
        "faster",
        "rings",
        "exposed ms",
        "messages of a rank",
        "MiB",
    )
    for row in found:
        apart, ringed = row.apart, row.ringed
        table.add_row(
            row.cluster,
            row.mesh,
            row.stack.name,
            f"{row.stack.batch} x {row.stack.seq}",
            f"{apart.seconds * 1e3:.1f}, {ringed.seconds * 1e3:.1f}",
            f"{apart.seconds / ringed.seconds - 1:.1%}",
            str(ringed.rings),
            f"{apart.exposed * 1e3:.1f}, {ringed.exposed * 1e3:.1f}",
            f"{apart.messages}, {ringed.messages}",
            f"{apart.nbytes / 2**20:.0f}, {ringed.nbytes / 2**20:.0f}",
        )
    console.print(table)
