"""The tables of `bench.frontier`."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from benchmarks.frontier import Row


def print_frontier(console: Console, found: Iterable[list[Row]]) -> None:
    """One line per partition and batch, small and large machine side by side."""
    console.print(
        "[bold]20B GPT on Frontier[/] (simulated; weights gathered and gradients reduced beside computing; "
        "paper: three levels 1.71 x ZeRO++ on 384 GCDs, scaling efficiency 0.94)"
    )
    table = Table(
        "tokens x microbatches",
        "partition",
        "step, 16 GCDs",
        "step, 384",
        "against ZeRO++",
        "efficiency",
        "into a node, x parameters",
        "GiB",
    )
    pending = list(found)
    for small, large in zip(pending[::2], pending[1::2], strict=True):
        base = next(r for r in large if r.name == "ZeRO++")
        for few, many in zip(small, large, strict=True):
            table.add_row(
                f"{many.tokens} x {many.microbatches}",
                many.name,
                f"{few.seconds:.2f} s",
                f"{many.seconds:.2f} s",
                f"{base.seconds / many.seconds:.2f} x",
                f"{many.per_second / few.per_second:.2f}",
                f"{many.crossing:.2f}",
                f"{many.peak / 2**30:.1f}",
            )
    console.print(table)


def print_dgx2(console: Console, found: Iterable[tuple[int, list[Row]]]) -> None:
    """One line per number of network cards and tokens."""
    console.print(
        "[bold]18B GPT on 384 V100[/] (simulated; paper: 2.16 x where the network is slow, 4 x fewer bytes)"
    )
    table = Table(
        "cards a node", "tokens", "ZeRO-3", "ZeRO++", "faster", "into a node, x parameters", "fewer bytes"
    )
    for cards, (plain, better) in found:
        table.add_row(
            str(cards),
            str(plain.tokens),
            f"{plain.seconds:.2f} s",
            f"{better.seconds:.2f} s",
            f"{plain.seconds / better.seconds:.2f} x",
            f"{plain.crossing:.2f} and {better.crossing:.2f}",
            f"{plain.crossing / better.crossing:.1f} x",
        )
    console.print(table)
