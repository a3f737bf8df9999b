"""Cut the program into pipeline stages.

Forward ops go to stages by where they stand: a cut may fall behind any op, also inside a layer. An op of
backward goes where what it needs is: gradients flow down, so it is never above a stage whose gradient it
takes, and below that where the values that forward left are at hand. What only depends on the inputs of
the model (positions, masks) every stage that uses it makes for itself, since every stage has the inputs.

A value keeps its name in every stage; a stage that uses a value it does not make gets it from the one
that does. The gradient of a parameter that several stages use is, in each of them, the sum of what that
stage adds to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from autoshard.errors import UsageError
from autoshard.ir import Call, Joint, Node, Ref
from autoshard.ir.lowered import Instruction, Lowered, Part, Phase, Placed
from autoshard.ir.statements import Statement, Statements, Taker, statements_of
from autoshard.placement import R, local_shape
from autoshard.rules.local import MeshShape
from autoshard.search.plan import Cut

#: collectives that a sum of gradients may pass through term by term
_LINEAR = (
    "comm.all_reduce.default",
    "comm.reduce_scatter.default",
    "comm.all_gather.default",
    "comm.slice.default",
    "comm.all_to_all.default",
)

_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default",
        "_unsafe_view.default",
        "reshape.default",
        "t.default",
        "transpose.int",
        "permute.default",
        "unsqueeze.default",
        "squeeze.dim",
        "alias.default",
        "detach.default",
        "expand.default",
    )
)


def cut_pipeline(lowered: Lowered, joint: Joint, cuts: Sequence[Cut], mesh: MeshShape) -> Lowered:
    """The program with its parts: forward and backward of every stage; without cuts there is one stage.

    Raises UsageError if a cut is not in the model, cuts are out of order, or a buffer that forward updates
    is read in another stage than the one that updates it.
    """
    if not cuts:
        return _joined(
            lowered, [(0, "forward", _half(lowered, False)), (0, "backward", _half(lowered, True))]
        )
    whole = statements_of(lowered)
    stages = _Stages(whole, joint, mesh, len(cuts) + 1)
    stages.assign_forward(_ends(whole, cuts, mesh))
    stages.assign_backward()
    return stages.built()


def _half(lowered: Lowered, backward: bool) -> list[Instruction]:
    return [i for i in lowered.main if i.backward == backward]


def _joined(lowered: Lowered, pieces: Sequence[tuple[int, Phase, list[Instruction]]]) -> Lowered:
    main: list[Instruction] = []
    parts: list[Part] = []
    for stage, phase, items in pieces:
        parts.append(Part(stage, phase, len(main), len(main) + len(items)))
        main += items
    return replace(lowered, main=tuple(main), parts=tuple(parts))


# -- where the cuts fall -------------------------------------------------------------------------------


def _ends(whole: Statements, cuts: Sequence[Cut], mesh: MeshShape) -> list[int]:
    """For each cut, how many of the statements come before it."""
    calls = [k for k, i in enumerate(whole.lowered.main) if isinstance(i, Call) and not i.backward]
    ends: list[int] = []
    for cut in cuts:
        if not 0 <= cut.call < len(calls):
            raise UsageError(
                f"there is no call {cut.call} to cut at",
                why=f"the forward pass has {len(calls)} calls",
                hint="plan again for this model",
            )
        end = _after(whole, calls[cut.call], cut)
        ends.append(_cheapest(whole, end, mesh))
    if any(a >= b for a, b in pairwise(ends)):
        raise UsageError("the pipeline cuts are not in the order of the forward pass", hint="plan again")
    return ends


def _after(whole: Statements, item: int, cut: Cut) -> int:
    """The place behind the op that the cut names, in a call."""
    last = None
    for place, statement in enumerate(whole.all):
        if statement.item == item and (not cut.value or cut.value in statement.node.outs):
            last = place
    if last is None:
        raise UsageError(
            f"{cut} names a value that the call does not make",
            hint="plan again: the cut was made for another program",
        )
    return last + 1


def _cheapest(whole: Statements, end: int, mesh: MeshShape) -> int:
    """A cut may slide over the collectives behind it, to where the fewest bytes cross."""
    best, place = end, end
    least = _crossing(whole, end, mesh)
    while place < len(whole.all) and not whole.all[place].backward:
        if not whole.all[place].node.op.startswith("comm."):
            break
        place += 1
        crossing = _crossing(whole, place, mesh)
        if crossing < least:
            best, least = place, crossing
    return best


def _crossing(whole: Statements, end: int, mesh: MeshShape) -> int:
    """Bytes per rank that a stage that ends here sends on; whole copies travel in parts."""
    made = {v for s in whole.all[:end] for v in s.makes}
    used = {v for s in whole.all[end:] if not s.backward for v in s.uses}
    total = 0
    for value in made & used:
        placed = whole.values[value]
        shape = local_shape(placed.type.shape, placed.layout, mesh.sizes, (0,) * len(mesh.sizes))
        size = placed.type.nbytes // max(1, placed.type.numel)
        for n in shape:
            size *= n
        for p, ways in zip(placed.layout, mesh.sizes, strict=True):
            size = -(-size // ways) if p == R else size
        total += size
    return total


# -- what runs where -----------------------------------------------------------------------------------


@dataclass
class _Stages:
    """Statements being given to stages.

    at: place of a statement -> its stage; None: wherever it is needed. stages_of: value -> the stages that
    have it, for values of forward and for parameters.
    """

    whole: Statements
    joint: Joint
    mesh: MeshShape
    count: int
    at: dict[int, int | None] = field(default_factory=dict)
    stages_of: dict[str, set[int]] = field(default_factory=dict)
    made_in: dict[str, int | None] = field(default_factory=dict)
    position: dict[int, int] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kinds = {p.name: p.kind for p in self.joint.ports}
        #: value that is derived from others for nothing -> those others; parameters from themselves
        self.bases = {p.name: frozenset((p.name,)) for p in self.joint.ports if p.kind == "param"}
        self.users: dict[str, list[int]] = {}
        self.maker: dict[str, int] = {}
        for place, statement in enumerate(self.whole.all):
            for value in dict.fromkeys(statement.uses):
                self.users.setdefault(value, []).append(place)
            self.maker.update(dict.fromkeys(statement.makes, place))

    def _is_free(self, value: str) -> bool:
        """Whether every stage can have the value for itself."""
        if value in self.kinds:
            return self.kinds[value] in ("input", "const", "buffer")
        return self.made_in.get(value, 0) is None

    def assign_forward(self, ends: Sequence[int]) -> None:
        stage = 0
        for place, statement in enumerate(self.whole.all):
            if statement.backward:
                continue
            while stage < len(ends) and place >= ends[stage]:
                stage += 1
            self.position[place] = stage
            if self._derives(place, statement):
                continue
            self._put(place, statement, None if self._all_free(statement) else stage)
            for value in statement.uses:
                for param in self.bases.get(value, ()):
                    self.stages_of.setdefault(param, set()).add(stage)
        for value in list(self.bases):
            self._find_stages(value)
        self._check_buffers()

    def _find_stages(self, value: str) -> None:
        """The stages of what is derived: those that have all it is made from."""
        have = [self.stages_of.get(b, {self.count - 1}) for b in self.bases[value]]
        self.stages_of[value] = set.intersection(*have) or set.union(*have)

    def _derives(self, place: int, statement: Statement) -> bool:
        """Whether an op makes again, for nothing, what a stage has: a view, or something of parameters alone.

        Such an op runs in every stage that uses what it makes, and counts as a use of what it is made from.
        """
        view = statement.node.op in _VIEWS and not self._all_free(statement)
        if view and statement.backward:
            view = statement.uses[0] in self.stages_of or statement.uses[0] in self.bases
        if not view and not (statement.uses and all(v in self.bases for v in statement.uses)):
            return False
        bases = frozenset(b for v in statement.uses for b in self.bases.get(v, (v,)))
        self.bases.update(dict.fromkeys(statement.makes, bases))
        self._put(place, statement, None)
        return True

    def _all_free(self, statement: Statement) -> bool:
        return all(self._is_free(v) and v not in self.bases for v in statement.uses)

    def _put(self, place: int, statement: Statement, stage: int | None) -> None:
        self.at[place] = stage
        self.made_in.update(dict.fromkeys(statement.makes, stage))
        if stage is None or statement.backward:
            return
        for value in (*statement.uses, *statement.makes):
            if value not in self.bases:
                self.stages_of.setdefault(value, set()).add(stage)

    def _check_buffers(self) -> None:
        """What a stage changes, no other stage may read: it would see old values."""
        names = {p.target: p.name for p in self.joint.ports if p.kind == "buffer"}
        for result, value in zip(self.joint.results, self.whole.results, strict=True):
            if result.kind != "buffer":
                continue
            readers = self.stages_of.get(names[result.target], set())
            stage = self._home(value)
            if readers - {stage}:
                raise UsageError(
                    f"buffer {result.target} is updated in pipeline stage {stage} and read in another",
                    why="every stage updates what is its own, and the other would read old values",
                    hint="cut the pipeline elsewhere",
                )

    def _home(self, value: str) -> int:
        """The stage of a result of forward."""
        place = self.maker.get(value)
        if place is None:
            return self.count - 1
        stage = self.at[place]
        return self.position[place] if stage is None else stage

    def assign_backward(self) -> None:
        caps = self._caps()
        tangents = {p.name: p.target for p in self.joint.ports if p.kind == "tangent"}
        ends = {
            r.target: self._home(v)
            for r, v in zip(self.joint.results, self.whole.results, strict=True)
            if r.kind == "output"
        }
        for name, target in tangents.items():
            self.made_in[name] = ends[target]
        for place, statement in enumerate(self.whole.all):
            if not statement.backward:
                continue
            if self._derives(place, statement):
                for value in statement.makes:
                    self._find_stages(value)
                continue
            if self._all_free(statement):
                self._put(place, statement, None)
                continue
            self._put(place, statement, self._lowest(statement, caps.get(place, self.count - 1)))
        self._move_views()

    def _move_views(self) -> None:
        """Reshape a gradient where it is used, so that it is sent once and not in several shapes."""
        for place in range(len(self.whole.all) - 1, -1, -1):
            statement = self.whole.all[place]
            if not statement.backward:
                break
            stage = self.at[place]
            users = [self.at[u] for v in statement.makes for u in self.users.get(v, ())]
            if stage is None or len(statement.uses) != 1 or not users or None in users:
                continue
            highest = max(u for u in users if u is not None)
            if highest < stage and not self.owners.keys() & set(statement.makes):
                self._put(place, statement, highest)

    def _lowest(self, statement: Statement, cap: int) -> int:
        """The highest stage, not above ``cap``, that has or is sent everything a backward op takes."""
        stage = cap
        forward: list[set[int]] = []
        for value in statement.uses:
            made = self.made_in.get(value)
            if value in self.stages_of:
                forward.append(self.stages_of[value])
            elif made is not None:
                stage = min(stage, made)
        moved = True
        while moved:
            moved = False
            for have in forward:
                below = [s for s in have if s <= stage]
                if below and max(below) < stage:
                    stage, moved = max(below), True
        return stage

    def _caps(self) -> dict[int, int]:
        """Place of every op that makes the gradient of a parameter -> the last stage that has that.

        What merely reshapes or reduces a gradient hands this on to the op before.
        """
        names = {p.target: p.name for p in self.joint.ports if p.kind == "param"}
        caps: dict[int, int] = {}
        for result, value in zip(self.joint.results, self.whole.results, strict=True):
            if result.kind != "grad":
                continue
            self.owners[value] = cap = max(self.stages_of.get(names[result.target], {self.count - 1}))
            at: str | None = value
            while at in self.maker and self.whole.all[self.maker[at]].backward:
                place = self.maker[at]
                caps[place] = cap
                uses = self.whole.all[place].uses
                at = uses[0] if len(uses) == 1 and len(self.users[uses[0]]) == 1 else None
        return caps

    # -- gradients of parameters that several stages use -----------------------------------------------

    def _sums(self) -> dict[int, dict[str, _Sum]]:
        """Stage -> result -> how that stage's part of the gradient is made, where several add to it."""
        found: dict[int, dict[str, _Sum]] = {}
        results = set(self.whole.results)
        for result, value in zip(self.joint.results, self.whole.results, strict=True):
            if result.kind != "grad" or value not in self.maker:
                continue
            tail: list[int] = []
            at = value
            while _is_linear(self.whole.all[self.maker[at]].node) and self._only_one(at, value, results):
                tail.append(self.maker[at])
                at = self.whole.all[self.maker[at]].uses[0]
                if at not in self.maker:
                    break
            dropped: list[int] = []
            terms = self._terms(at, value, results, dropped)
            stages = {self._where(term) for term in terms}
            if len(stages) < 2:
                continue
            for stage in stages:
                own = tuple(term for term in terms if self._where(term) == stage)
                found.setdefault(stage, {})[value] = _Sum(own, tuple(reversed(tail)), at)
            for place in (*tail, *dropped):
                self.at[place] = _NOWHERE
        return found

    def _where(self, value: str) -> int:
        stage = self.made_in.get(value)
        return 0 if stage is None else stage

    def _only_one(self, value: str, result: str, results: set[str]) -> bool:
        """Whether a value is used once: as the result itself, or by one op."""
        uses = len(self.users.get(value, ()))
        return uses == 0 if value == result else uses == 1 and value not in results

    def _terms(self, value: str, result: str, results: set[str], dropped: list[int]) -> list[str]:
        place = self.maker.get(value)
        if place is None:
            return [value]
        node = self.whole.all[place].node
        plain = node.op == "aten.add.Tensor" and not node.kwargs and len(self.whole.all[place].uses) == 2
        if not plain or not self._only_one(value, result, results):
            return [value]
        dropped.append(place)
        return [t for part in self.whole.all[place].uses for t in self._terms(part, result, results, dropped)]

    # -- the stages ------------------------------------------------------------------------------------

    def built(self) -> Lowered:
        sums = self._sums()
        taker = Taker(self.whole)
        chosen = [self._chosen(stage, sums.get(stage, {})) for stage in range(self.count)]
        wanted = set(self.whole.results)
        wanted |= {t for parts in sums.values() for s in parts.values() for t in s.terms}
        needs = [{v for s in statements for v in s.uses} for statements in chosen]
        pieces: dict[tuple[int, bool], list[Instruction]] = {}
        for stage, statements in enumerate(chosen):
            elsewhere = wanted.union(*(n for k, n in enumerate(needs) if k != stage))
            items = taker.take(statements, elsewhere)
            for backward in (False, True):
                pieces[stage, backward] = [i for i in items if i.backward == backward]
            extra = self._sum_items(sums.get(stage, {}), taker.values)
            pieces[stage, True] = _renamed(pieces[stage, True], extra.renamed) + extra.items
        order: list[tuple[int, Phase, list[Instruction]]] = []
        order += [(s, "forward", pieces[s, False]) for s in range(self.count)]
        order += [(s, "backward", pieces[s, True]) for s in reversed(range(self.count))]
        values = {**taker.values, **{p.name: self.whole.values[p.name] for p in self.joint.ports}}
        values |= {r: self.whole.values[r] for r in self.whole.results}
        lowered = replace(
            self.whole.lowered, segments=taker.segments, values=values, results=self.whole.results
        )
        return _joined(lowered, order)

    def _chosen(self, stage: int, sums: Mapping[str, _Sum]) -> list[Statement]:
        """The statements of a stage in order, with those that it makes for itself."""
        needed = {t for s in sums.values() for t in s.terms}
        needed |= {v for v in self.whole.results if self._is_here(v, stage)}
        picked: list[Statement] = []
        for place in range(len(self.whole.all) - 1, -1, -1):
            statement, at = self.whole.all[place], self.at[place]
            if at == stage or (at is None and not needed.isdisjoint(statement.makes)):
                picked.append(statement)
                needed.update(statement.uses)
        picked.reverse()
        return picked

    def _is_here(self, value: str, stage: int) -> bool:
        """Whether a result that any stage could make is made in this one."""
        place = self.maker.get(value)
        if place is None or self.at[place] is not None:
            return False
        return self.position.get(place, self.owners.get(value, 0)) == stage

    def _sum_items(self, sums: Mapping[str, _Sum], values: dict[str, Placed]) -> _Items:
        """The additions and collectives that make a stage's own part of shared gradients."""
        items: list[Instruction] = []
        renamed: dict[str, str] = {}
        for result, made in sums.items():
            at = made.terms[0]
            for number, term in enumerate(made.terms[1:]):
                last = number == len(made.terms) - 2
                out = made.name if last else f"{made.name}_sum{number}"
                values[out] = self.whole.values[made.name]
                node = self.whole.all[self.maker[made.name]].node if made.name in self.maker else None
                types = (self.whole.values[made.name].type,)
                origin = node.origin if node is not None else self.whole.all[0].node.origin
                items.append(Node("aten.add.Tensor", (Ref(at), Ref(term)), (), (out,), types, origin, True))
                at = out
            if len(made.terms) == 1 and not made.tail:
                renamed[at] = result
                values[result] = self.whole.values[at]
            for place in made.tail:
                node = self.whole.all[place].node
                outs = self.whole.all[place].makes
                values.update({o: self.whole.values[o] for o in outs})
                items.append(replace(node, args=(Ref(at), *node.args[1:]), outs=outs, backward=True))
                at = outs[0]
        return _Items(items, renamed)


#: the stage of statements that are replaced by what every stage adds
_NOWHERE = -1


@dataclass(frozen=True)
class _Sum:
    """terms: values that a stage adds up. tail: places of the collectives behind. name: of the sum."""

    terms: tuple[str, ...]
    tail: tuple[int, ...]
    name: str


@dataclass(frozen=True)
class _Items:
    items: list[Instruction]
    renamed: dict[str, str]


def _is_linear(node: Node) -> bool:
    return node.op in _LINEAR and node.kwarg("op", "sum") == "sum"


def _renamed(items: list[Instruction], names: Mapping[str, str]) -> list[Instruction]:
    """Outputs under other names."""
    if not names:
        return items
    return [replace(i, outs=tuple(names.get(o, o) for o in i.outs)) for i in items]
