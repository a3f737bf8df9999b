"""What parameters take of a step that nothing hides: copies around their messages, and messages in a queue.

Messages of parameters run beside computing, but for two things. Tensors that share a message are copied to
where it is sent from, and from where it arrives, by the streams that compute (`passes.bucket`). And where
activations travel over an axis within every layer, their messages wait for a gather that was issued before
them over the same axis, and what follows them in the layer for both.

What goes over two axes is two messages, of which the second is issued when the first is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TypeVar

import numpy as np

from autoshard.cluster.axes import AxisMeaning
from autoshard.cost.reshard import ReshardTable
from autoshard.placement import Layout, Partial, Replicate, Shard
from autoshard.search.network import Array

F = TypeVar("F", float, Array)


def gather_copies(own: F, whole: F, bandwidth: float) -> F:
    """Seconds of packing the part that a rank has, and of unpacking what was gathered; bytes of each."""
    return 2.0 * (own + whole) / bandwidth


def reduce_copies(whole: F, bandwidth: float) -> F:
    """Seconds of packing a gradient of so many bytes; what arrives is read where it lies."""
    return 2.0 * whole / bandwidth


def gather_parts(
    stored: Layout,
    used: Layout,
    row: Array,
    table: ReshardTable,
    meanings: Sequence[AxisMeaning],
    share: float,
) -> tuple[float, float]:
    """(seconds of a gather that may hide, seconds that stand in the way) of a parameter.

    row: of the table, seconds from ``stored`` to each of its layouts. meanings: of the axes of the mesh.
    share: of the parameter in the message that it travels in.
    """
    start, goal = table.index[stored], table.index[used]
    whole = row.item(goal)
    inside = [m.splits_layers and s != u for m, s, u in zip(meanings, stored, used, strict=True)]
    if not any(inside):
        return whole, 0.0
    # axes that only split the batch are gathered first, while there is less to gather
    before = tuple(s if within else u for s, u, within in zip(stored, used, inside, strict=True))
    column = table.index.get(before)
    outside = 0.0 if column is None else row.item(column)
    if not 0 < outside < whole:
        return 0.0, whole
    following = table.layouts[table.hop.item(start, goal)]
    if any(within and s != f for s, f, within in zip(stored, following, inside, strict=True)):
        return outside, whole - outside
    # the second message needs what the first brings, so the whole message that it travels in is waited for
    return 0.0, outside / share + whole - outside


def reduce_chains(
    made: Sequence[Layout],
    stored: Sequence[Layout],
    table: ReshardTable,
    meanings: Sequence[AxisMeaning],
    share: float,
) -> Array | None:
    """Seconds that the first of two messages of a gradient stands in the way, [made, stored]; None if none is.

    share: of the gradient in the first.
    """
    inside = [k for k, m in enumerate(meanings) if m.splits_layers]
    if len(inside) in (0, len(meanings)):
        return None
    found: dict[tuple[Layout, Layout], float] = {}
    for g in {g for g in made if any(isinstance(g[k], Partial) for k in inside)}:
        for s in {s for s in stored if any(isinstance(s[k], Shard) for k in inside)}:
            start, goal = table.index[g], table.index[s]
            between = table.hop.item(start, goal)
            if between == goal or not isfinite(table.seconds.item(start, goal)):
                continue
            # messages over axes inside layers are short and alone: they may well come first
            if all(g[k] == table.layouts[between][k] for k in inside):
                found[g, s] = table.seconds.item(start, between) / share
    if not found:
        return None
    return np.array([[found.get((g, s), 0.0) for s in stored] for g in made])


def is_reduced(used: Layout, sizes: Sequence[int], meanings: Sequence[AxisMeaning]) -> bool:
    """Whether gradients of a parameter in use are sums over ranks that have other sequences."""
    return any(
        m.splits_batch and n > 1 and isinstance(u, Replicate)
        for u, n, m in zip(used, sizes, meanings, strict=True)
    )
