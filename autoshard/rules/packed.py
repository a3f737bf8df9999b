"""Products of operands in 4 bits, two in a byte, and the casts that make them (`ir.scaled`).

Blocks of 16 elements are never cut: a dim of elements is (blocks, 16), that of their codes (blocks, 8) where
two share a byte, and only blocks are divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.ir.scaled import BLOCK_SCALE, CAST_PACKED, FP4_BLOCK, PACKED_MM, ROTATED, elements
from autoshard.rules.core import Builder, Dim, Dims, Factored, RuleFn


class _Matrix:
    """Factors of a matrix whose blocks share scales: blocks, per dim, and elements inside, which are fixed.

    shape: of elements. scale: of its scales. rows: blocks along its first dim, () to number them.
    """

    def __init__(self, build: Builder, shape: Sequence[int], scale: Sequence[int], rows: Dim = ()) -> None:
        self.build = build
        self.blocks: Dims = (rows or build.new(scale[0]), build.new(scale[1]))
        self.inside = [n // size for n, size in zip(shape, scale, strict=True)]
        self.fixed: set[int] = set()

    def dims(self, packed: int | None = None) -> Dims:
        """Of its elements, or of pairs of them along a dim."""
        return self.dim(0, packed == 0), self.dim(1, packed == 1)

    def dim(self, number: int, pairs: bool = False) -> Dim:
        inside = self.build.new(self.inside[number] // (2 if pairs else 1))
        self.fixed.update(inside)
        return *self.blocks[number], *inside


_ONE: Dims = ((), ())


def block_scale(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x [m, n], whole [1, 1] -> a scale for each block."""
    out = node.types[0]
    assert out is not None
    build = Builder()
    of = _Matrix(build, ins[0].shape, out.shape)
    inputs = of.dims(), _ONE
    return Factored(tuple(build.sizes), inputs, (of.blocks,), frozenset(of.fixed))


def cast_packed(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x [m, n], scales, whole [1, 1] -> codes."""
    build = Builder()
    of = _Matrix(build, ins[0].shape, ins[1].shape)
    inputs, codes = (of.dims(), of.blocks, _ONE), of.dims(node.args[4])
    return Factored(tuple(build.sizes), inputs, (codes,), frozenset(of.fixed))


def packed_mm(node: Node, ins: Sequence[TensorType]) -> Factored:
    """wholes, scales and codes of both operands -> [m, n]; codes have no partial sums."""
    _, _, scale_a, scale_b, a, b = ins
    packed = node.args[6:8]
    build = Builder()
    (rows, depth), (_, columns) = (elements(t.shape, dim) for t, dim in zip((a, b), packed, strict=True))
    left = _Matrix(build, (rows, depth), scale_a.shape)
    right = _Matrix(build, (depth, columns), scale_b.shape, left.blocks[1])
    codes = left.dims(packed[0]), right.dims(packed[1])
    out = left.dim(0), right.dim(1)
    return Factored(
        tuple(build.sizes),
        (_ONE, _ONE, left.blocks, right.blocks, *codes),
        (out,),
        frozenset(left.fixed | right.fixed),
        tuple((f, "sum") for f in left.blocks[1]),
        kind="matmul",
        flops=2.0 * rows * depth * columns,
        kernel="product",
        rate="f4",
        packed=(packed[0], packed[1]),
    )


def rotated(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x -> x, of which 16 elements along a dim are mixed."""
    build, shape, dim = Builder(), ins[0].shape, node.args[1]
    of = _Matrix(build, shape, tuple(n // FP4_BLOCK if d == dim else n for d, n in enumerate(shape)))
    dims = of.dims()
    return Factored(tuple(build.sizes), (dims,), (dims,), frozenset(of.fixed), linear=((0,),))


PRODUCTS: Mapping[str, RuleFn] = MappingProxyType({PACKED_MM: packed_mm})
RULES: Mapping[str, RuleFn] = MappingProxyType(
    {BLOCK_SCALE: block_scale, CAST_PACKED: cast_packed, ROTATED: rotated, **PRODUCTS}
)
