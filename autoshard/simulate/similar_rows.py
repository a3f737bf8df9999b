"""What it takes to group rows of experts and to put back what came of them (`ops.similar_rows`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from autoshard.ir import Node
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.similar_rows import DIRECTIONS, GROUP_CHOICES, LSH_GROUPS, UNGROUP_TO_WEIGHTS
from autoshard.simulate.work import MatmulWork, MemoryWork

#: passes over the keys of rows: a sort of 64 bits by 8 (NVIDIA CUB's radix sort reads and writes keys and
#: places once for each 8 bits), and what makes groups of the order
_PASSES, _ENTRY = 10, 16
#: bytes of an element as rows are added up
_WIDE = 4


def grouped_work(
    node: Node,
    ins: Sequence[PlacedValue],
    outs: Sequence[PlacedValue],
    shape: Callable[[PlacedValue], tuple[int, ...]],
    nbytes: Callable[[PlacedValue], float],
) -> list[MatmulWork | MemoryWork]:
    """shape, nbytes: of a value on the rank. Bytes are read and written."""
    rows = prod(shape(ins[-1]))
    if node.op == LSH_GROUPS:
        tokens, width = shape(ins[0])
        count = node.args[3] * DIRECTIONS
        signs = width * count * ins[0].type.nbytes / max(1, ins[0].type.numel)
        along = tokens * count * _WIDE
        moved = nbytes(ins[0]) + signs + along
        product = MatmulWork(1, max(1, tokens), max(1, count), width, ins[0].type.dtype, moved)
        # signs are made of their numbers, along is read for the largest
        return [MemoryWork(signs), product, MemoryWork(along + rows * _PASSES * _ENTRY)]
    if node.op == GROUP_CHOICES:
        return [MemoryWork(2.0 * sum(map(nbytes, ins)) + nbytes(outs[0]))]
    # a row of every choice is read where rows are added up, and before that copied for weights
    largest = max((*ins, *outs), key=lambda v: shape(v)[1])
    times = 4 if node.op == UNGROUP_TO_WEIGHTS else 1
    each = _WIDE * shape(largest)[1] * (times * rows + shape(largest)[0])
    return [MemoryWork(sum(map(nbytes, (*ins, *outs))) + each)]
