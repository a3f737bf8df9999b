"""Ops that are run on some rows (tokens) at a time: ``row_tiles(inputs, rows, ...)`` holds them as its body.

What a body makes between its inputs and outputs never exists for all rows at once. An output that has no rows
is the sum of what the tiles make, of each sequence if it has the batch. The body stands among the arguments,
as plain tuples, so that the text of a program has it; its values are ``"%name"`` there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.ir.graph import Arg, Graph, Node, Origin, Ref
from autoshard.ir.types import TensorType

TILES = "autoshard.row_tiles.default"
#: ops whose second argument is a shape: of its sizes, those of rows are not known before a tile is cut
SHAPED = frozenset(("aten.reshape.default", "aten.expand.default"))
#: what a dim is: the batch, rows of one sequence, both in one, or something else
BATCH, SEQUENCE, BOTH, OTHER = "b", "s", "n", "."
KINDS = frozenset((BATCH, SEQUENCE, BOTH, OTHER))


def has_rows(kinds: str) -> bool:
    """Whether a value has a dim of rows, by what its dims are."""
    return SEQUENCE in kinds or BOTH in kinds


@dataclass(frozen=True)
class RowTiles:
    """A body, with how its values are cut.

    rows: of a tile on a rank, at most. body: its types are those of all rows. kinds: of every value, what
    each dim is, one letter per dim. recomputed: so many of its first nodes
    repeat what forward did.
    """

    rows: int
    body: Graph
    kinds: Mapping[str, str]
    recomputed: int = 0

    @property
    def inputs(self) -> list[str]:
        """Kinds of the inputs."""
        return [self.kinds[name] for name, _ in self.body.inputs]

    @property
    def outputs(self) -> list[str]:
        """Kinds of the outputs."""
        return [self.kinds[name] for name in self.body.outputs]

    def args(self, given: Sequence[Ref]) -> tuple[Arg, ...]:
        """The arguments of the op."""
        types = self.body.types()

        def told(name: str) -> tuple[Arg, ...]:
            return types[name].dtype, types[name].shape, self.kinds[name]

        inputs = tuple((name, *told(name)) for name, _ in self.body.inputs)
        statements = tuple(
            (node.op, encoded(node.args), encoded(node.kwargs), node.outs, tuple(map(told, node.outs)))
            for node in self.body.nodes
        )
        return tuple(given), self.rows, inputs, statements, self.body.outputs, self.recomputed

    def tile(self, types: Mapping[str, TensorType] | None = None) -> tuple[int, Mapping[str, TensorType]]:
        """(how many tiles there are, types in the largest) of values that a rank holds, if left out, those of
        the body."""
        types = self.body.types() if types is None else types
        sizes = {k: n for v, t in types.items() for k, n in zip(self.kinds[v], t.shape, strict=True)}
        batch = sizes.get(BATCH, 1)
        rows = sizes.get(SEQUENCE) or sizes[BOTH] // batch
        most = min(rows, self.rows)
        cut = {BATCH: 1, SEQUENCE: most, BOTH: most}
        result = {
            v: TensorType(tuple(cut.get(k, n) for k, n in zip(self.kinds[v], t.shape, strict=True)), t.dtype)
            for v, t in types.items()
        }
        return batch * -(-rows // most), result


def tiles_of(node: Node) -> RowTiles:
    """What a ``row_tiles`` node runs."""
    _, rows, inputs, statements, results, recomputed = node.args
    kinds: dict[str, str] = {}

    def type_of(name: str, told: Arg) -> TensorType:
        dtype, shape, kinds[name] = told
        return TensorType(shape, dtype)

    given = tuple((name, type_of(name, told)) for name, *told in inputs)
    nodes = tuple(
        Node(
            op,
            decoded(args),
            decoded(kwargs),
            outs,
            tuple(type_of(*pair) for pair in zip(outs, new, strict=True)),
            Origin(),
            node.backward,
        )
        for op, args, kwargs, outs, new in statements
    )
    return RowTiles(rows, Graph("tile", given, nodes, results), kinds, recomputed)


def with_sizes(body: Graph) -> Graph:
    """The body with the shapes of all rows where a tile's are left open."""

    def shaped(node: Node) -> Node:
        if node.op not in SHAPED or node.types[0] is None:
            return node
        return replace(node, args=(node.args[0], node.types[0].shape, *node.args[2:]))

    return replace(body, nodes=tuple(map(shaped, body.nodes)))


def without_rows(node: Node, shape: Sequence[Any], kinds: str) -> Node:
    """A shaped op for any tile. shape: of its result. kinds: what its dims are."""
    sizes = {BATCH: 1, SEQUENCE: -1, BOTH: -1}
    return replace(
        node,
        args=(
            node.args[0],
            tuple(sizes.get(kind, size) for kind, size in zip(kinds, shape, strict=True)),
            *node.args[2:],
        ),
    )


def encoded(arg: Arg) -> Any:
    """An argument of an op in a body, as an argument of the op that has the body."""
    if isinstance(arg, tuple):
        return tuple(map(encoded, arg))
    return f"%{arg.name}" if isinstance(arg, Ref) else arg


def decoded(arg: Arg) -> Any:
    """What `encoded` was given."""
    if isinstance(arg, tuple):
        return tuple(map(decoded, arg))
    return Ref(arg[1:]) if isinstance(arg, str) and arg.startswith("%") else arg
