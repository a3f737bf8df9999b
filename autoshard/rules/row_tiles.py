"""The rule of ``row_tiles``: the factors of its body, followed through the rules of the ops in it.

A factor of the body may be split if every op in it may split it, and no pending sum meets an op that is not
linear in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from autoshard.ir import Graph, Node, TensorType, refs_of
from autoshard.ir.local_bytes import held_shape
from autoshard.ir.placement import Layout, Partial, Placement, R, Shard
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
from autoshard.rules.core import Dim, Dims, Factored, RuleFn
from autoshard.rules.local import LocalCall, symbolic_shape
from autoshard.rules.states import Digit, digit_of, placement_of

#: ops of which a rank is told where its part of the columns begins, which no tile changes
_OFFSETS = frozenset(("autoshard.xent_stats.default", "autoshard.xent_part_backward.default"))


class NoFactorsError(Exception):
    """A body whose values have no common factors, or that holds an op that cannot run in tiles."""


@dataclass(frozen=True)
class BodyFactors:
    """Factors of a graph.

    sizes: of the factors. dims: of every value. rules: of every node. parts: per node, what the factors of
    its rule are here. fixed: factors that cannot be split. contiguous: those that may only be split in
    contiguous ranges. reduce: how parts of a factor combine that an output lacks. flops: of all products.
    """

    sizes: tuple[int, ...]
    dims: Mapping[str, Dims]
    rules: tuple[Factored, ...]
    parts: tuple[Mapping[int, Dim], ...]
    fixed: frozenset[int]
    contiguous: frozenset[int]
    reduce: Mapping[int, str]
    flops: float


class _Finder:
    """Factors under construction: one that turns out to be another one, or several, refers to them."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.means: dict[int, Dim] = {}

    def new(self, size: int) -> Dim:
        if size == 1:
            return ()
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def plain(self, dim: Dim) -> Dim:
        """The same in factors that stand for themselves."""
        result: list[int] = []
        for factor in dim:
            result += self.plain(self.means[factor]) if factor in self.means else (factor,)
        return tuple(result)

    def same(self, a: Dim, b: Dim) -> None:
        """Let two dims be the same elements."""
        left, right = list(self.plain(a)), list(self.plain(b))
        while left and right:
            x, y = left.pop(0), right.pop(0)
            if x == y:
                continue
            small, large = (x, y) if self.sizes[x] <= self.sizes[y] else (y, x)
            more = self._rest(large, small)
            if more and large == x:
                left.insert(0, more[0])
            elif more:
                right.insert(0, more[0])
            left, right = list(self.plain(tuple(left))), list(self.plain(tuple(right)))
        if left or right:
            raise NoFactorsError("dims of other sizes")

    def _rest(self, large: int, small: int) -> Dim:
        """What is left of a factor once its outer part is another one."""
        rest, odd = divmod(self.sizes[large], self.sizes[small])
        if odd:
            raise NoFactorsError("dims that do not divide each other")
        more = self.new(rest)
        self.means[large] = (small, *more)
        return more


def body_factors(graph: Graph, table: Mapping[str, RuleFn]) -> BodyFactors:
    """Follow the factors of a graph, whose shapes are those of all rows. Raises NoFactorsError."""
    finder, types = _Finder(), graph.types()
    dims: dict[str, Dims] = {n: tuple(map(finder.new, t.shape)) for n, t in graph.inputs}
    rules: list[Factored] = []
    new: list[dict[int, Dim]] = []
    #: of which no input has a part, so that nothing says which one a rank makes
    created: Dim = ()
    for node in graph.nodes:
        rule = _rule(node, [types[r] for r in refs_of(node)], table)
        rules.append(rule)
        means: dict[int, Dim] = {}
        new.append(means)
        for ref, laid in zip(refs_of(node), rule.inputs, strict=True):
            for own, dim in zip(laid, dims[ref], strict=True):
                _follow(finder, rule, own, dim, means)
        for out, out_dims in zip(node.outs, rule.outputs, strict=True):
            if out_dims is None:
                raise NoFactorsError(f"{node.op} makes no tensor")
            for f in (f for dim in out_dims for f in dim if f not in means):
                means[f] = finder.new(rule.sizes[f])
                created += means[f]
            dims[out] = tuple(tuple(g for f in dim for g in means[f]) for dim in out_dims)
    plain = {value: tuple(map(finder.plain, laid)) for value, laid in dims.items()}
    number = {
        f: k for k, f in enumerate(dict.fromkeys(f for laid in plain.values() for d in laid for f in d))
    }
    final = {v: tuple(tuple(number[f] for f in d) for d in laid) for v, laid in plain.items()}
    parts = [{f: tuple(number[g] for g in finder.plain(d)) for f, d in means.items()} for means in new]
    sizes = tuple(finder.sizes[f] for f in number)
    alone = {number[f] for f in finder.plain(created) if f in number}
    return _divided(graph, sizes, final, rules, parts, alone)


def _rule(node: Node, ins: Sequence[TensorType], table: Mapping[str, RuleFn]) -> Factored:
    fn = table.get(node.op)
    if fn is None:
        raise NoFactorsError(f"{node.op} has no rule")
    rule = fn(node, ins).without_units()
    if rule.exchange or rule.zigzag or (rule.local and node.op not in SHAPED | _OFFSETS):
        raise NoFactorsError(f"{node.op} is not the same for all rows")
    return rule


def _follow(finder: _Finder, rule: Factored, own: Dim, dim: Dim, means: dict[int, Dim]) -> None:
    """What the factors of a dim of a rule are, if its tensor's dim is ``dim``."""
    if not own:
        if dim:
            raise NoFactorsError("a dim without a factor")
        return
    for f in own:
        if f not in means:
            means[f] = finder.new(rule.sizes[f])
    finder.same(tuple(g for f in own for g in means[f]), dim)


def _divided(
    graph: Graph,
    sizes: tuple[int, ...],
    dims: Mapping[str, Dims],
    rules: Sequence[Factored],
    parts: Sequence[Mapping[int, Dim]],
    fixed: set[int],
) -> BodyFactors:
    contiguous: set[int] = set()
    for rule, means in zip(rules, parts, strict=True):
        allowed = set(rule.shardable())
        for f, dim in means.items():
            if f not in allowed:
                fixed.update(dim)
            elif f in rule.contiguous:
                contiguous.update(dim[:1])
                fixed.update(dim[1:])
    reduce: dict[int, str] = {}
    for factor in range(len(sizes)):
        how = None if factor in fixed else _reduction(graph, factor, dims, rules, parts)
        if how is None:
            fixed.add(factor)
        elif how:
            reduce[factor] = how
    flops = sum(rule.flops for rule in rules)
    return BodyFactors(
        sizes, dims, tuple(rules), tuple(parts), frozenset(fixed), frozenset(contiguous), reduce, flops
    )


def _reduction(
    graph: Graph,
    factor: int,
    dims: Mapping[str, Dims],
    rules: Sequence[Factored],
    parts: Sequence[Mapping[int, Dim]],
) -> str | None:
    """How the parts of outputs combine that lack a factor, "" if none does; None: it cannot be split."""
    states = _states(graph, factor, dims, rules, parts)
    if states is None:
        return None
    result = {states[v] for v in graph.outputs if not _has(dims[v], factor)}
    if len(result) > 1 or result == {""}:
        return None
    return result.pop() if result else ""


def _states(
    graph: Graph,
    factor: int,
    dims: Mapping[str, Dims],
    rules: Sequence[Factored],
    parts: Sequence[Mapping[int, Dim]],
) -> dict[str, str] | None:
    """Of every value that lacks a factor that is split: the reduction that is pending, "" for none."""
    states: dict[str, str] = {n: "" for n, _ in graph.inputs}
    for node, rule, means in zip(graph.nodes, rules, parts, strict=True):
        refs = list(refs_of(node))
        split = next((f for f, dim in means.items() if factor in dim), None)
        pending = {k for k, r in enumerate(refs) if states[r]}
        how = ""
        if split is not None:
            if pending:
                return None
            how = dict(rule.reduce).get(split, "")
        elif pending:
            if {states[refs[k]] for k in pending} != {"sum"} or pending not in map(set, rule.linear):
                return None
            how = "sum"
        states.update((out, "" if _has(dims[out], factor) else how) for out in node.outs)
    return states


def _has(dims: Dims, factor: int) -> bool:
    return any(factor in dim for dim in dims)


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
        localizer = _Localizer(tiles, body, result)
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
    body: Graph
    found: BodyFactors

    def __call__(self, call: LocalCall) -> Node:
        types = self.body.types()
        layouts = self._layouts(call.in_layouts, call.out_layouts, call.mesh.sizes)

        def local(type_: TensorType, value: str) -> TensorType:
            return TensorType(symbolic_shape(type_.shape, layouts[value], call.mesh), type_.dtype)  # type: ignore[arg-type]  # a size may be a symbol

        nodes = []
        for node, rule in zip(self.body.nodes, self.found.rules, strict=True):
            refs = list(refs_of(node))
            ins, outs = tuple(types[r] for r in refs), tuple(layouts[o] for o in node.outs)
            own = LocalCall(node, ins, tuple(layouts[r] for r in refs), outs, call.mesh)
            new = rule.local(own) if rule.local is not None else node
            new = replace(new, types=tuple(local(types[o], o) for o in node.outs))
            shape = new.types[0].shape if new.types[0] is not None else ()
            nodes.append(without_rows(new, shape, self.tiles.kinds[node.name]) if node.op in SHAPED else new)
        inputs = tuple((n, local(t, n)) for n, t in self.body.inputs)
        body = Graph(self.body.name, inputs, tuple(nodes), self.body.outputs)
        args = replace(self.tiles, body=body).args(call.node.args[0])
        return replace(call.node, args=args)

    def tile(
        self, inputs: Sequence[Layout], outputs: Sequence[Layout | None], sizes: Sequence[int], scale: float
    ) -> Tile:
        """The largest tile of the fullest rank. scale: there are so many times as many sequences."""
        layouts, kinds = self._layouts(inputs, outputs, sizes), self.tiles.kinds
        full = {}
        for value, type_ in self.body.types().items():
            held = zip(kinds[value], held_shape(type_.shape, layouts[value], sizes), strict=True)
            shape = tuple(ceil(n * scale) if kind in (BATCH, BOTH) else n for kind, n in held)
            full[value] = TensorType(shape, type_.dtype)
        count, types = self.tiles.tile(full)
        calls = []
        for node, rule in zip(self.body.nodes, self.found.rules, strict=True):
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
        moved = {v: types[v].nbytes * (2 if has_rows(kinds[v]) else 3) for v in self.body.outputs}
        return Tile(count, tuple(calls), float(sum(moved.values())))

    def _layouts(
        self, inputs: Sequence[Layout], outputs: Sequence[Layout | None], sizes: Sequence[int]
    ) -> dict[str, Layout]:
        """Where the values of the body lie."""
        given = [(n, layout) for (n, _), layout in zip(self.body.inputs, inputs, strict=True)]
        given += [(n, lay) for n, lay in zip(self.body.outputs, outputs, strict=True) if lay is not None]
        axes = [self._axis([(n, lay[k]) for n, lay in given], ways) for k, ways in enumerate(sizes)]
        return {v: tuple(axis[v] for axis in axes) for v in self.body.types()}

    def _axis(self, given: Sequence[tuple[str, Placement]], ways: int) -> Mapping[str, Placement]:
        """Where the values of the body lie on one axis."""
        types, laid = self.body.types(), self.found.dims
        split = self._split(given, ways)
        if split is None:
            return dict.fromkeys(types, R)
        factor, digit = split
        states = _states(self.body, factor, laid, self.found.rules, self.found.parts)
        assert states is not None
        placed: dict[str, Placement] = {}
        for value, type_ in types.items():
            own = placement_of(laid[value], type_, self.found.sizes, factor, digit, ways)
            assert own is not None
            placed[value] = Partial(states[value]) if own == R and states[value] else own
        return placed

    def _split(self, given: Sequence[tuple[str, Placement]], ways: int) -> tuple[int, Digit] | None:
        for name, placed in given:
            result = digit_of(self.found.dims[name], self.found.sizes, placed, ways)
            if result is not None:
                return result
        return None
