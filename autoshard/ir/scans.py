"""Loops over parts of tensors: ``scan(inputs, steps, ...)`` runs its body step after step.

As the ``scan`` of JAX: what a step carries is given to the next one, other inputs and outputs are read and
written in slices, one a step. The body stands among the arguments, as that of `ir.row_tiles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from autoshard.ir.graph import Arg, Graph, Node, Origin, Ref
from autoshard.ir.row_tiles import SHAPED, decoded, encoded
from autoshard.ir.types import TensorType

SCAN = "autoshard.scan.default"


@dataclass(frozen=True, slots=True)
class StepSlice:
    """Step i reads or writes at ``first + i * stride`` of a dim of that size, which its value lacks."""

    dim: int
    size: int
    first: int = 0
    stride: int = 1

    def at(self, step: int) -> int:
        return self.first + step * self.stride

    def full(self, type_: TensorType) -> TensorType:
        """The type of what one of a step's type is a slice of."""
        shape = (*type_.shape[: self.dim], self.size, *type_.shape[self.dim :])
        return replace(type_, shape=shape)


#: how a step is given a value, or what becomes of one that it makes. ``carry``: the next step is given it,
#: the last one is a result; ``same``: every step is given it; ``sum``: a result is the sum over all steps
StepValue: TypeAlias = 'StepSlice | Literal["carry", "same", "sum"]'


@dataclass(frozen=True)
class Scan:
    """A body, and how often it runs.

    body: of one step. given: how each of its inputs is given. results: what becomes of each output. Carried
    outputs are, in order, the carried inputs of the next step.
    """

    steps: int
    body: Graph
    given: tuple[StepValue, ...]
    results: tuple[StepValue, ...]

    @property
    def carried(self) -> list[tuple[str, str]]:
        """(output, input) of what is carried."""
        inputs = [n for (n, _), how in zip(self.body.inputs, self.given, strict=True) if how == "carry"]
        outputs = [n for n, how in zip(self.body.outputs, self.results, strict=True) if how == "carry"]
        return list(zip(outputs, inputs, strict=True))

    def result_types(self) -> tuple[TensorType, ...]:
        types = self.body.types()
        pairs = zip(self.body.outputs, self.results, strict=True)
        return tuple(h.full(types[v]) if isinstance(h, StepSlice) else types[v] for v, h in pairs)

    def args(self, given: Sequence[Ref]) -> tuple[Arg, ...]:
        """The arguments of the op."""
        types = self.body.types()

        def told(name: str) -> tuple[Arg, ...]:
            return types[name].dtype, types[name].shape

        pairs = zip(self.body.inputs, self.given, strict=True)
        inputs = tuple((name, *told(name), _word(how)) for (name, _), how in pairs)
        statements = tuple(
            (node.op, encoded(node.args), encoded(node.kwargs), node.outs, tuple(map(told, node.outs)))
            for node in self.body.nodes
        )
        results = tuple((n, _word(how)) for n, how in zip(self.body.outputs, self.results, strict=True))
        return tuple(given), self.steps, inputs, statements, results


def scan_of(node: Node) -> Scan:
    """What a ``scan`` node runs."""
    _, steps, inputs, statements, results = node.args
    given = tuple((name, TensorType(shape, dtype)) for name, dtype, shape, _ in inputs)
    nodes = tuple(
        Node(
            op,
            decoded(args),
            decoded(kwargs),
            outs,
            tuple(TensorType(shape, dtype) for dtype, shape in new),
            Origin(),
            node.backward,
        )
        for op, args, kwargs, outs, new in statements
    )
    body = Graph("step", given, nodes, tuple(name for name, _ in results))
    return Scan(steps, body, tuple(_read(w) for *_, w in inputs), tuple(_read(w) for _, w in results))


def resized(body: Graph, types: Sequence[TensorType], outs: Sequence[Sequence[TensorType]]) -> Graph:
    """The body with other types of its inputs, and of what its nodes make."""
    inputs = tuple((n, t) for (n, _), t in zip(body.inputs, types, strict=True))
    nodes = []
    for node, new in zip(body.nodes, outs, strict=True):
        args = (node.args[0], new[0].shape, *node.args[2:]) if node.op in SHAPED else node.args
        nodes.append(replace(node, args=args, types=tuple(new)))
    return replace(body, inputs=inputs, nodes=tuple(nodes))


def _word(how: StepValue) -> Arg:
    return (how.dim, how.size, how.first, how.stride) if isinstance(how, StepSlice) else how


def _read(word: Arg) -> StepValue:
    return StepSlice(*word) if isinstance(word, tuple) else word
