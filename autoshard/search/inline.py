"""What parameters take of a step that nothing hides: copies around their messages, and messages in a queue.

Messages of parameters run beside computing, but for two things. Tensors that share a message are copied to
where it is sent from, and from where it arrives, by the streams that compute (`passes.bucket`). And where
activations travel over an axis within every layer, their messages wait for a gather that was issued before
them over the same axis, and what follows them in the layer for both.

A gather over two axes is two messages, of which the second is issued when the first is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from autoshard.cluster.axes import AxisMeaning
from autoshard.cost.reshard import ReshardTable
from autoshard.placement import Layout, Replicate
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
    return 0.0, in_a_chain(outside, share) + whole - outside


def in_a_chain(outside: F, share: F) -> F:
    """Seconds of a gather over axes that split the batch, if one over other axes needs its result: that is
    waited for to issue the second, and with it the whole message."""
    return outside / share


def is_reduced(used: Layout, sizes: Sequence[int], meanings: Sequence[AxisMeaning]) -> bool:
    """Whether gradients of a parameter in use are sums over ranks that have other sequences."""
    return any(
        m.splits_batch and n > 1 and isinstance(u, Replicate)
        for u, n, m in zip(used, sizes, meanings, strict=True)
    )
