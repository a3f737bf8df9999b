"""Placements: how one tensor lies on one mesh axis.

``Shard`` here is a little wider than torch's: a dim of size n is seen as (outer, middle, inner) and
the *middle* part is split. ``outer=1, inner=1`` is torch's ``Shard(dim)``. The wider form is what
flattened and fused dims need: ``[batch, seq, h] -> [batch*seq, h]`` with a sharded sequence is
``Shard(0, outer=batch)``; the fused ``[3*heads*d]`` of a qkv projection split by heads is
``Shard(dim, outer=3)``. ``inner > 1`` only remains where the middle does not divide evenly (shards
are whole multiples of inner).

Uneven middles are split like ``torch.chunk``: all shards have ceil(n/t) elements but the last ones.

``outer=-2k`` is a zigzag: 2k blocks, in every second of which the ranks come in reverse order. Of a sequence
in two halves, rank r of n has part r of the first and part n-1-r of the second, so that causal attention
gives all ranks the same work (head-tail order; Llama 3, section 3.3.2). Its middle is even.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias


@dataclass(frozen=True, slots=True, order=True)
class Replicate:
    """Every rank of the axis holds the full tensor."""

    # placements are looked up so often that hashing them takes a share of planning
    def __hash__(self) -> int:
        return 1

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Each rank of the axis holds a part of ``dim``, seen as (outer, middle, inner)."""

    dim: int
    outer: int = 1
    inner: int = 1

    def __hash__(self) -> int:
        return self.dim + 31 * self.outer + 8191 * self.inner

    @property
    def blocks(self) -> int:
        """Outer blocks, whichever way round the ranks come in them."""
        return abs(self.outer)

    def __str__(self) -> str:
        outer = str(self.outer)  # of a template it is a name
        extra = f",zigzag={outer[1:]}" if outer[0] == "-" else f",outer={outer}" if outer != "1" else ""
        extra += f",inner={self.inner}" if self.inner != 1 else ""
        return f"S({self.dim}{extra})"


@dataclass(frozen=True, slots=True, order=True)
class Partial:
    """The tensor is the reduction of what the ranks of the axis hold: ``sum``, ``max``, or a merge: ``lse``
    of row statistics (`kernels.vocab_ce`), ``attention`` of parts (`ops.attention_parts`)."""

    reduce: str = "sum"

    def __str__(self) -> str:
        return "P" if self.reduce == "sum" else f"P({self.reduce})"


Placement: TypeAlias = Replicate | Shard | Partial
#: one placement per mesh axis, in mesh order
Layout: TypeAlias = tuple[Placement, ...]

R = Replicate()
P = Partial()


def chunk(n: int, parts: int, index: int) -> tuple[int, int]:
    """(start, size) of part ``index`` when n elements are cut into ``parts`` as torch.chunk does."""
    step = -(-n // parts)
    start = min(index * step, n)
    return start, min(step, n - start)


def shard_of_digit(size: int, dim: int, outer: int, middle: int, axis_size: int) -> Shard | None:
    """The placement that splits the part ``middle`` (``outer`` elements above it) of a dim, or None.

    None means that some rank would hold nothing, or that the part does not exist.
    """
    if not size or size % (outer * middle) or middle < 2 or (outer < 0 and outer % 2):
        return None
    if middle % axis_size == 0:
        return Shard(dim, outer, 1)
    if outer < 0 or middle < axis_size or chunk(middle, axis_size, axis_size - 1)[1] <= 0:
        return None
    return Shard(dim, outer, size // (outer * middle))


def is_even(size: int, shard: Shard, axis_size: int) -> bool:
    """True if every rank of the axis holds the same number of elements."""
    return (size // (shard.blocks * shard.inner)) % axis_size == 0


def dims_compatible(size: int, shards: Sequence[tuple[Shard, int]]) -> bool:
    """Whether several axes (in mesh order, with their sizes) may split the same dim together.

    Either they split the same part (then the later is nested in the earlier), or parts that do not
    overlap. All but the last in mesh order split evenly, and the last only unevenly if it is also the
    innermost. A zigzag keeps pairs of blocks.
    """
    if len(shards) == 1:
        (only, ways) = shards[0]
        middle, rest = divmod(size, only.blocks * only.inner)
        uneven = only.outer > 0 and chunk(middle, ways, ways - 1)[1] > 0
        return not rest and (middle % ways == 0 or uneven)
    local = size
    taken: list[tuple[int, int]] = []  # (outer, ways) so far, ways multiplied for nested ones
    if any(s.outer < 0 for s, _ in shards) and not _paired(shards):
        return False
    for position, (shard, ways) in enumerate(shards):
        known = dict(taken)
        if not _apart(shard.blocks, ways, known):
            return False
        block = local_outer(shard, taken) * shard.inner
        if local % block:
            return False
        middle = local // block
        if middle % ways:
            last = position == len(shards) - 1
            innermost = shard.outer > 0 and all(outer <= shard.outer for outer in known)
            return last and innermost and chunk(middle, ways, ways - 1)[1] > 0
        local //= ways
        known[shard.blocks] = known.get(shard.blocks, 1) * ways
        taken = list(known.items())
    return True


def _paired(shards: Sequence[tuple[Shard, int]]) -> bool:
    """Whether what axes further outside leave together always holds pairs of a zigzag's blocks."""

    def fits(zigzag: Shard) -> bool:
        outside = [(other.blocks, ways) for other, ways in shards if other.blocks < zigzag.blocks]
        pieces = max((n for n, _ in outside), default=1) * prod(ways for _, ways in outside)
        return zigzag.outer % (2 * pieces) == 0

    return all(fits(s) for s, _ in shards if s.outer < 0)


def _apart(outer: int, ways: int, taken: Mapping[int, int]) -> bool:
    """Whether splitting at ``outer`` leaves alone the parts already split (outer -> ways)."""
    for other, split in taken.items():
        if other < outer and outer % (other * split):
            return False
        if other > outer and other % (outer * ways * taken.get(outer, 1)):
            return False
    return True


def local_outer(shard: Shard, taken: Sequence[tuple[int, int]]) -> int:
    """Number of outer blocks left on a rank after the earlier axes ``(blocks, ways)`` were applied."""
    result = shard.blocks
    for outer, ways in taken:
        if outer < shard.blocks:
            result //= ways
    return result


def local_extent(size: int, shards: Sequence[tuple[Shard, int, int]]) -> tuple[int, int]:
    """(offset, elements) of a dim on one rank; shards are (placement, axis size, coordinate).

    The offset is the global index of the first element held; of a zigzag, in its first block.
    """
    local, offset = size, 0
    taken: list[tuple[int, int]] = []
    for shard, ways, coordinate in shards:
        outer = local_outer(shard, taken)
        middle = local // (outer * shard.inner)
        start, length = chunk(middle, ways, coordinate)
        # an earlier axis that split a part further inside left out elements between those held
        stride = prod(w for o, w in taken if o > shard.blocks)
        offset += start * shard.inner * stride
        local = outer * length * shard.inner
        taken.append((shard.blocks, ways))
    return offset, local


def local_shape(
    shape: Sequence[int], layout: Layout, sizes: Sequence[int], coords: Sequence[int]
) -> tuple[int, ...]:
    """Shape of the shard at mesh coordinates ``coords`` of a tensor with this global shape."""
    out = list(shape)
    for dim in {p.dim for p in layout if isinstance(p, Shard)}:
        out[dim] = local_extent(shape[dim], shards_of_dim(layout, dim, sizes, coords))[1]
    return tuple(out)


def shards_of_dim(
    layout: Layout, dim: int, sizes: Sequence[int], coords: Sequence[int]
) -> list[tuple[Shard, int, int]]:
    """The (placement, axis size, coordinate) of every axis that splits ``dim``, in mesh order."""
    return [
        (p, t, c)
        for p, t, c in zip(layout, sizes, coords, strict=True)
        if isinstance(p, Shard) and p.dim == dim
    ]


def in_one_piece(shape: Sequence[int], dim: int, outer: int = 1) -> bool:
    """Whether parts of a dim lie one after the other in the memory of a tensor. outer: into how many blocks
    the dim is cut first."""
    return outer == 1 and prod(shape[:dim]) == 1


def is_part_in_one_piece(
    shape: Sequence[int], layout: Layout, sizes: Sequence[int], axis: int, scale: float = 1.0
) -> bool:
    """Whether a rank's part of what it would hold without an axis lies in one piece of that memory.

    scale: as many times as many rows are in front of a dim, where the tensor stands for a larger one.
    """
    placed = layout[axis]
    if not isinstance(placed, Shard):
        return True
    dim = placed.dim
    zeros = (0,) * len(sizes)
    before = shards_of_dim(layout[:axis], dim, sizes[:axis], zeros[:axis])
    if placed.outer < 0 or local_outer(placed, [(p.blocks, t) for p, t, _ in before]) != 1:
        return False
    if dim == 0:
        return True
    if prod(shape[:dim]) > prod(sizes):
        return False  # more than can be divided among the ranks
    held = (local_extent(shape[d], shards_of_dim(layout, d, sizes, zeros))[1] for d in range(dim))
    return prod(held) * scale <= 1


def layout_ok(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether a tensor of this global shape can lie like that on a mesh with these axis sizes."""
    shards = [(p, t) for p, t in zip(layout, sizes, strict=True) if isinstance(p, Shard)]
    if len(shards) == 1:
        return dims_compatible(shape[shards[0][0].dim], shards)
    for dim in {p.dim for p, _ in shards}:
        if not dims_compatible(shape[dim], [(p, t) for p, t in shards if p.dim == dim]):
            return False
    return True


_SHARD = re.compile(r"^S\((\d{1,9})(?:,(?:outer=(\d{1,15})|zigzag=(\d{1,15})))?(?:,inner=(\d{1,15}))?\)$")
REDUCTIONS = ("sum", "max", "lse", "attention")
#: of which tensors of any shape are reduced together, as one of all their elements
ELEMENTWISE = ("sum", "max")


def parse_placement(text: str) -> Placement:
    """The placement that prints as ``text``; ValueError if there is none."""
    if text == "R":
        return R
    match = _SHARD.match(text)
    if match:
        dim, outer, zigzag, inner = (int(g) if g else 1 for g in match.groups())
        return Shard(dim, outer if match.group(3) is None else -zigzag, inner)
    for reduce in REDUCTIONS:
        if text == str(Partial(reduce)):
            return Partial(reduce)
    raise ValueError(f"{text!r} is not a placement")
