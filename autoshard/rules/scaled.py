"""Products of 8-bit operands, and the casts that make them (`ir.scaled`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.ir.scaled import AMAX_SCALE, CAST_SCALED, SCALED_MM, rate_of
from autoshard.rules.core import Builder, Dim, Dims, Factored, RuleFn


def amax_scale(node: Node, ins: Sequence[TensorType]) -> Factored:
    """The largest of the scales of parts is that of all, as rounding keeps their order; no block is cut."""
    build = Builder()
    x, scale = _blocked(build, ins[0], node.types[0])
    block = node.args[2]
    gone = () if block else [f for dim, left in zip(x, scale, strict=True) for f in dim if f not in left]
    reduce = tuple((f, "max") for f in gone)
    return Factored(tuple(build.sizes), (x,), (scale,), _inside(x, scale), reduce)


def cast_scaled(node: Node, ins: Sequence[TensorType]) -> Factored:
    build = Builder()
    x, scale = _blocked(build, *ins)
    return Factored(tuple(build.sizes), (x, scale), (x,), _inside(x, scale))


def scaled_mm(node: Node, ins: Sequence[TensorType]) -> Factored:
    """A product that is added up as any other; its operands are codes, which have no partial sums."""
    scale_a, scale_b, a, b = ins
    build = Builder()
    left, of_left = _blocked(build, a, scale_a)
    summed, columns = left[1], build.new(b.shape[1])
    of_right = (of_left[1], columns if scale_b.shape[1] > 1 else ())
    flops = 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
    return Factored(
        tuple(build.sizes),
        (of_left, of_right, left, (summed, columns)),
        ((left[0], columns),),
        _inside(left, of_left),
        tuple((f, "sum") for f in summed),
        kind="matmul",
        flops=flops,
        kernel="product",
        rate=rate_of(scale_a.dtype),
    )


def _blocked(build: Builder, x: TensorType, scale: TensorType | None) -> tuple[Dims, Dims]:
    """Dims of a tensor and of its scales: a dim with several of them is blocks of elements."""
    assert scale is not None
    laid: list[Dim] = []
    scales: list[Dim] = []
    for size, n in zip(x.shape, scale.shape, strict=True):
        if n in (1, size):
            laid.append(build.new(size))
            scales.append(laid[-1] if n > 1 else ())
        else:
            scales.append(build.new(n))
            laid.append((*scales[-1], *build.new(size // n)))
    return tuple(laid), tuple(scales)


def _inside(x: Dims, scale: Dims) -> frozenset[int]:
    """Factors that are the elements of a block."""
    return frozenset(f for dim, left in zip(x, scale, strict=True) if left for f in dim if f not in left)


PRODUCTS: Mapping[str, RuleFn] = MappingProxyType({SCALED_MM: scaled_mm})
RULES: Mapping[str, RuleFn] = MappingProxyType({AMAX_SCALE: amax_scale, CAST_SCALED: cast_scaled, **PRODUCTS})
