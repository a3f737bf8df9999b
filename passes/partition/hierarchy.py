"""Collectives over an axis that crosses several levels of wiring become one collective per level.

The axis is refined: ``fsdp=16`` over two nodes of eight is ``fsdp_network=2,fsdp_node=8`` from here on, rank
by rank the same devices, shard by shard the same elements. Then

    all-gather       over the network first, while shards are small, then inside the node
    reduce-scatter   inside the node first, then over the network
    tokens           over the network once per node that has experts of their choice, then inside it
    all-reduce       scattered inside the node, reduced over the network, gathered inside the node

so that the network carries what a node has once, in messages between few ranks (R. Thakur, R. Rabenseifner,
W. Gropp, IJHPCA 19(1), 2005, section 4; S. Rajbhandari et al., "ZeRO-Infinity", SC'21). What lies between two
steps is a value with a placement like any other: after the gather over the network a rank holds every 8th
block of the whole, ``fsdp_network:R fsdp_node:S(0,outer=2)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

from autoshard.errors import UsageError
from autoshard.ir import Arg, LocalOffset, LocalSize, Node, ShardOf, TensorType, refs_of
from autoshard.ir.collectives import (
    COLLECTIVES,
    TensorTransfer,
    TransferKind,
    collective,
    exact_transfer,
    is_collective,
    transfers_of,
)
from autoshard.ir.local_bytes import held_bytes
from autoshard.ir.lowered import Lowered, LoweredSegment, PlacedValue, with_main
from autoshard.ir.names import free_name
from autoshard.ir.placement import Layout, Partial, Placement, R, Shard, layout_ok, local_shape
from autoshard.rules.local import MeshShape


@dataclass(frozen=True)
class AxisLevels:
    """An axis and what it is refined to. parts: (name, size), outermost first."""

    axis: str
    parts: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.parts)

    def refined(self, mesh: MeshShape) -> MeshShape:
        """The mesh with these axes in place of the one."""
        at = mesh.names.index(self.axis)
        return MeshShape(
            (*mesh.names[:at], *self.names, *mesh.names[at + 1 :]),
            (*mesh.sizes[:at], *self.sizes, *mesh.sizes[at + 1 :]),
        )

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.parts)


@dataclass(frozen=True)
class ByLevel:
    """How an axis is taken apart. seconds: of a collective (kind, bytes, axis), of the old axis, too."""

    levels: AxisLevels
    seconds: Callable[[str, float, str], float]


class CannotRefineError(Exception):
    """A program in which something over an axis cannot be done level by level; the reason in words."""


def by_level(lowered: Lowered, mesh: MeshShape, how: ByLevel) -> Lowered:
    """The program on the refined mesh. Raises CannotRefineError, with the reason."""
    return _Refiner(mesh, how).run(lowered)


def check_levels(levels: AxisLevels, mesh: MeshShape) -> None:
    """UsageError unless the parts multiply to the axis and their names are free."""
    where = f"levels {levels} of axis {levels.axis}"
    if levels.axis not in mesh.names:
        raise UsageError(f"the mesh has no axis {levels.axis!r}", where=where)
    size = mesh.sizes[mesh.names.index(levels.axis)]
    if prod(levels.sizes) != size or len(levels.parts) < 2:
        raise UsageError(
            f"{levels} is no refinement of {levels.axis}={size}",
            hint=f"give two parts or more whose product is {size}",
        )
    names = levels.refined(mesh).names
    if len(set(names)) < len(names):
        raise UsageError(f"two axes would have the same name: {', '.join(names)}", where=where)


@dataclass(frozen=True)
class _Member:
    """One tensor of a collective. where: (dim, outer blocks on a rank), None where nothing is split."""

    source: str
    out: str
    where: tuple[int, int] | None
    type: TensorType


#: a collective over a level, and where a tensor lies after it
_Step: TypeAlias = tuple[TransferKind, int, Callable[[_Member, int], Layout]]


class _Refiner:
    def __init__(self, mesh: MeshShape, how: ByLevel) -> None:
        check_levels(how.levels, mesh)
        self.old, self.how = mesh, how
        self.axis, self.names, self.ways = how.levels.axis, how.levels.names, how.levels.sizes
        self.at = mesh.names.index(self.axis)
        self.mesh = how.levels.refined(mesh)

    def run(self, lowered: Lowered) -> Lowered:
        segments = {name: self._segment(s) for name, s in lowered.segments.items()}
        values = {n: self.placed(p) for n, p in lowered.values.items()}
        chain = _Chain(self, values, lowered.values)
        new = with_main(lowered, lambda item: chain.of(item) if isinstance(item, Node) else [item])
        return replace(new, segments=segments, values=values)

    def _segment(self, segment: LoweredSegment) -> LoweredSegment:
        types = segment.graph.types()
        old = {n: PlacedValue(t, segment.layouts[n]) for n, t in types.items()}
        values = {n: self.placed(p) for n, p in old.items()}
        chain = _Chain(self, values, old)
        nodes = tuple(new for node in segment.graph.nodes for new in chain.of(node))
        layouts = {n: p.layout for n, p in values.items()}
        graph = replace(segment.graph, nodes=nodes)
        return replace(segment, graph=graph, layouts=layouts, why={**segment.why, **chain.why})

    # -- placements --------------------------------------------------------------------------------

    def placed(self, value: PlacedValue) -> PlacedValue:
        """The same elements on the same ranks."""
        own = value.layout[self.at]
        if isinstance(own, Shard) and not self._even(value, own):
            raise CannotRefineError(f"{value.type} is split unevenly over {self.axis}")
        layout = (*value.layout[: self.at], *((own,) * len(self.ways)), *value.layout[self.at + 1 :])
        if not layout_ok(value.type.shape, layout, self.mesh.sizes):
            raise CannotRefineError(f"{value.type} cannot be split level by level")
        return PlacedValue(value.type, layout)

    def _even(self, value: PlacedValue, own: Shard) -> bool:
        """Whether all ranks of the axis hold the same number of elements."""
        ends = (0, self.old.sizes[self.at] - 1)
        shapes = {
            local_shape(
                value.type.shape,
                value.layout,
                self.old.sizes,
                tuple(k if a == self.at else 0 for a in range(len(self.old.sizes))),
            )
            for k in ends
        }
        return len(shapes) == 1 and own.inner == 1 and own.outer > 0

    def symbols(self, arg: Arg) -> Arg:
        """An argument whose symbols name the new axes."""
        if isinstance(arg, tuple):
            return tuple(self.symbols(a) for a in arg)
        if isinstance(arg, LocalSize | LocalOffset):
            return replace(arg, shards=tuple(new for old in arg.shards for new in self._shards(old)))
        return arg

    def _shards(self, shard: ShardOf) -> list[ShardOf]:
        if shard.axis != self.axis:
            return [shard]
        if shard.inner != 1 or shard.outer < 0:
            raise CannotRefineError(f"a dim is split unevenly or in a zigzag over {self.axis}")
        return [ShardOf(name, shard.outer, shard.inner) for name in self.names]


class _Chain:
    """The collectives of one graph.

    values: of the graph, on the new mesh; intermediate ones are added. old: on the mesh as it was.
    """

    def __init__(
        self, refiner: _Refiner, values: dict[str, PlacedValue], old: Mapping[str, PlacedValue]
    ) -> None:
        self.refiner, self.values, self.old = refiner, values, old
        self.taken, self.levels = set(values), range(len(refiner.ways))
        self.why: dict[str, str] = {}

    def of(self, node: Node) -> list[Node]:
        """A node on the new mesh, as several where it is a collective over the refined axis."""
        r = self.refiner
        if is_collective(node) and COLLECTIVES[node.op].family == "experts" and node.args[1] == r.axis:
            return [replace(node, args=(node.args[0], r.names, *map(r.symbols, node.args[2:])))]
        if not is_collective(node) or node.args[1] != r.axis:
            kwargs = tuple((k, r.symbols(v)) for k, v in node.kwargs)
            return [replace(node, args=tuple(r.symbols(a) for a in node.args), kwargs=kwargs)]
        kind = exact_transfer(node)
        make = {
            "all_gather": self._gathers,
            "reduce_scatter": self._scatters,
            "slice": self._slices,
            "all_reduce": self._reductions,
        }.get(kind or "")
        if make is None:
            raise CannotRefineError(f"{COLLECTIVES[node.op].name} over {r.axis} has no form by levels")
        new = make(node, self._members(node))
        self._explain(node, new)
        return new

    def _members(self, node: Node) -> list[_Member]:
        transfers = transfers_of(node) or ()
        if any(t.where[3:] not in ((), (None,)) for t in transfers):
            raise CannotRefineError(f"a value is split unevenly over {self.refiner.axis}")
        rows = zip(transfers, node.types, strict=True)
        return [
            _Member(t.source, t.out, (t.where[0], t.where[1]) if t.where else None, type_)
            for t, type_ in rows
            if type_ is not None
        ]

    # -- kinds -------------------------------------------------------------------------------------

    def _gathers(self, node: Node, members: Sequence[_Member]) -> list[Node]:
        """Outermost level first: what goes over it is smallest then."""

        def after(m: _Member, level: int) -> Layout:
            return self._between(self.values[m.source].layout, m, level + 1, R)

        return self._by_level(node, members, [("all_gather", level, after) for level in self.levels])

    def _scatters(self, node: Node, members: Sequence[_Member]) -> list[Node]:
        """Innermost level first: what goes over the outermost is smallest then."""

        def after(m: _Member, level: int) -> Layout:
            return self._between(self.values[m.out].layout, m, level, Partial())

        return self._by_level(node, members, [("reduce_scatter", lv, after) for lv in self.levels[::-1]])

    def _by_level(
        self, node: Node, members: Sequence[_Member], steps: Sequence[_Step], base: int = 0
    ) -> list[Node]:
        """One collective after the other, the last of which makes the results."""
        new, at = [], [m.source for m in members]
        for k, (kind, level, layout) in enumerate(steps):
            last = k == len(steps) - 1
            after = [(m, layout(m, level)) for m in members]
            outs = [m.out if last else self._named(m, lay, level) for m, lay in after]
            done = {"all_reduce": None, "slice": 0}.get(kind, level)
            new.append(self._node(node, kind, level, members, at, outs, done, base))
            at = outs
        return new

    def _slices(self, node: Node, members: Sequence[_Member]) -> list[Node]:
        start, levels = self.refiner.at, len(self.levels)

        def after(m: _Member, level: int) -> Layout:
            layout = self.values[m.out].layout
            return (*layout[: start + level + 1], *[R] * (levels - level - 1), *layout[start + levels :])

        return self._by_level(node, members, [("slice", level, after) for level in self.levels])

    def _reductions(self, node: Node, members: Sequence[_Member]) -> list[Node]:
        """Scattered inside, reduced over the outermost level, gathered inside; one level after the other
        where a value cannot be divided, or is no sum."""
        op = node.kwarg("op", "sum")
        dims = [self._divided(m) if op == "sum" else None for m in members]
        split = [replace(m, where=(d, 1)) for m, d in zip(members, dims, strict=True) if d is not None]
        plain = [m for m, d in zip(members, dims, strict=True) if d is None]
        new: list[Node] = []
        if plain:
            steps: list[_Step] = [
                ("all_reduce", level, lambda m, lv: self._reduced(m, lv, op)) for level in self.levels[::-1]
            ]
            new += self._by_level(node, plain, steps)
        if split:
            new += self._divided_reductions(node, split)
        return new

    def _divided_reductions(self, node: Node, members: Sequence[_Member]) -> list[Node]:
        inner, part = self.levels[1:], Partial()
        steps: list[_Step] = [
            *(("reduce_scatter", k, lambda m, lv: self._inside(m, lv, part, part)) for k in inner[::-1]),
            ("all_reduce", 0, lambda m, lv: self._inside(m, 1, R, R)),
            *(("all_gather", k, lambda m, lv: self._inside(m, lv + 1, R, R)) for k in inner),
        ]
        return self._by_level(node, members, steps, base=1)

    # -- placements between steps ------------------------------------------------------------------

    def _between(self, whole: Layout, member: _Member, done: int, rest: Placement) -> Layout:
        """Split over the levels from ``done`` on, in blocks of what lies inside the levels before, which
        have ``rest``. whole: the layout with all levels split."""
        start, ways = self.refiner.at, self.refiner.ways
        own = whole[start]
        assert isinstance(own, Shard)
        before = prod(
            size
            for p, size in zip(whole[:start], self.refiner.mesh.sizes, strict=False)
            if isinstance(p, Shard) and (p.dim, p.outer) == (own.dim, own.outer)
        )
        block = own if not done else Shard(own.dim, own.outer * before * prod(ways[:done]))
        return self._with(whole, [rest] * done + [block] * (len(ways) - done))

    def _inside(self, member: _Member, done: int, outermost: Placement, rest: Placement) -> Layout:
        """Of a value that is split inside the outermost level only, over the levels from ``done`` on."""
        assert member.where is not None
        ways = self.refiner.ways
        block = Shard(member.where[0], prod(ways[1:done]))
        inner = [rest] * (done - 1) + [block] * (len(ways) - done)
        return self._with(self.values[member.source].layout, [outermost, *inner])

    def _reduced(self, member: _Member, level: int, op: str) -> Layout:
        """Of a value that is reduced over the levels from ``level`` on."""
        ways = self.refiner.ways
        return self._with(
            self.values[member.source].layout, [Partial(op)] * level + [R] * (len(ways) - level)
        )

    def _with(self, layout: Layout, own: Sequence[Placement]) -> Layout:
        start = self.refiner.at
        return (*layout[:start], *own, *layout[start + len(own) :])

    def _divided(self, member: _Member) -> int | None:
        """A dim that the inner levels can split between them, None if there is none."""
        inner = prod(self.refiner.ways[1:])
        layout = self.values[member.source].layout
        for dim, size in enumerate(member.type.shape):
            free = not any(isinstance(p, Shard) and p.dim == dim for p in layout)
            if free and size % inner == 0:
                return dim
        return None

    def _named(self, member: _Member, layout: Layout, level: int) -> str:
        """A name for a value between two steps."""
        if not layout_ok(member.type.shape, layout, self.refiner.mesh.sizes):
            raise CannotRefineError(f"{member.type} cannot be split level by level")
        base = f"{member.out}_{self.refiner.names[level].removeprefix(self.refiner.axis + '_')}"
        name = free_name(base, self.taken)
        self.taken.add(name)
        self.values[name] = PlacedValue(member.type, layout)
        return name

    # -- nodes -------------------------------------------------------------------------------------

    def _node(
        self,
        node: Node,
        kind: TransferKind,
        level: int,
        members: Sequence[_Member],
        sources: Sequence[str],
        outs: Sequence[str],
        done: int | None,
        base: int = 0,
    ) -> Node:
        """One step. done: how many levels lie outside the split, None for a step that splits nothing."""
        ways, name = self.refiner.ways, self.refiner.names[level]
        blocks = 1 if done is None else prod(ways[base:done])
        wheres: list[tuple[Arg, ...]] = [
            () if done is None or m.where is None else (m.where[0], m.where[1] * blocks, 1, None)
            for m in members
        ]
        rows = zip(sources, outs, wheres, strict=True)
        moves, types = [TensorTransfer(*row) for row in rows], [m.type for m in members]
        reduce = node.kwarg("op") if kind == "all_reduce" else None
        return collective(kind, name, moves, types, node.origin, node.backward, reduce=reduce)

    def _explain(self, node: Node, made: Sequence[Node]) -> None:
        spec = COLLECTIVES[node.op]
        if not spec.primitive:
            return
        nbytes = self._bytes(node, self.old, self.refiner.old)
        flat = self.refiner.how.seconds(spec.primitive, nbytes, self.refiner.axis)
        apart = 0.0
        for step in made:
            nbytes = self._bytes(step, self.values, self.refiner.mesh)
            primitive = COLLECTIVES[step.op].primitive
            apart += self.refiner.how.seconds(primitive, nbytes, str(step.args[1]))
        reason = f"by level: {apart * 1e6:.0f} us, in one {flat * 1e6:.0f} us"
        self.why.update((step.name, reason) for step in made)

    def _bytes(self, node: Node, values: Mapping[str, PlacedValue], mesh: MeshShape) -> float:
        """Of the full tensors on the fullest rank, as `cost.collective` counts them."""
        names = node.outs if COLLECTIVES[node.op].gathers else refs_of(node)
        placed = [values[name] for name in names]
        return float(sum(held_bytes(p.type, p.layout, mesh.sizes) for p in placed))
