"""The rule of ``row_tiles``: the factors of its body (`rules.body_factors`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from autoshard.ir import Node, TensorType, refs_of
from autoshard.ir.local_bytes import held_shape
from autoshard.ir.placement import Layout, Shard
from autoshard.ir.row_tiles import (
    BATCH,
    BOTH,
    OTHER,
    SHAPED,
    RowTiles,
    has_rows,
    tiles_of,
    with_sizes,
    without_rows,
)
from autoshard.rules.body_factors import BodyLayouts, body_factors
from autoshard.rules.core import Dim, Dims, Factored, RuleFn
from autoshard.rules.local import LocalCall


def kinds_of(dims: Dims, batch: int | None, rows: int) -> str | None:
    """What every dim of a value is, see `ir.row_tiles`; None if rows lie in it in another way.

    batch, rows: the factors of the batch, None if there is but one sequence, and of the rows of one.
    """
    names: dict[Dim, str] = (
        {(rows,): "s"} if batch is None else {(batch,): "b", (rows,): "s", (batch, rows): "n"}
    )
    own = {rows, batch}
    if any(own & set(dim) and dim not in names for dim in dims):
        return None
    return "".join(names.get(dim, ".") for dim in dims)


def rule_with(table: Mapping[str, RuleFn]) -> RuleFn:
    """The rule of ``row_tiles`` whose bodies are made of the ops of a table."""

    def rule(node: Node, ins: Sequence[TensorType]) -> Factored:
        tiles = tiles_of(node)
        body = with_sizes(tiles.body)
        result = body_factors(body, table)
        localizer = _Localizer(tiles, BodyLayouts(body, result))
        return Factored(
            result.sizes,
            tuple(result.dims[n] for n, _ in body.inputs),
            tuple(result.dims[n] for n in body.outputs),
            result.fixed,
            tuple(sorted(result.reduce.items())),
            kind="matmul",
            flops=result.flops,
            recomputed=sum(rule.flops for rule in result.rules[: tiles.recomputed]),
            local=localizer,
            contiguous=result.contiguous,
            tile=localizer.tile,
        )

    return rule


@dataclass(frozen=True)
class Tile:
    """The largest tile of a rank.

    count: of tiles. calls: of its ops (rule with the FLOP that are done here, types of inputs, of outputs).
    copied: bytes moved to put what a tile gives where that of all lies, or to add it there.
    """

    count: int
    calls: tuple[tuple[Factored, tuple[TensorType, ...], tuple[TensorType | None, ...]], ...]
    copied: float


@dataclass(frozen=True)
class _Localizer:
    """Makes the body that a rank runs."""

    tiles: RowTiles
    laid: BodyLayouts

    def __call__(self, call: LocalCall) -> Node:
        layouts = self._layouts(call.in_layouts, call.out_layouts, call.mesh.sizes)
        body = self.laid.local(layouts, call.mesh)
        nodes = []
        for node in body.nodes:
            shape = node.types[0].shape if node.types[0] is not None else ()
            kinds = self.tiles.kinds[node.name]
            nodes.append(without_rows(node, shape, kinds) if node.op in SHAPED else node)
        args = replace(self.tiles, body=replace(body, nodes=tuple(nodes))).args(call.node.args[0])
        return replace(call.node, args=args)

    def tile(
        self, inputs: Sequence[Layout], outputs: Sequence[Layout | None], sizes: Sequence[int], scale: float
    ) -> Tile:
        """The largest tile of the fullest rank. scale: there are so many times as many sequences."""
        layouts, kinds = self._layouts(inputs, outputs, sizes), self.tiles.kinds
        full = {}
        for value, type_ in self.laid.body.types().items():
            held = zip(kinds[value], held_shape(type_.shape, layouts[value], sizes), strict=True)
            shape = tuple(ceil(n * scale) if kind in (BATCH, BOTH) else n for kind, n in held)
            full[value] = TensorType(shape, type_.dtype)
        count, types = self.tiles.tile(full)
        calls = []
        for node, rule in zip(self.laid.body.nodes, self.laid.factors.rules, strict=True):
            values = (*refs_of(node), *node.outs)
            wide = max(values, key=lambda v: len(kinds[v].strip(OTHER)))
            ways = prod(
                size for k, size in enumerate(sizes) if any(isinstance(layouts[v][k], Shard) for v in values)
            )
            times = scale if kinds[wide].strip(OTHER) else 1.0
            part = times * prod(types[wide].shape) / max(1, prod(full[wide].shape))
            ins = tuple(types[r] for r in refs_of(node))
            calls.append(
                (replace(rule, flops=part * rule.flops / ways), ins, tuple(types[o] for o in node.outs))
            )
        moved = {v: types[v].nbytes * (2 if has_rows(kinds[v]) else 3) for v in self.laid.body.outputs}
        return Tile(count, tuple(calls), float(sum(moved.values())))

    def _layouts(
        self, inputs: Sequence[Layout], outputs: Sequence[Layout | None], sizes: Sequence[int]
    ) -> dict[str, Layout]:
        """Where the values of the body lie."""
        given = [(n, layout) for (n, _), layout in zip(self.laid.body.inputs, inputs, strict=True)]
        given += [(n, lay) for n, lay in zip(self.laid.body.outputs, outputs, strict=True) if lay is not None]
        return self.laid.layouts(given, sizes)
