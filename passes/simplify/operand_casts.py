"""The casts of a graph's values, each made once, and what values are views of."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import TypeAlias

from autoshard.ir import Dtype, Graph, Ref, TensorType
from autoshard.ir.names import fresh_name
from autoshard.ir.scaled import (
    AMAX_BY_EXPERT,
    AMAX_SCALE,
    CAST_BY_EXPERT,
    CAST_SCALED,
    ProductFormat,
    scale_shape,
)
from autoshard.ir.views import ALIASES, RESHAPES, TRANSPOSES
from autoshard.passes.rewrite import Steps, first_type

#: (value, shape, dim along which elements share a scale, element type, whether of backward alone)
_Key: TypeAlias = tuple[str, tuple[int, ...], "int | None", str, bool]
FLOATS = ("f64", "f32", "bf16", "f16")


class Views:
    """What the values of a graph are views of."""

    def __init__(self, graph: Graph) -> None:
        self.types = graph.types()
        self.makers = {o: n for n in graph.nodes for o in n.outs}

    def turned(self, value: str) -> tuple[str, bool]:
        """(the matrix that a matrix is, or is the transpose of; whether it is its transpose)."""
        turned = False
        while (node := self.makers.get(value)) is not None:
            if node.op in TRANSPOSES and len(first_type(node).shape) == 2:
                # of two dims any order but their own; one that leaves them is a view no capture makes
                turned = not turned
            elif not (node.op in (*ALIASES, *RESHAPES) and node.types[0] == self.types[node.args[0].name]):
                break
            value = node.args[0].name
        return value, turned

    def root(self, value: str) -> str:
        """What the rows of a value are."""
        value = self.turned(value)[0]
        while (node := self.makers.get(value)) is not None and node.op in (*ALIASES, *RESHAPES):
            value = node.args[0].name
        return value

    def weight(self, value: str, weights: Set[str]) -> str:
        """The parameter that an operand is, "" if it is none."""
        matrix = self.turned(value)[0]
        return matrix if matrix in weights else ""


class OperandCasts:
    """Scales and casts of values, kept for all that multiply them.

    anew: parameters, and what is stacked of them, which are cast in backward once more, so that forward need
    not save the casts for it.
    """

    def __init__(self, graph: Graph, format: ProductFormat, anew: Set[str]) -> None:
        self.format, self.anew = format, set(anew)
        self.views, self.types = Views(graph), graph.types()
        self.taken = set(self.types)
        #: what is cast, how -> (scale, cast)
        self.made: dict[_Key, tuple[Ref, Ref]] = {}
        #: (rows, element type) -> the same, by expert
        self.made_by_expert: dict[tuple[str, str], tuple[Ref, Ref]] = {}

    def of(self, steps: Steps, value: str, dim: int, element: str) -> tuple[Ref, Ref]:
        """(scale, cast) of a value that is summed over a dim. steps: of the node that does."""
        type_, key = self.types[value], self._key(steps, value, dim, element)
        if key not in self.made:
            args = (Ref(value), key[2], self.format.block, Dtype(element), Dtype(self.format.scale))
            scales = self.scale_type(type_, dim)
            scale = steps.add(AMAX_SCALE, args, scales, out=self.name(f"{value}_scale"))
            cast = (Ref(value), scale, Dtype(element))
            codes = replace(type_, dtype=element)
            self.made[key] = scale, steps.add(CAST_SCALED, cast, codes, out=self.name(f"{value}_f8"))
        return self.made[key]

    def keep(self, steps: Steps, value: str, dim: int, element: str, made: tuple[Ref, Ref]) -> None:
        """The (scale, cast) of a value that were made otherwise."""
        self.made[self._key(steps, value, dim, element)] = made

    def _key(self, steps: Steps, value: str, dim: int, element: str) -> _Key:
        half = steps.node.backward and value in self.anew
        along = self.format.granularity(dim)
        return self.views.root(value), self.types[value].shape, along, element, half

    def scale_type(self, type_: TensorType, dim: int) -> TensorType:
        """Of the scales of a value that is summed over a dim."""
        shape = scale_shape(type_.shape, self.format.granularity(dim), self.format.block)
        new = TensorType(shape, self.format.scale)
        return replace(new, filled=type_.filled, share=type_.share) if shape[0] == type_.shape[0] else new

    def by_expert(self, steps: Steps, rows: str, slots: Ref, count: int, element: str) -> tuple[Ref, Ref]:
        """(scale, cast) of rows of so many experts that are summed over."""
        if self.format.whole:
            return self.of(steps, rows, 0, element)
        key = rows, element
        if key not in self.made_by_expert:
            type_, kind = self.types[rows], Dtype(element)
            scales = TensorType((count, type_.shape[1]), self.format.scale)
            largest = (Ref(rows), slots, count, kind, Dtype(self.format.scale))
            scale = steps.add(AMAX_BY_EXPERT, largest, scales, out=self.name(f"{rows}_scale"))
            cast, codes = (Ref(rows), scale, kind, slots), replace(type_, dtype=element)
            new = steps.add(CAST_BY_EXPERT, cast, codes, out=self.name(f"{rows}_f8"))
            self.made_by_expert[key] = scale, new
        return self.made_by_expert[key]

    def name(self, base: str) -> str:
        """One that no value has."""
        return fresh_name(base, self.taken)
