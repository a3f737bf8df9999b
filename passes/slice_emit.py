"""The ops of one slice of the sequence, from the ops of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.errors import UsageError
from autoshard.ir import Arg, LocalOffset, LocalSize, Node, Ref, TensorType, refs_of, substitute
from autoshard.ir.lowered import Placed
from autoshard.ir.statements import Statement
from autoshard.passes.insert_collectives import collective_node
from autoshard.passes.slice_places import ATTENTION, ATTENTION_BACKWARD, POSITIONS, Way
from autoshard.passes.slice_values import cut, join, sliced_value, total, whole_along
from autoshard.placement import Layout, Placement, R, Shard, local_extent
from autoshard.rules.core import RuleFn
from autoshard.rules.local import LocalCall, MeshShape

#: the axis of slices, as localizers see it
_AXIS = "slice"


class Namer:
    """Names for what a value is divided into: the same name for the same question."""

    def __init__(self, taken: set[str]) -> None:
        self.taken, self.known = taken, dict[tuple[str, str], str]()

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
        return self.known[value, end]


@dataclass
class Group:
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
    values: dict[str, Placed] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """What is the same for all slices.

    values: what every value of the undivided program is. of: its placement on the axis of slices, if it is
    divided. summed: gradients of which every slice makes a term under their own name. moved: value -> what a
    rank has cut it out of, for an axis of the mesh. again: value that backward makes again -> the value of
    forward. outer: names in main.
    """

    slices: int
    values: Mapping[str, Placed]
    of: Mapping[str, Placement]
    summed: frozenset[str]
    moved: Mapping[str, str]
    again: Mapping[str, str]
    rules: Mapping[str, RuleFn]
    mesh: MeshShape
    outer: Namer

    def place(self, value: str) -> Placement:
        return self.of.get(value, R)

    def sliced(self, value: str, placed: Placement) -> Placed:
        """What a slice of a value is."""
        return self.sliced_as(self.values[value], placed, value)

    def sliced_as(self, have: Placed, placed: Placement, value: str) -> Placed:
        """What a slice of a value is that lies in another layout."""
        return sliced_value(have, placed, self.slices, self.mesh.sizes, value)


class Emitter:
    """Adds what a part needs of one statement to a group.

    inner: names in the segment. have: values that are put together in this stage already, which grows.
    why: of the statement.
    """

    def __init__(
        self, of: Setting, group: Group, inner: Namer, have: set[str], statement: Statement, why: str
    ) -> None:
        self.of, self.group, self.inner, self.have = of, group, inner, have
        self.statement, self.node, self.why = statement, statement.node, why

    def run(self, way: Way, number: int | None) -> None:
        """The statement itself; number: of the slice, unless it runs once."""
        if not way.divided or number is None:
            names = iter([self.whole(n, v) for n, v in self._uses()])
            self._node(substitute(self.node, lambda _: Ref(next(names))))
            for inner, value, placed in zip(self.node.outs, self.statement.makes, way.outputs, strict=True):
                self._made(inner, value, None if placed is None else self.of.values[value])
        elif self.node.op == ATTENTION and way.inputs[1] == POSITIONS:
            self._attention(number)
        elif self.node.op == ATTENTION_BACKWARD and way.inputs[2] == POSITIONS:
            self._attention_backward(number)
        else:
            self._slice(way, number)

    def _uses(self) -> list[tuple[str, str]]:
        return list(zip(refs_of(self.node), self.statement.uses, strict=True))

    # -- values ------------------------------------------------------------------------------------------

    def whole(self, inner: str, value: str) -> str:
        """The name, in the group, of all of a value: put together of its slices if it is divided."""
        placed = self.of.place(value)
        if inner in self.group.made or placed == R or value in self.have:
            return self._given(inner, value, self.of.values[value])
        parts = [self.own(inner, value, k) for k in range(self.of.slices)]
        made = self.of.values[value]

        def add(op: str, args: tuple[Arg, ...], what: Placed, end: str) -> str:
            return self._added(inner, value, op, args, what, f"_whole{end}" if end else "")

        self.have.add(value)
        if not isinstance(placed, Shard):
            return total(parts, made, add)
        have, bare = self.of.sliced(value, placed), whole_along(made, placed)
        if bare == made:
            return join(parts, have, placed, made, add)
        part = self.of.sliced_as(bare, placed, value)
        gathered = [self._move(p, have, part, inner, value, f"_all{k}") for k, p in enumerate(parts)]

        def beside(op: str, args: tuple[Arg, ...], what: Placed, end: str) -> str:
            return self._added(inner, value, op, args, what, f"_whole{end}_all")

        return self._move(join(gathered, part, placed, bare, beside), bare, made, inner, value, "")

    def own(self, inner: str, value: str, number: int) -> str:
        """Slice ``number`` of a value that is made slice by slice."""
        placed = self.of.place(value)
        end = f"_s{number}"
        name = value if value in self.of.summed else self.of.outer(value, end)
        return self._given(self.inner(inner, end), name, self.of.sliced(value, placed))

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
        have, made = self.of.values[value], self.of.sliced(value, placed)
        bare = whole_along(have, placed)
        if bare != have and value in self.of.moved:
            source = self.of.moved[value]
            part = self.piece(self.inner(inner, "_before"), source, placed, number)
            return self._move(part, self.of.sliced(source, placed), made, inner, value, end)
        deep = "" if bare == have else "_all"

        def add(op: str, args: tuple[Arg, ...], what: Placed, part: str) -> str:
            return self._added(inner, value, op, args, what, end + part + deep)

        whole = self._move(self.whole(inner, value), have, bare, inner, value, f"_d{placed.dim}_all")
        as_cut = self.of.sliced_as(bare, placed, value)
        part = cut(whole, bare, placed, number, as_cut, self.of.slices, add)
        return self._move(part, as_cut, made, inner, value, end)

    def _move(self, name: str, have: Placed, want: Placed, inner: str, value: str, end: str) -> str:
        """Bring a value into another layout: what is divided over axes together, then what is whole apart."""
        at = have.layout
        axes = [k for k in reversed(range(len(at))) if isinstance(at[k], Shard) and want.layout[k] == R]
        axes += [k for k in range(len(at)) if at[k] == R and isinstance(want.layout[k], Shard)]
        for k in axes:
            to: Placement = want.layout[k]
            target: Layout = (*at[:k], to, *at[k + 1 :])
            kind = "all_gather" if to == R else "slice"
            last = end if k == axes[-1] else f"{end}_{self.of.mesh.names[k]}"
            own = self.inner(inner, last)
            if own not in self.group.made:
                origin, backward = self.node.origin, self.statement.backward
                layouts = (at, target)
                node = collective_node(self.of.mesh, kind, k, name, have.type, layouts, own, origin, backward)
                self.group.nodes.append(node)
                self._made(own, self.of.outer(value, last), Placed(have.type, target))
            name, at = own, target
        assert at == want.layout, (at, want.layout)
        return name

    def _given(self, inner: str, value: str, what: Placed) -> str:
        """A value that is there: made in this group, or given to it; under its name there."""
        if value not in self.group.names:
            self.group.names[value] = inner
            self.group.given[inner] = value
            self.group.values[inner] = what
        return self.group.names[value]

    def _made(self, inner: str, value: str, what: Placed | None) -> None:
        self.group.made[inner] = value
        self.group.names[value] = inner
        if what is not None:
            self.group.values[inner] = what

    def _node(self, node: Node) -> None:
        self.group.nodes.append(node)
        if self.why:
            self.group.why[node.name] = self.why

    def _added(self, inner: str, value: str, op: str, args: tuple[Arg, ...], what: Placed, end: str) -> str:
        """A node beside the statement's own, which makes a value named after another."""
        name = self.inner(inner, end)
        origin, backward = self.node.origin, self.statement.backward
        self.group.nodes.append(Node(op, args, (), (name,), (what.type,), origin, backward))
        self._made(name, self.of.outer(value, end), what)
        return name

    # -- one slice ---------------------------------------------------------------------------------------

    def _slice(self, way: Way, number: int) -> None:
        """The statement on the parts of its inputs, as its rule says."""
        names: dict[str, str] = {}
        for (inner, value), wanted in zip(self._uses(), way.inputs, strict=True):
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
                self._made(name, self.of.outer(value, f"_s{number}"), None)
                continue
            what = self.of.sliced(value, placed)
            types.append(what.type)
            self._made(name, value if value in self.of.summed else self.of.outer(value, f"_s{number}"), what)
        origin, backward = self.node.origin, self.statement.backward
        self._node(Node(local.op, local.args, local.kwargs, tuple(outs), tuple(types), origin, backward))

    def _local(self, way: Way, number: int) -> Node:
        """The call as it is for a slice: its sizes and offsets."""
        fn = self.of.rules.get(self.node.op)
        if fn is None:
            return self._collective(way)
        ins = tuple(self.of.values[v].type for v in self.statement.uses)
        localizer = fn(self.node, ins).local
        if localizer is None:
            return self.node
        inputs = tuple((p,) for p in way.inputs)
        outputs = tuple(None if p is None else (p,) for p in way.outputs)
        call = LocalCall(self.node, ins, inputs, outputs, MeshShape((_AXIS,), (self.of.slices,)))
        local = localizer(call)
        if local.op not in self.of.rules:
            raise UsageError(
                f"{self.node.op} cannot be divided into slices of the sequence",
                where=self.node.origin.source or self.node.origin.fqn,
                why=f"a slice of it is {local.op}, which cannot be divided over the mesh",
                hint="use a schedule without slices, 1f1b for instance",
            )
        args = tuple(_numbers(a, self.of.slices, number) for a in local.args)
        kwargs = tuple((k, _numbers(v, self.of.slices, number)) for k, v in local.kwargs)
        return Node(local.op, args, kwargs, local.outs, local.types, local.origin, local.backward)

    def _collective(self, way: Way) -> Node:
        """A collective of a slice: it counts other blocks and sizes."""
        node, kind = self.node, self.node.op.split(".")[1]
        (inner,), (source,), (made,) = refs_of(node), self.statement.uses, self.statement.makes
        if kind == "all_reduce":
            return node
        before, after = self.of.sliced(source, way.inputs[0]), self.of.sliced(made, way.inputs[0])
        axis = self.of.mesh.names.index(node.args[1])
        layouts = (before.layout, after.layout)
        return collective_node(
            self.of.mesh, kind, axis, inner, after.type, layouts, made, node.origin, node.backward
        )

    # -- attention ---------------------------------------------------------------------------------------

    def _seen(self, inner: str, value: str, number: int) -> str:
        """Keys or values up to a slice."""
        if value in self.of.again:
            # what backward makes again of a slice comes too late for the slices behind it
            inner, value = self.inner(inner, "_kept"), self.of.again[value]
        if number == 0:
            return self.piece(inner, value, POSITIONS, 0)
        end = f"_to{number}"
        name = self.inner(inner, end)
        if name in self.group.made:
            return name
        parts = [self.piece(inner, value, POSITIONS, k) for k in range(number + 1)]
        args = (tuple(Ref(p) for p in parts), POSITIONS.dim)
        return self._added(inner, value, "aten.cat.default", args, self._up_to(value, number), end)

    def _up_to(self, value: str, number: int) -> Placed:
        """What the slices of a value up to one are."""
        whole, one = self.of.values[value], self.of.sliced(value, POSITIONS)
        shape = list(one.type.shape)
        shape[POSITIONS.dim] *= number + 1
        return Placed(TensorType(tuple(shape), whole.type.dtype), one.layout)

    def _mask(self, inner: str, value: str, number: int) -> str:
        """The part of a mask [..., s, s] for the queries of a slice and the keys up to it."""
        end = f"_to{number}"
        name = self.inner(inner, end)
        if name in self.group.made:
            return name
        dim = len(self.of.values[value].type.shape) - 2
        rows = self.piece(inner, value, Shard(dim), number)
        what = self.of.sliced(value, Shard(dim))
        seen = what.type.shape[-2] * (number + 1)
        made = Placed(TensorType((*what.type.shape[:-1], seen), what.type.dtype), what.layout)
        return self._added(inner, value, "aten.slice.Tensor", (Ref(rows), dim + 1, 0, seen), made, end)

    def _attention(self, number: int) -> None:
        (q, query), (k, key), (v, value), *masks = self._uses()
        args: tuple[Arg, ...] = (
            Ref(self.piece(q, query, POSITIONS, number)),
            Ref(self._seen(k, key, number)),
            Ref(self._seen(v, value, number)),
        )
        mask = tuple(Ref(self._mask(*m, number)) for m in masks)
        if mask:
            self._attend(self.node.op, (*args, *mask, *self.node.args[4:]), number)
        elif number == 0:
            self._attend(self.node.op, (*args, *self.node.args[3:]), number)
        else:
            self._attend("autoshard.sdpa_tail.default", (*args, self.node.args[5]), number)

    def _attend(self, op: str, args: tuple[Arg, ...], number: int) -> None:
        end = f"_s{number}"
        outs = tuple(self.inner(o, end) for o in self.node.outs)
        whats = [self.of.sliced(value, POSITIONS) for value in self.statement.makes]
        for out, value, what in zip(outs, self.statement.makes, whats, strict=True):
            self._made(out, self.of.outer(value, end), what)
        types = tuple(w.type for w in whats)
        self._node(Node(op, args, (), outs, types, self.node.origin, self.statement.backward))

    def _attention_backward(self, number: int) -> None:
        """Gradients of a slice's queries, and what they add to those of the keys and values they see."""
        (g, grad), (q, query), (k, key), (v, value), (o, out), (e, lse), *masks = self._uses()
        args: list[Arg] = [
            Ref(self.piece(g, grad, POSITIONS, number)),
            Ref(self.piece(q, query, POSITIONS, number)),
            Ref(self._seen(k, key, number)),
            Ref(self._seen(v, value, number)),
            Ref(self.piece(o, out, POSITIONS, number)),
            Ref(self.piece(e, lse, POSITIONS, number)),
        ]
        first, *rest = zip(self.node.outs, self.statement.makes, strict=True)
        own = self.inner(first[0], f"_s{number}")
        end = f"_sum{number}" if number == self.of.slices - 1 else f"_by{number}"
        added = [self.inner(inner, end) for inner, _ in rest]
        whats = [self._up_to(value, number) for _, value in rest]
        self._made(own, self.of.outer(first[1], f"_s{number}"), self.of.sliced(first[1], POSITIONS))
        for name, (_, value_), what in zip(added, rest, whats, strict=True):
            self._made(name, self.of.outer(value_, end), what)
        types = (self.of.sliced(first[1], POSITIONS).type, *(w.type for w in whats))
        op, last = ATTENTION_BACKWARD, self.node.args[6:]
        if masks:
            last = (Ref(self._mask(*masks[0], number)), *self.node.args[7:])
        elif number:
            op, last = "autoshard.sdpa_tail_backward.default", (self.node.args[8],)
        origin = self.node.origin
        self._node(Node(op, (*args, *last), (), (own, *added), types, origin, self.statement.backward))
        for name, (inner, value_), what in zip(added, rest, whats, strict=True):
            self._gathered(name, inner, value_, what, number)

    def _gathered(self, name: str, inner: str, value: str, what: Placed, number: int) -> None:
        """The gradients of keys up to a slice, with what later slices have added: its own are complete."""
        size = what.type.shape[POSITIONS.dim] // (number + 1)
        if number < self.of.slices - 1:
            before = self._given(
                self.inner(inner, f"_sum{number + 1}"),
                self.of.outer(value, f"_sum{number + 1}"),
                self._up_to(value, number + 1),
            )
            span = (POSITIONS.dim, 0, size * (number + 1))
            rest = self._added(
                inner, value, "aten.slice.Tensor", (Ref(before), *span), what, f"_before{number}"
            )
            name = self._added(
                inner,
                value,
                "aten.add.Tensor",
                (Ref(rest), Ref(name)),
                what,
                f"_sum{number}" if number else "_s0",
            )
        if number:
            span = (POSITIONS.dim, size * number, size * (number + 1))
            one = self.of.sliced(value, POSITIONS)
            self._added(inner, value, "aten.slice.Tensor", (Ref(name), *span), one, f"_s{number}")


def _numbers(arg: Arg, slices: int, number: int) -> Arg:
    """An argument with what depends on the slice resolved."""
    if isinstance(arg, LocalSize | LocalOffset):
        shards = [(Shard(0, s.outer, s.inner), slices, number) for s in arg.shards]
        offset, size = local_extent(arg.size, shards)
        return size if isinstance(arg, LocalSize) else offset
    if isinstance(arg, tuple):
        return tuple(_numbers(a, slices, number) for a in arg)
    return arg
