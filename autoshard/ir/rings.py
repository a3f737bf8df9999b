"""Products taken apart beside the message before or after them, as one op of a program each.

The ranks of an axis pass chunks of rows round a ring, and multiply the chunk at hand meanwhile (Wang et al.,
"Overlap communication with dependent computation via decomposition in large deep learning models", ASPLOS
2023):

* ``g, y, ... = comm.all_gather_mm((x, w, ...), axis, dim, outer=1)``: g is x gathered along a dim, and each
  y is g, its leading dims as one, times its w;
* ``y = comm.mm_reduce_scatter((a, w, ...), axis, dim, shape, outer=1)``: the sum of all ``a @ w``, its rows
  seen as the leading dims of y, its parts along a dim summed over the ranks. Several products are added from
  left to right. shape: of y on a rank.

Chunks are equal: the dim, seen as (outer, middle, inner), is divided evenly. It is never the last one, so
that chunks are rows of products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from autoshard.ir.collectives import ALL_GATHER_MM
from autoshard.ir.graph import Arg, Node, Ref
from autoshard.ir.types import DTYPES, TensorType

#: rows of a matrix, below which matrix units are half idle
_FEW = 256


@dataclass(frozen=True)
class Ring:
    """A ring as its text says it.

    gathers: whether rows are gathered before the products, else sums are scattered after them. products:
    (left factor, right factor) by name; the left one of a gather is what it gives. moved: the value whose
    shape the dim is of: what a gather is given, or what a scatter gives. shape: of a rank's part of what a
    scatter gives, () for a gather.
    """

    gathers: bool
    moved: str
    products: tuple[tuple[str, str], ...]
    axis: str
    dim: int
    outer: int
    shape: tuple[Arg, ...] = ()


def ring_of(node: Node) -> Ring | None:
    """What a ring says, None if its text is not that of one."""
    args = node.args
    gathers = node.op == ALL_GATHER_MM.op
    fits = len(args) == (3 if gathers else 4) and isinstance(args[0], tuple)
    if not fits or not all(isinstance(a, Ref) for a in args[0]):
        return None
    if not isinstance(args[1], str) or type(args[2]) is not int:
        return None
    kwargs = dict(node.kwargs)
    outer = kwargs.pop("outer", 1)
    if kwargs or type(outer) is not int or outer < 1 or None in node.types:
        return None
    names = [a.name for a in args[0]]
    if gathers:
        if len(names) < 2 or len(node.outs) != len(names):
            return None
        products = tuple((node.outs[0], w) for w in names[1:])
        return Ring(True, names[0], products, args[1], args[2], outer)
    if not names or len(names) % 2 or len(node.outs) != 1 or not isinstance(args[3], tuple):
        return None
    products = tuple(zip(names[::2], names[1::2], strict=True))
    return Ring(False, node.outs[0], products, args[1], args[2], outer, args[3])


def ring_flop(node: Node, types: Mapping[str, TensorType]) -> float:
    """FLOP of the products of a ring on full tensors. types: global, of what it takes and makes."""
    ring = ring_of(node)
    if ring is None:
        return 0.0
    return sum(2.0 * prod(types[left].shape) * types[right].shape[-1] for left, right in ring.products)


def joined_bytes(dtype: str, *, backward: bool) -> float:
    """Bytes that are read and written for each byte of a part of attention, or of a gradient of queries, that
    is added to others in fp32 (`runtime.ring_attention`). Parts are copied to fp32 first."""
    width = DTYPES[dtype][1]
    wide = max(4, width)
    copied = 0 if backward or wide == width else wide + width
    taken = width if backward else wide
    return (copied + taken + 2 * wide) / width


def together(blocks: int, rows: int) -> bool:
    """Whether the pieces of a chunk, so many of so many rows, are multiplied as one matrix and not side by
    side; what lies apart is then copied."""
    return blocks > 1 and rows < _FEW
