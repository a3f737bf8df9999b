"""Collectives level by level: what lies between two steps is split in blocks of what is still to be joined.

After a gather over the outermost of three axes, ``net:S(0) node:S(0) pair:S(0)`` is ``net:R
node:S(0,outer=48) pair:S(0,outer=48)``: the placements of the other axes are written in another way, though
their ranks do nothing. Whether that is so is not read off the text but computed, element by element.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np

from autoshard.ir import Arg
from autoshard.ir.collectives import transfer_between
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.placement import Shard
from autoshard.verify.indices import axes_of, coordinates, cut, held_at, in_runs, join


@lru_cache(maxsize=8192)
def wrong_step(
    kind: str,
    axes: tuple[int, ...],
    where: tuple[Arg, ...],
    before: PlacedValue,
    after: PlacedValue,
    sizes: tuple[int, ...],
) -> str:
    """What is wrong with a gather over some axes, or a reduction that scatters over one; "" if nothing is.

    axes: outermost first, as the parts are ordered. where: (dim, outer, inner, size).
    """
    if len(where) != 4 or not _plain(where):
        return "parts of unlike sizes have no form by levels"
    dim, outer = int(where[0]), int(where[1])
    if dim >= len(before.type.shape) or outer < 1:
        return f"{before.type} has no place {where}"
    for k, (p, q) in enumerate(zip(before.layout, after.layout, strict=True)):
        if k in axes:
            dims = {placed.dim for placed in (p, q) if isinstance(placed, Shard)}
            several = len(axes) > 1 and kind != "all_gather"
            if transfer_between(p, q) != kind or dims != {dim} or several:
                return f"{p} becomes {q} on an axis that it goes over"
        elif p != q and not (isinstance(p, Shard) and isinstance(q, Shard) and p.dim == q.dim == dim):
            return f"{p} becomes {q} on an axis that it does not go over"
    size = before.type.shape[dim]
    others = sorted({*axes_of(before.layout, dim), *axes_of(after.layout, dim)} - set(axes))
    ranks = [dict(zip(axes, at, strict=True)) for at in product(*(range(sizes[a]) for a in axes))]
    parts = outer if kind == "all_gather" else outer * len(ranks)
    size, layouts, _ = in_runs(size, (before.layout, after.layout), dim, sizes, parts)
    for at in coordinates(others, sizes):
        have = [held_at(size, layouts[0], dim, sizes, {**at, **own}) for own in ranks]
        full = join(have, outer) if kind == "all_gather" else None
        for k, own in enumerate(ranks):
            given = cut(have[k], outer, 1, len(ranks), k) if full is None else full
            if not np.array_equal(given, held_at(size, layouts[1], dim, sizes, {**at, **own})):
                return "ranks would hold other elements than the placements say"
    return ""


def _plain(where: tuple[Arg, ...]) -> bool:
    numbers = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in where[:3])
    return numbers and where[2] == 1 and where[3] is None


def wrong_precision(args: tuple[Arg, ...], count: int) -> str:
    """What is wrong with how few bits a bucket of so many tensors travels in, "" if nothing is.

    args: those behind the places: bits of every tensor, and how many elements share a scale.
    """
    if len(args) != 2 or not isinstance(args[0], tuple) or len(args[0]) != count:
        return "it does not say with how many bits each tensor travels"
    bits, group = args
    used = {b for b in bits if b != 0}
    if len(used) != 1 or not used <= {4, 8}:
        return f"bits {bits}: each is 0, or all others are 8, or 4"
    if not isinstance(group, int) or group & (group - 1) or not 32 <= group <= 4096:
        return f"{group} elements cannot share a scale"
    return ""
