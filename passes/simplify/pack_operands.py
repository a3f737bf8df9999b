"""Operands of products in 4 bits, each cast once, and products of them (`ir.scaled`, `ops.packed`).

Matrices of parameters have scales of blocks of 16 by 16, so that forward and backward multiply the same
values; others of 16 elements along the dim that is summed over. What is summed over tokens, for the gradient
of a parameter, is rotated first, 16 tokens at a time. Gradients of results are rounded stochastically.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from autoshard.ir import Dtype, Ref, TensorType
from autoshard.ir.scaled import AMAX_SCALE, BLOCK_SCALE, CAST_PACKED, FP4, FP4_BLOCK, PACKED_MM, ROTATED
from autoshard.passes.rewrite import Steps, first_type
from autoshard.passes.simplify.operand_casts import OperandCasts


class _Packed(NamedTuple):
    """Of a matrix: the scale of all of it, those of blocks, codes; the dim along which two share a byte."""

    whole: Ref
    scale: Ref
    codes: Ref
    dim: int


class PackedOperands:
    """Makes such products of a graph. casts: of its values."""

    def __init__(self, casts: OperandCasts) -> None:
        self.casts, self.types = casts, dict(casts.types)
        #: (value, shape, blocks, dim of pairs, whether of backward alone, whether a gradient) -> its cast
        self.made: dict[tuple[str, tuple[int, ...], tuple[int, int], int, bool, bool], _Packed] = {}

    def product(self, steps: Steps, a: str, b: str, gradients: tuple[bool, bool], out: str | None) -> Ref:
        """a @ b. gradients: which of the two are those of results. out: name of the product, None for any.
        Without a parameter it is the gradient of one."""
        over_tokens = not any(map(self._is_parameter, (a, b)))
        left, right = (
            self._operand(steps, value, 1 - k, over_tokens, gradients[k]) for k, value in enumerate((a, b))
        )
        type_ = first_type(steps.node)
        pairs = (x for both in zip(left[:3], right[:3], strict=True) for x in both)
        return steps.add(PACKED_MM, (*pairs, left.dim, right.dim, Dtype(type_.dtype)), type_, out=out)

    def _is_parameter(self, value: str) -> bool:
        return self.casts.views.turned(value)[0] in self.casts.anew

    def _operand(self, steps: Steps, value: str, dim: int, rotates: bool, stochastic: bool) -> _Packed:
        """Of an operand that is summed over a dim."""
        matrix, turned = self.casts.views.turned(value)
        along = 1 - dim if turned else dim
        if self._is_parameter(value):
            made = self._cast(steps, matrix, (FP4_BLOCK, FP4_BLOCK), 1, steps.node.backward, False)
        else:
            block = (1, FP4_BLOCK) if along == 1 else (FP4_BLOCK, 1)
            made = self._cast(steps, matrix, block, along, rotates, stochastic)
        if not turned:
            return made
        scale, codes = (self._transposed(steps, x) for x in (made.scale, made.codes))
        return _Packed(made.whole, scale, codes, 1 - made.dim)

    def _cast(
        self, steps: Steps, matrix: str, block: tuple[int, int], dim: int, apart: bool, stochastic: bool
    ) -> _Packed:
        """apart: of a parameter, that it is cast in backward anew; of others, that they are rotated."""
        key = self.casts.views.root(matrix), self.types[matrix].shape, block, dim, apart, stochastic
        if key in self.made:
            return self.made[key]
        type_, name, source = self.types[matrix], self.casts.name, Ref(matrix)
        if apart and matrix not in self.casts.anew:
            source = steps.add(ROTATED, (source, dim), type_, out=name(f"{matrix}_rotated"))
        kind = Dtype(self.casts.format.scale)
        largest = (source, None, 0, Dtype(FP4), Dtype("f32"))
        whole = steps.add(AMAX_SCALE, largest, TensorType((1, 1), "f32"), out=name(f"{matrix}_whole"))
        scales = TensorType(tuple(n // b for n, b in zip(type_.shape, block, strict=True)), kind.name)
        scale = steps.add(BLOCK_SCALE, (source, whole, kind, block), scales, out=name(f"{matrix}_scale"))
        packed = tuple(n // 2 if d == dim else n for d, n in enumerate(type_.shape))
        args = (source, scale, Dtype(FP4), whole, dim, stochastic)
        made = steps.add(CAST_PACKED, args, replace(type_, shape=packed, dtype=FP4), out=name(f"{matrix}_f4"))
        self.types |= {scale.name: scales, made.name: TensorType(packed, FP4)}
        self.made[key] = _Packed(whole, scale, made, dim)
        return self.made[key]

    def _transposed(self, steps: Steps, x: Ref) -> Ref:
        type_ = self.types[x.name]
        out = self.casts.name(f"{x.name}_t")
        return steps.add("aten.t.default", (x,), replace(type_, shape=type_.shape[::-1]), out=out)
