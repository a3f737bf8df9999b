"""Factors of a graph of ops: those of its ops, followed from value to value.

Ops that hold others as their body (`ir.row_tiles`, `ir.scans`) have their rules from it. A factor of a body
may be split if every op in it may split it, and no pending sum meets an op that is not linear in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.ir import Graph, Node, TensorType, refs_of
from autoshard.ir.placement import Layout, Partial, Placement, R
from autoshard.ir.row_tiles import SHAPED
from autoshard.rules.core import Dim, Dims, Factored, RuleFn
from autoshard.rules.local import LocalCall, MeshShape, symbolic_shape
from autoshard.rules.states import Digit, digit_of, placement_of

#: ops of which a rank is told where its part of the columns begins, which no body changes
_OFFSETS = frozenset(("autoshard.xent_stats.default", "autoshard.xent_part_backward.default"))


class NoFactorsError(Exception):
    """A body whose values have no common factors, or that holds an op that cannot run on a part of them."""


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


def body_factors(
    graph: Graph, table: Mapping[str, RuleFn], ties: Sequence[tuple[str, str]] | None = None
) -> BodyFactors:
    """Follow the factors of a graph, whose shapes are those of full values. Raises NoFactorsError.

    ties: pairs (output, input) of which the next run takes the one for the other, where a body runs on full
    values, step after step; without them it runs on some rows at a time, of which no op may be told.
    """
    finder, types = _Finder(), graph.types()
    dims: dict[str, Dims] = {n: tuple(map(finder.new, t.shape)) for n, t in graph.inputs}
    rules: list[Factored] = []
    new: list[dict[int, Dim]] = []
    #: of which no input has a part, so that nothing says which one a rank makes
    created: Dim = ()
    for node in graph.nodes:
        rule = _rule(node, [types[r] for r in refs_of(node)], table, in_tiles=ties is None)
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
    for pair in ties or ():
        for one, other in zip(*(dims[value] for value in pair), strict=True):
            finder.same(one, other)
    plain = {value: tuple(map(finder.plain, laid)) for value, laid in dims.items()}
    number = {
        f: k for k, f in enumerate(dict.fromkeys(f for laid in plain.values() for d in laid for f in d))
    }
    final = {v: tuple(tuple(number[f] for f in d) for d in laid) for v, laid in plain.items()}
    parts = [{f: tuple(number[g] for g in finder.plain(d)) for f, d in means.items()} for means in new]
    sizes = tuple(finder.sizes[f] for f in number)
    alone = {number[f] for f in finder.plain(created) if f in number}
    return _divided(graph, sizes, final, rules, parts, alone, [output for output, _ in ties or ()])


def _rule(node: Node, ins: Sequence[TensorType], table: Mapping[str, RuleFn], *, in_tiles: bool) -> Factored:
    fn = table.get(node.op)
    if fn is None:
        raise NoFactorsError(f"{node.op} has no rule")
    rule = fn(node, ins).without_units()
    told = rule.local is not None and node.op not in SHAPED | _OFFSETS
    if rule.exchange or rule.zigzag or rule.ring or (told and in_tiles):
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
    tied: Sequence[str],
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
    # what is tied may be two dims of one value, or of one op
    for means in (*parts, *(dict(enumerate(laid)) for laid in dims.values())):
        times = Counter(f for dim in means.values() for f in dim)
        fixed.update(f for f, n in times.items() if n > 1)
    reduce: dict[int, str] = {}
    for factor in range(len(sizes)):
        how = None if factor in fixed else _reduction(graph, factor, dims, rules, parts, tied)
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
    tied: Sequence[str],
) -> str | None:
    """How the parts of outputs combine that lack a factor, "" if none does; None: it cannot be split."""
    states = _states(graph, factor, dims, rules, parts)
    if states is None or any(not _has(dims[v], factor) for v in tied):
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


@dataclass(frozen=True)
class BodyLayouts:
    """Where the values of a graph lie on a mesh, by where some of them do."""

    body: Graph
    factors: BodyFactors

    def layouts(self, given: Sequence[tuple[str, Layout]], sizes: Sequence[int]) -> dict[str, Layout]:
        """Of all values. given: of inputs and outputs. sizes: of the axes."""
        axes = [self._axis([(n, lay[k]) for n, lay in given], ways) for k, ways in enumerate(sizes)]
        return {v: tuple(axis[v] for axis in axes) for v in self.body.types()}

    def _axis(self, given: Sequence[tuple[str, Placement]], ways: int) -> Mapping[str, Placement]:
        """Where the values of the body lie on one axis."""
        types, laid = self.body.types(), self.factors.dims
        split = self._split(given, ways)
        if split is None:
            return dict.fromkeys(types, R)
        factor, digit = split
        states = _states(self.body, factor, laid, self.factors.rules, self.factors.parts)
        assert states is not None
        placed: dict[str, Placement] = {}
        for value, type_ in types.items():
            own = placement_of(laid[value], type_, self.factors.sizes, factor, digit, ways)
            assert own is not None
            placed[value] = Partial(states[value]) if own == R and states[value] else own
        return placed

    def _split(self, given: Sequence[tuple[str, Placement]], ways: int) -> tuple[int, Digit] | None:
        for name, placed in given:
            result = digit_of(self.factors.dims[name], self.factors.sizes, placed, ways)
            if result is not None:
                return result
        return None

    def local(self, layouts: Mapping[str, Layout], mesh: MeshShape) -> Graph:
        """What a rank runs; sizes may be symbols."""
        types = self.body.types()

        def local(type_: TensorType, value: str) -> TensorType:
            return TensorType(symbolic_shape(type_.shape, layouts[value], mesh), type_.dtype)  # type: ignore[arg-type]  # a size may be a symbol

        nodes = []
        for node, rule in zip(self.body.nodes, self.factors.rules, strict=True):
            refs = list(refs_of(node))
            ins, outs = tuple(types[r] for r in refs), tuple(layouts[o] for o in node.outs)
            own = LocalCall(node, ins, tuple(layouts[r] for r in refs), outs, mesh)
            new = rule.local(own) if rule.local is not None else node
            nodes.append(replace(new, types=tuple(local(types[o], o) for o in node.outs)))
        inputs = tuple((n, local(t, n)) for n, t in self.body.inputs)
        return Graph(self.body.name, inputs, tuple(nodes), self.body.outputs)
