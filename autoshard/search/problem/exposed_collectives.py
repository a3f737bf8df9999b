"""What parameters take of a step that nothing hides: copies around their messages, and messages in a queue.

Messages of parameters run beside computing, but for three things. Tensors that share a message are copied to
where it is sent from, and from where it arrives, by the streams that compute (`passes.overlap.bucket`). And
where activations travel over an axis within every layer, their messages wait for a gather that was issued
before them over the same axis, and what follows them in the layer for both. A gradient that is reduced over
two axes is two messages, and to issue the second the first is waited for, with all that travels in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TypeVar

import numpy as np

from autoshard.cluster.axes import AxisMeaning
from autoshard.cost.reshard import ReshardTable
from autoshard.ir.placement import Layout, Partial, Replicate, Shard
from autoshard.solver.network import Array

F = TypeVar("F", float, Array)


def gather_copies(own: F, whole: F, bandwidth: float) -> F:
    """Seconds of packing the part that a rank has, and of unpacking what was gathered; bytes of each."""
    return 2.0 * (own + whole) / bandwidth


def reduce_copies(whole: F, bandwidth: float) -> F:
    """Seconds of packing a gradient of so many bytes; what arrives is read where it lies."""
    return 2.0 * whole / bandwidth


def bare_gather(
    stored: Layout,
    used: Layout,
    row: Array,
    table: ReshardTable,
    meanings: Sequence[AxisMeaning],
) -> float:
    """Seconds of a gather over axes which split layers, 0 where there is none.

    row: of the table, seconds from ``stored`` to each of its layouts. meanings: of the axes of the mesh. What
    is gathered over other axes before is issued a call earlier (`passes.overlap.prefetch`), and may hide.
    """
    inside = [m.splits_layers and s != u for m, s, u in zip(meanings, stored, used, strict=True)]
    if not any(inside):
        return 0.0
    goal = table.index[used]
    full, between = row.item(goal), table.hop.item(table.index[stored], goal)
    if between == goal:
        return full
    first = table.layouts[between]
    early = any(w and s != f for s, f, w in zip(stored, first, inside, strict=True))
    late = any(w and f != u for f, u, w in zip(first, used, inside, strict=True))
    before = row.item(between)
    return (before if early else 0.0) + (full - before if late else 0.0)


def reduce_chains(
    produced: Sequence[Layout],
    stored: Sequence[Layout],
    table: ReshardTable,
    meanings: Sequence[AxisMeaning],
    share: float,
) -> Array | None:
    """Seconds that the first of two messages of a gradient is in the way, [made, stored]; None if none is.

    share: of the gradient in the first.
    """
    inside = [k for k, m in enumerate(meanings) if m.splits_layers]
    outside = [k for k, m in enumerate(meanings) if not m.splits_layers]
    chains: dict[tuple[Layout, Layout], float] = {}
    for g in {g for g in produced if sums_over(g, inside) and sums_over(g, outside)}:
        for s in {s for s in stored if any(isinstance(s[k], Shard) for k in inside)}:
            start, goal = table.index[g], table.index[s]
            between = table.hop.item(start, goal)
            if between == goal or not isfinite(table.seconds.item(start, goal)):
                continue
            # one over an axis inside layers is short and alone: that may well come first
            if all(g[k] == table.layouts[between][k] for k in inside):
                chains[g, s] = table.seconds.item(start, between) / share
    if not chains:
        return None
    return np.array([[chains.get((g, s), 0.0) for s in stored] for g in produced])


def sums_over(layout: Layout, axes: Sequence[int]) -> bool:
    """Whether a value is a sum over ranks of any of these axes that is still to be made."""
    return any(isinstance(layout[k], Partial) for k in axes)


def is_reduced(used: Layout, sizes: Sequence[int], meanings: Sequence[AxisMeaning]) -> bool:
    """Whether gradients of a parameter in use are sums over ranks that have other sequences."""
    return any(
        m.splits_batch and n > 1 and isinstance(u, Replicate)
        for u, n, m in zip(used, sizes, meanings, strict=True)
    )
