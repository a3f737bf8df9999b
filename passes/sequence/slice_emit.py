"""The ops of one slice of the sequence, from the ops of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.errors import UsageError
from autoshard.ir import Arg, Node, Ref, TensorType, refs_of, substitute
from autoshard.ir.collectives import COLLECTIVES, TransferKind
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.placement import Layout, Placement, R, Shard
from autoshard.ir.slices import Slices
from autoshard.ir.statements import Statement
from autoshard.passes.partition.insert_collectives import collective_node
from autoshard.passes.sequence.slice_attention import attend, attend_backward
from autoshard.passes.sequence.slice_places import ATTENTION, ATTENTION_BACKWARD, POSITIONS, SlicedStatement
from autoshard.passes.sequence.slice_values import cut, full_along, join, moved_off, sliced_value, total
from autoshard.rules.core import RuleFn
from autoshard.rules.local import LocalCall, MeshShape

#: the axis of slices, as localizers see it
_AXIS = "slice"


class Namer:
    """Names for what a value is divided into: the same name for the same question. origin: of a name."""

    def __init__(self, taken: set[str]) -> None:
        self.taken, self.known = taken, dict[tuple[str, str], str]()
        self.origin: dict[str, tuple[str, str]] = {}

    def __call__(self, value: str, end: str) -> str:
        if not end:
            return value
        if (value, end) not in self.known:
            name, k = f"{value}{end}", 1
            while name in self.taken:
                k += 1
                name = f"{value}{end}_{k}"
            self.taken.add(name)
            self.known[value, end] = name
            self.origin[name] = value, end
        return self.known[value, end]


@dataclass
class PartStatements:
    """What one part takes over of one instruction of main.

    given, made: values by their names inside -> in main. names: the other way. values: what they are. why:
    name of a node -> the reason shown beside it.
    """

    part: int
    item: int
    nodes: list[Node] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    values: dict[str, PlacedValue] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SliceContext:
    """What is the same for all slices.

    values: what every value of the undivided program is. of: its placement on the axis of slices, if it is
    divided. summed: gradients of which every slice makes a term under their own name. moved: value -> what a
    rank has cut it out of, for an axis of the mesh. again: value that backward recomputes -> the value of
    forward. outer: names in main. cut, calls: slices of values, and of calls of a node, of all layers
    alike; named: of values by name.
    """

    slices: Slices
    values: Mapping[str, PlacedValue]
    of: Mapping[str, Placement]
    summed: frozenset[str]
    moved: Mapping[str, str]
    again: Mapping[str, str]
    rules: Mapping[str, RuleFn]
    mesh: MeshShape
    outer: Namer
    cut: dict[tuple[PlacedValue, Placement, int], PlacedValue] = field(default_factory=dict, compare=False)
    named: dict[tuple[str, Placement, int], PlacedValue] = field(default_factory=dict, compare=False)
    calls: dict[tuple[int, SlicedStatement, int], Node] = field(default_factory=dict, compare=False)

    def place(self, value: str) -> Placement:
        return self.of.get(value, R)

    def sliced(self, value: str, placed: Placement, number: int) -> PlacedValue:
        """What a slice of a value is."""
        key = (value, placed, self.slices.like(number))
        if key not in self.named:
            self.named[key] = self.sliced_as(self.values[value], placed, value, number)
        return self.named[key]

    def sliced_as(self, have: PlacedValue, placed: Placement, value: str, number: int) -> PlacedValue:
        """What a slice of a value is that lies in another layout."""
        key = (have, placed, self.slices.like(number))
        if key not in self.cut:
            self.cut[key] = sliced_value(have, placed, self.slices, number, self.mesh.sizes, value)
        return self.cut[key]


class SliceEmitter:
    """Adds what a part needs of one statement to a group.

    inner: names in the segment. have: values that are put together in this stage already, which grows.
    why: of the statement.
    """

    def __init__(
        self,
        of: SliceContext,
        group: PartStatements,
        inner: Namer,
        have: set[str],
        statement: Statement,
        why: str,
    ) -> None:
        self.of, self.group, self.inner, self.have = of, group, inner, have
        self.statement, self.node, self.why = statement, statement.node, why

    def run(self, way: SlicedStatement, number: int | None) -> None:
        """The statement itself; number: of the slice, unless it runs once."""
        if not way.divided or number is None:
            names = iter([self.whole(n, v) for n, v in self.uses()])
            self.emit(substitute(self.node, lambda _: Ref(next(names))))
            for inner, value, placed in zip(self.node.outs, self.statement.makes, way.outputs, strict=True):
                self.mark(inner, value, None if placed is None else self.of.values[value])
        elif self.node.op == ATTENTION and way.inputs[1] == POSITIONS:
            attend(self, number)
        elif self.node.op == ATTENTION_BACKWARD and way.inputs[2] == POSITIONS:
            attend_backward(self, number)
        else:
            self._slice(way, number)

    def uses(self) -> list[tuple[str, str]]:
        """(name in the segment, value) of what the statement takes, in order."""
        return list(zip(refs_of(self.node), self.statement.uses, strict=True))

    # -- values ------------------------------------------------------------------------------------------

    def whole(self, inner: str, value: str, *, result: bool = False) -> str:
        """The name, in the group, of all of a value: put together of its slices if it is divided. result: the
        caller alone takes it, in whichever layout."""
        placed = self.of.place(value)
        if inner in self.group.made or placed == R or value in self.have:
            return self.given(inner, value, self.of.values[value])
        parts = [self.own(inner, value, k) for k in range(len(self.of.slices))]
        new = self.of.values[value]

        def add(op: str, args: tuple[Arg, ...], what: PlacedValue, end: str) -> str:
            return self.added(inner, value, op, args, what, f"_whole{end}" if end else "")

        self.have.add(value)
        if not isinstance(placed, Shard):
            return total(parts, new, add)
        haves, bare = [self.of.sliced(value, placed, k) for k in range(len(parts))], full_along(new, placed)
        if bare == new:
            return join(parts, haves, placed, new, add)
        moved = moved_off(new, bare, placed.dim, self.of.mesh.sizes) if result else None
        bare = moved or bare
        whats = [self.of.sliced_as(bare, placed, value, k) for k in range(len(parts))]
        gathered = [
            self._move(p, have, what, inner, value, f"_all{k}")
            for k, (p, have, what) in enumerate(zip(parts, haves, whats, strict=True))
        ]

        if moved is not None:
            return join(gathered, whats, placed, bare, add)

        def beside(op: str, args: tuple[Arg, ...], what: PlacedValue, end: str) -> str:
            return self.added(inner, value, op, args, what, f"_whole{end}_all")

        return self._move(join(gathered, whats, placed, bare, beside), bare, new, inner, value, "")

    def own(self, inner: str, value: str, number: int) -> str:
        """Slice ``number`` of a value that is made slice by slice."""
        placed = self.of.place(value)
        end = f"_s{number}"
        name = value if value in self.of.summed else self.of.outer(value, end)
        return self.given(self.inner(inner, end), name, self.of.sliced(value, placed, number))

    def piece(self, inner: str, value: str, placed: Placement, number: int) -> str:
        """A value as a slice takes it: its own part, or all of it."""
        if placed == R:
            return self.whole(inner, value)
        if self.of.place(value) == placed:
            return self.own(inner, value, number)
        assert isinstance(placed, Shard)
        deep = f"_{placed.outer}" if placed.outer > 1 else ""
        end = f"_d{placed.dim}{deep}_s{number}"
        name = self.inner(inner, end)
        if name in self.group.made:
            return name
        have, new = self.of.values[value], self.of.sliced(value, placed, number)
        bare = full_along(have, placed)
        if bare != have and value in self.of.moved:
            source = self.of.moved[value]
            part = self.piece(self.inner(inner, "_before"), source, placed, number)
            return self._move(part, self.of.sliced(source, placed, number), new, inner, value, end)
        deep = "" if bare == have else "_all"

        def add(op: str, args: tuple[Arg, ...], what: PlacedValue, part: str) -> str:
            return self.added(inner, value, op, args, what, end + part + deep)

        full = self._move(self.whole(inner, value), have, bare, inner, value, f"_d{placed.dim}_all")
        as_cut = self.of.sliced_as(bare, placed, value, number)
        part = cut(full, bare, placed, number, as_cut, self.of.slices, add)
        return self._move(part, as_cut, new, inner, value, end)

    def _move(self, name: str, have: PlacedValue, want: PlacedValue, inner: str, value: str, end: str) -> str:
        """Bring a value into another layout: what is divided over axes together, then what is whole apart."""
        at = have.layout
        axes = [k for k in reversed(range(len(at))) if isinstance(at[k], Shard) and want.layout[k] == R]
        both = [k for k in range(len(at)) if isinstance(want.layout[k], Shard) and at[k] != want.layout[k]]
        axes += [k for k in both if at[k] != R] + [k for k in both if at[k] == R]
        for k in axes:
            to: Placement = want.layout[k]
            target: Layout = (*at[:k], to, *at[k + 1 :])
            kind: TransferKind = "all_gather" if to == R else "slice" if at[k] == R else "all_to_all"
            last = end if k == axes[-1] else f"{end}_{self.of.mesh.names[k]}"
            own = self.inner(inner, last)
            if own not in self.group.made:
                origin, backward = self.node.origin, self.statement.backward
                layouts = (at, target)
                node = collective_node(self.of.mesh, kind, k, name, have.type, layouts, own, origin, backward)
                self.group.nodes.append(node)
                self.mark(own, self.of.outer(value, last), PlacedValue(have.type, target))
            name, at = own, target
        assert at == want.layout, (at, want.layout)
        return name

    def given(self, inner: str, value: str, what: PlacedValue) -> str:
        """A value that is there: made in this group, or given to it; under its name there."""
        if value not in self.group.names:
            self.group.names[value] = inner
            self.group.given[inner] = value
            self.group.values[inner] = what
        return self.group.names[value]

    def mark(self, inner: str, value: str, what: PlacedValue | None) -> None:
        """A value that this group makes, by its names inside and in main; what: None if it is no tensor."""
        self.group.made[inner] = value
        self.group.names[value] = inner
        if what is not None:
            self.group.values[inner] = what

    def emit(self, node: Node) -> None:
        """The node of the statement, with the reason for how it runs."""
        self.group.nodes.append(node)
        if self.why:
            self.group.why[node.name] = self.why

    def added(
        self, inner: str, value: str, op: str, args: tuple[Arg, ...], what: PlacedValue, end: str
    ) -> str:
        """A node beside the statement's own, which makes a value named after another."""
        name = self.inner(inner, end)
        origin, backward = self.node.origin, self.statement.backward
        self.group.nodes.append(Node(op, args, (), (name,), (what.type,), origin, backward))
        self.mark(name, self.of.outer(value, end), what)
        return name

    # -- one slice ---------------------------------------------------------------------------------------

    def _slice(self, way: SlicedStatement, number: int) -> None:
        """The statement on the parts of its inputs, as its rule says."""
        names: dict[str, str] = {}
        for (inner, value), wanted in zip(self.uses(), way.inputs, strict=True):
            name = self.piece(inner, value, wanted, number)
            if names.setdefault(inner, name) != name:
                raise UsageError(
                    f"{self.node.op} takes a value whole and in slices at once",
                    where=self.node.origin.source or self.node.origin.fqn,
                    hint="use a schedule without slices, 1f1b for instance",
                )
        local = substitute(self._local(way, number), lambda n: Ref(names[n]))
        outs: list[str] = []
        types: list[TensorType | None] = []
        for inner, value, placed in zip(self.node.outs, self.statement.makes, way.outputs, strict=True):
            name = self.inner(inner, f"_s{number}")
            outs.append(name)
            if placed is None:
                types.append(None)
                self.mark(name, self.of.outer(value, f"_s{number}"), None)
                continue
            what = self.of.sliced(value, placed, number)
            types.append(what.type)
            self.mark(name, value if value in self.of.summed else self.of.outer(value, f"_s{number}"), what)
        origin, backward = self.node.origin, self.statement.backward
        self.emit(Node(local.op, local.args, local.kwargs, tuple(outs), tuple(types), origin, backward))

    def _local(self, way: SlicedStatement, number: int) -> Node:
        """The call as it is for a slice: its sizes and offsets."""
        fn = self.of.rules.get(self.node.op)
        if fn is None:
            return self._collective(way, number)
        # layers share the nodes of their segment
        key = (id(self.node), way, number)
        if key not in self.of.calls:
            self.of.calls[key] = self._localized(fn, way, number)
        return self.of.calls[key]

    def _localized(self, fn: RuleFn, way: SlicedStatement, number: int) -> Node:
        ins = tuple(self.of.values[v].type for v in self.statement.uses)
        localizer = fn(self.node, ins).local
        if localizer is None:
            return self.node
        inputs = tuple((p,) for p in way.inputs)
        outputs = tuple(None if p is None else (p,) for p in way.outputs)
        slices = self.of.slices
        mesh = MeshShape((_AXIS,), (slices.units,), uneven=not slices.even)
        call = LocalCall(self.node, ins, inputs, outputs, mesh)
        local = localizer(call)
        if local.op not in self.of.rules:
            raise UsageError(
                f"{self.node.op} cannot be divided into slices of the sequence",
                where=self.node.origin.source or self.node.origin.fqn,
                why=f"a slice of it is {local.op}, which cannot be divided over the mesh",
                hint="use a schedule without slices, 1f1b for instance",
            )
        args = tuple(slices.resolved(a, number) for a in local.args)
        kwargs = tuple((k, slices.resolved(v, number)) for k, v in local.kwargs)
        return Node(local.op, args, kwargs, local.outs, local.types, local.origin, local.backward)

    def _collective(self, way: SlicedStatement, number: int) -> Node:
        """A collective of a slice: it counts other blocks and sizes."""
        node, kind = self.node, COLLECTIVES[self.node.op].transfer
        (inner,), (source,), (new,) = refs_of(node), self.statement.uses, self.statement.makes
        if kind == "all_reduce":
            return node
        before, after = (self.of.sliced(v, way.inputs[0], number) for v in (source, new))
        axis = self.of.mesh.names.index(node.args[1])
        layouts = (before.layout, after.layout)
        return collective_node(
            self.of.mesh, kind, axis, inner, after.type, layouts, new, node.origin, node.backward
        )
