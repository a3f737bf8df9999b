"""The rule of ``scan``: the factors of its body (`rules.body_factors`), and steps, which no axis splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from autoshard.ir import Node, TensorType, refs_of
from autoshard.ir.local_bytes import held_shape
from autoshard.ir.placement import Layout, Placement, Shard
from autoshard.ir.scans import Scan, StepSlice, StepValue, resized, scan_of
from autoshard.rules.body_factors import BodyLayouts, body_factors
from autoshard.rules.core import Dims, Factored, RuleFn
from autoshard.rules.local import LocalCall
from autoshard.rules.row_tiles import Tile


def rule_with(table: Mapping[str, RuleFn]) -> RuleFn:
    """The rule of ``scan`` whose bodies are made of the ops of a table."""

    def rule(node: Node, ins: Sequence[TensorType]) -> Factored:
        scan = scan_of(node)
        factors = body_factors(scan.body, table, scan.carried)
        steps = tuple(
            how.size for how in (*scan.given, *scan.results) if isinstance(how, StepSlice) and how.size > 1
        )
        number = iter(range(len(factors.sizes), len(factors.sizes) + len(steps)))

        def laid(value: str, how: StepValue) -> Dims:
            dims = factors.dims[value]
            if not isinstance(how, StepSlice):
                return dims
            along = (next(number),) if how.size > 1 else ()
            return (*dims[: how.dim], along, *dims[how.dim :])

        inputs = tuple(laid(n, how) for (n, _), how in zip(scan.body.inputs, scan.given, strict=True))
        outputs = tuple(laid(n, how) for n, how in zip(scan.body.outputs, scan.results, strict=True))
        sizes = (*factors.sizes, *steps)
        localizer = _Localizer(scan, BodyLayouts(scan.body, factors))
        return Factored(
            sizes,
            inputs,
            outputs,
            factors.fixed | frozenset(range(len(factors.sizes), len(sizes))),
            tuple(sorted(factors.reduce.items())),
            kind="matmul",
            flops=scan.steps * factors.flops,
            local=localizer,
            contiguous=factors.contiguous,
            tile=localizer.tile,
        )

    return rule


def with_given(node: Node, ins: Sequence[TensorType], table: Mapping[str, RuleFn]) -> Node:
    """A scan of inputs of other types: the sizes of its body follow."""
    scan = scan_of(node)
    factors = body_factors(scan.body, table, scan.carried)
    sizes = dict(enumerate(factors.sizes))
    types = []
    for (value, type_), how, full in zip(scan.body.inputs, scan.given, ins, strict=True):
        shape = full.shape
        if isinstance(how, StepSlice):
            shape = (*shape[: how.dim], *shape[how.dim + 1 :])
        types.append(replace(type_, shape=shape))
        for dim, size in zip(factors.dims[value], shape, strict=True):
            if dim:
                rest = prod(factors.sizes[f] for f in dim[1:])
                sizes[dim[0]] = size // rest

    def sized(value: str, type_: TensorType) -> TensorType:
        return replace(type_, shape=tuple(prod(sizes[f] for f in dim) for dim in factors.dims[value]))

    outs = [
        [sized(o, t) for o, t in zip(n.outs, n.types, strict=True) if t is not None] for n in scan.body.nodes
    ]
    args = replace(scan, body=resized(scan.body, types, outs)).args(node.args[0])
    return replace(node, args=args)


@dataclass(frozen=True)
class _Localizer:
    """Makes the body that a rank runs."""

    scan: Scan
    laid: BodyLayouts

    def __call__(self, call: LocalCall) -> Node:
        layouts = self._layouts(call.in_layouts, call.out_layouts, call.mesh.sizes)
        body = self.laid.local(layouts, call.mesh)
        return replace(call.node, args=replace(self.scan, body=body).args(call.node.args[0]))

    def tile(
        self, inputs: Sequence[Layout], outputs: Sequence[Layout | None], sizes: Sequence[int], scale: float
    ) -> Tile:
        """A step on the fullest rank. scale: there are so many times as many sequences."""
        layouts = self._layouts(inputs, outputs, sizes)
        types = {
            v: TensorType(held_shape(t.shape, layouts[v], sizes), t.dtype)
            for v, t in self.scan.body.types().items()
        }
        calls = []
        for node, rule in zip(self.scan.body.nodes, self.laid.factors.rules, strict=True):
            values = (*refs_of(node), *node.outs)
            ways = prod(
                size for k, size in enumerate(sizes) if any(isinstance(layouts[v][k], Shard) for v in values)
            )
            times = max(self._times(v, scale) for v in values)
            ins = tuple(_scaled(types[r], self._times(r, scale)) for r in refs_of(node))
            outs = tuple(_scaled(types[o], self._times(o, scale)) for o in node.outs)
            calls.append((replace(rule, flops=times * rule.flops / ways), ins, outs))
        written = (_scaled(types[v], self._times(v, scale)).nbytes for v in self.scan.body.outputs)
        return Tile(self.scan.steps, tuple(calls), 2.0 * sum(written))

    def _times(self, value: str, scale: float) -> float:
        """How many times as large a value is with so many times as many sequences: the outermost factor of
        what is carried is the batch."""
        dims = self.laid.factors.dims
        batch = next((dims[v][0][0] for v, _ in self.scan.carried if dims[v] and dims[v][0]), None)
        return scale if any(batch in dim for dim in dims[value]) else 1.0

    def _layouts(
        self, inputs: Sequence[Layout], outputs: Sequence[Layout | None], sizes: Sequence[int]
    ) -> dict[str, Layout]:
        body = self.scan.body
        pairs = [
            *zip((n for n, _ in body.inputs), self.scan.given, inputs, strict=True),
            *zip(body.outputs, self.scan.results, outputs, strict=True),
        ]
        given = [(v, tuple(_of_step(p, how) for p in lay)) for v, how, lay in pairs if lay is not None]
        return self.laid.layouts(given, sizes)


def _of_step(placed: Placement, how: StepValue) -> Placement:
    """Where a step has its value, by where the full tensor lies."""
    if isinstance(placed, Shard) and isinstance(how, StepSlice) and placed.dim > how.dim:
        return replace(placed, dim=placed.dim - 1)
    return placed


def _scaled(type_: TensorType, scale: float) -> TensorType:
    """With so many times as many elements, along its first dim."""
    if scale == 1.0 or not type_.shape:
        return type_
    return TensorType((ceil(type_.shape[0] * scale), *type_.shape[1:]), type_.dtype)
