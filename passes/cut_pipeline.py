"""Cut the program into pipeline stages.

Forward ops go to stages by where they stand: a cut may fall behind any op, also inside a layer. An op of
backward goes where what it needs is: gradients flow down, so it is never above a stage whose gradient it
takes, and below that where the values that forward left are at hand; but never below every stage of a
parameter whose gradient still depends on it. What only depends on the inputs of the model (positions,
masks) every stage that uses it makes for itself, since every stage has the inputs. What backward computes
again is computed in the stage that made it in forward; other stages take what they were sent then.

A value keeps its name in every stage; a stage that uses a value it does not make gets it from the one
that does. The gradient of a parameter that several stages use is, in each of them, the sum of what that
stage adds to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise

from autoshard.errors import UsageError
from autoshard.ir import Call, Joint, Node, Origin, Ref
from autoshard.ir.lowered import Instruction, Lowered, Part, Placed, with_parts
from autoshard.ir.statements import Statement, Statements, Taker, repeats_of, statements_of
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

#: kinds of inputs that every stage has
_EVERYWHERE = ("input", "const", "buffer")

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


@dataclass(frozen=True)
class Uncut:
    """A placed program statement by statement, with what holds wherever it is cut.

    repeats: see `ir.statements.repeats_of`. users: value -> places of the statements that use it. maker:
    value -> place of the one that makes it.
    """

    whole: Statements
    repeats: Mapping[str, str]
    users: Mapping[str, Sequence[int]]
    maker: Mapping[str, int]

    @staticmethod
    def of(lowered: Lowered) -> Uncut:
        """Of a program that `pipeline.place` made."""
        whole = statements_of(lowered)
        return Uncut(whole, repeats_of(whole), *_index(whole))


def _index(whole: Statements) -> tuple[dict[str, list[int]], dict[str, int]]:
    """The users and the maker of every value; see `Uncut`."""
    users: dict[str, list[int]] = {}
    maker: dict[str, int] = {}
    for place, statement in enumerate(whole.all):
        for value in statement.uses:
            known = users.get(value)
            if known is None:
                users[value] = [place]
            elif known[-1] != place:
                known.append(place)
        for value in statement.makes:
            maker[value] = place
    return users, maker


def cut_pipeline(
    lowered: Lowered, joint: Joint, cuts: Sequence[Cut], mesh: MeshShape, uncut: Uncut | None = None
) -> Lowered:
    """The program with its parts: forward and backward of every stage; without cuts there is one stage.

    uncut: of the same program, if it is known.

    Raises UsageError if a cut is not in the model, cuts are out of order, or a buffer that forward updates
    is read in another stage than the one that updates it.
    """
    if not cuts:
        forward, backward = Part(0, "forward", 0, 0), Part(0, "backward", 0, 0)
        return with_parts(lowered, [(forward, _half(lowered, False)), (backward, _half(lowered, True))])
    uncut = uncut or Uncut.of(lowered)
    stages = _Stages(uncut, joint, mesh, len(cuts) + 1)
    stages.assign_forward(_ends(uncut.whole, cuts, mesh))
    stages.assign_backward()
    stages.check_buffers()
    return stages.built()


@dataclass(frozen=True)
class Homes:
    """Where every statement would run if every op of forward were a stage of its own.

    whole: the statements, copies of gradients among them that serve several parameters. slot: place of a
    statement -> that of an op of forward; None: wherever it is needed. weight: places of ops that make
    gradients of parameters. bases: value -> what it is a view of.
    """

    whole: Statements
    slot: dict[int, int | None]
    weight: frozenset[int]
    bases: Mapping[str, frozenset[str]]


def homes_of(uncut: Uncut, joint: Joint, mesh: MeshShape) -> Homes:
    """The finest cut of a program: what the cost of a stage is made of, wherever the cuts will fall."""
    count = sum(not s.backward for s in uncut.whole.all)
    stages = _Stages(uncut, joint, mesh, count)
    stages.assign_forward(range(1, count))
    stages.assign_backward()
    return Homes(stages.whole, stages.at, frozenset(stages._owned()), stages.bases)


def _half(lowered: Lowered, backward: bool) -> list[Instruction]:
    return [i for i in lowered.main if i.backward == backward]


# -- where the cuts fall -------------------------------------------------------------------------------


def _ends(whole: Statements, cuts: Sequence[Cut], mesh: MeshShape) -> list[int]:
    """For each cut, how many of the statements come before it."""
    calls = [k for k, i in enumerate(whole.lowered.main) if isinstance(i, Call) and not i.backward]
    ends: list[int] = []
    places = _places(whole)
    crossing = _crossing(whole, mesh)
    for cut in cuts:
        if not 0 <= cut.call < len(calls):
            raise UsageError(
                f"there is no call {cut.call} to cut at",
                why=f"the forward pass has {len(calls)} calls",
                hint="plan again for this model",
            )
        end = _after(whole, places.get(calls[cut.call], range(0)), cut)
        ends.append(_cheapest(whole, end, crossing))
    if any(a >= b for a, b in pairwise(ends)):
        raise UsageError("the pipeline cuts are not in the order of the forward pass", hint="plan again")
    return ends


def _places(whole: Statements) -> dict[int, range]:
    """Number of an instruction of main -> the places of its statements, which stand together."""
    found: dict[int, range] = {}
    for place, statement in enumerate(whole.all):
        start = found[statement.item].start if statement.item in found else place
        found[statement.item] = range(start, place + 1)
    return found


def _after(whole: Statements, places: range, cut: Cut) -> int:
    """The place behind the op that the cut names, in a call of these places."""
    named = [p for p in places if not cut.value or cut.value in whole.all[p].node.outs]
    if not named:
        raise UsageError(
            f"{cut} names a value that the call does not make",
            hint="plan again: the cut was made for another program",
        )
    return named[-1] + 1


def _cheapest(whole: Statements, end: int, crossing: Sequence[int]) -> int:
    """A cut may slide over the collectives behind it, to where the fewest bytes cross."""
    best = place = end
    while place < len(whole.all) and not whole.all[place].backward:
        if not whole.all[place].node.op.startswith("comm."):
            break
        place += 1
        if crossing[place] < crossing[best]:
            best = place
    return best


def _crossing(whole: Statements, mesh: MeshShape) -> list[int]:
    """Bytes per rank that a stage that ends before a place sends on; whole copies travel in parts."""
    made: dict[str, int] = {}
    last: dict[str, int] = {}
    for place, statement in enumerate(whole.all):
        if not statement.backward:
            last.update(dict.fromkeys((v for v in statement.uses if v in made), place))
            made.update(dict.fromkeys(statement.makes, place))
    steps = [0] * (len(whole.all) + 2)
    sizes: dict[Placed, int] = {}
    for value, end in last.items():
        placed = whole.values[value]
        if placed not in sizes:
            sizes[placed] = _sent(placed, mesh)
        size = sizes[placed]
        steps[made[value] + 1] += size
        steps[end + 1] -= size
    return list(accumulate(steps))


def _sent(placed: Placed, mesh: MeshShape) -> int:
    """Bytes of a value that a rank sends."""
    size = placed.type.nbytes // max(1, placed.type.numel)
    for n in local_shape(placed.type.shape, placed.layout, mesh.sizes, (0,) * len(mesh.sizes)):
        size *= n
    for p, ways in zip(placed.layout, mesh.sizes, strict=True):
        size = -(-size // ways) if p == R else size
    return size


# -- what runs where -----------------------------------------------------------------------------------


@dataclass
class _Stages:
    """Statements being given to stages.

    at: place of a statement -> its stage; None: wherever it is needed. stages_of: value -> the stages that
    have it, for values of forward and for parameters.
    """

    uncut: Uncut
    joint: Joint
    mesh: MeshShape
    count: int
    at: dict[int, int | None] = field(default_factory=dict)
    stages_of: dict[str, set[int]] = field(default_factory=dict)
    made_in: dict[str, int | None] = field(default_factory=dict)
    position: dict[int, int] = field(default_factory=dict)
    #: gradient of a parameter -> the stages that have the parameter
    owners: dict[str, frozenset[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kinds = {p.name: p.kind for p in self.joint.ports}
        #: value that is derived from others for nothing -> those others; parameters from themselves
        self.bases = {p.name: frozenset((p.name,)) for p in self.joint.ports if p.kind == "param"}
        #: parameters, and what is derived from parameters alone
        self.of_parameters = set(self.bases)
        self.whole, self.repeats = self.uncut.whole, self.uncut.repeats
        self.users, self.maker = self.uncut.users, self.uncut.maker

    def assign_forward(self, ends: Sequence[int]) -> None:
        stage = 0
        updates = self._buffer_updates()
        for place, statement in enumerate(self.whole.all):
            if statement.backward:
                continue
            while stage < len(ends) and place >= ends[stage]:
                stage += 1
            self.position[place] = stage
            if place in updates and (made := self.made_in.get(statement.uses[0])) is not None:
                # behind all layers, but a buffer is updated where its new value is made
                self.position[place] = made
                self._put(place, statement, made)
                continue
            if self._derives(place, statement):
                continue
            self._put(place, statement, None if self._all_free(statement) else stage)
            for value in statement.uses:
                for param in self.bases.get(value, ()):
                    self.stages_of.setdefault(param, set()).add(stage)
        for value in list(self.bases):
            self._find_stages(value)

    def _buffer_updates(self) -> set[int]:
        """Places of collectives that only bring the new value of a buffer into the layout of the buffer."""
        ends = zip(self.joint.results, self.whole.results, strict=True)
        left = [value for result, value in ends if result.kind == "buffer"]
        found: set[int] = set()
        while left:
            value = left.pop()
            place = self.maker.get(value)
            if place is None or not self.whole.all[place].node.op.startswith("comm."):
                continue
            if found.issuperset(self.users.get(value, ())):
                found.add(place)
                left.append(self.whole.all[place].uses[0])
        return found

    def _find_stages(self, value: str) -> None:
        """The stages of what is derived: those that have all it is made from."""
        have = [self.stages_of.get(b, {self.count - 1}) for b in self.bases[value]]
        self.stages_of[value] = set.intersection(*have) or set.union(*have)

    def _derives(self, place: int, statement: Statement) -> bool:
        """Whether an op makes again, for nothing, what a stage has: a view, or something of parameters alone.

        Such an op runs in every stage that uses what it makes, and counts as a use of what it is made from.
        """
        uses = statement.uses
        view = statement.node.op in _VIEWS and not self._all_free(statement)
        if view and statement.backward:
            view = uses[0] in self.stages_of or uses[0] in self.bases
        of_parameters = bool(uses) and self.of_parameters.issuperset(uses)
        if not view and not of_parameters:
            return False
        bases = frozenset(b for v in uses for b in self.bases.get(v, (v,)))
        self.bases.update(dict.fromkeys(statement.makes, bases))
        if of_parameters:
            self.of_parameters.update(statement.makes)
        self._put(place, statement, None)
        return True

    def _all_free(self, statement: Statement) -> bool:
        """Whether every stage can have all that an op takes for itself, without a parameter."""
        for value in statement.uses:
            if value in self.bases:
                return False
            kind = self.kinds.get(value)
            if kind is None:
                if self.made_in.get(value, 0) is not None:
                    return False
            elif kind not in _EVERYWHERE:
                return False
        return True

    def _put(self, place: int, statement: Statement, stage: int | None) -> None:
        self.at[place] = stage
        for value in statement.makes:
            self.made_in[value] = stage
        if stage is None or statement.backward:
            return
        for value in (*statement.uses, *statement.makes):
            if value not in self.bases:
                have = self.stages_of.get(value)
                if have is None:
                    self.stages_of[value] = {stage}
                else:
                    have.add(stage)

    def check_buffers(self) -> None:
        """What a stage changes, no other stage may read: it would see old values."""
        names = {p.target: p.name for p in self.joint.ports if p.kind == "buffer"}
        readers = self._readers(names.values())
        for result, value in zip(self.joint.results, self.whole.results, strict=True):
            if result.kind != "buffer":
                continue
            stage = self._home(value)
            if readers[names[result.target]] - {stage}:
                raise UsageError(
                    f"buffer {result.target} is updated in pipeline stage {stage} and read in another",
                    why="every stage updates what is its own, and the other would read old values",
                    hint="cut the pipeline elsewhere",
                )

    def _readers(self, buffers: Iterable[str]) -> dict[str, set[int]]:
        """Buffer -> the stages that use it, also through what every stage makes of it for itself."""
        made_of = {name: frozenset((name,)) for name in buffers}
        found: dict[str, set[int]] = {name: set() for name in made_of}
        for place, statement in enumerate(self.whole.all):
            read = frozenset(b for v in statement.uses for b in made_of.get(v, ()))
            stage = self.at[place]
            if stage is None:
                made_of.update(dict.fromkeys(statement.makes, read))
                continue
            for name in read:
                found[name].add(stage)
        return found

    def _home(self, value: str) -> int:
        """The stage of a result of forward."""
        place = self.maker.get(value)
        if place is None:
            return self.count - 1
        stage = self.at[place]
        return self.position[place] if stage is None else stage

    def assign_backward(self) -> None:
        self._find_owners()
        floors, owned = self._floors(), self._owned()
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
            elif self._repeats(statement):
                self._put(place, statement, self.made_in[self.repeats[statement.makes[0]]])
                for value in statement.makes:
                    self.stages_of[value] = self.stages_of[self.repeats[value]]
            else:
                self._put(place, statement, self._lowest(statement, floors[place], owned.get(place)))
        self._move_views()

    def _repeats(self, statement: Statement) -> bool:
        """Whether backward makes again what a single stage made in forward."""
        original = self.repeats.get(statement.makes[0])
        return original is not None and self.made_in.get(original) is not None

    def _move_views(self) -> None:
        """Reshape a gradient where it is used, so that it is sent once and not in several shapes."""
        for place in range(len(self.whole.all) - 1, -1, -1):
            statement = self.whole.all[place]
            if not statement.backward:
                break
            stage = self.at[place]
            if stage is None or len(statement.uses) != 1:
                continue
            users = [self.at[u] for v in statement.makes for u in self.users.get(v, ())]
            if not users or None in users:
                continue
            if self._repeats(statement):
                continue
            highest = max(u for u in users if u is not None)
            if highest < stage and not self.owners.keys() & set(statement.makes):
                self._put(place, statement, highest)

    def _lowest(self, statement: Statement, floor: int, owners: frozenset[int] | None) -> int:
        """The highest stage that has or is sent everything a backward op takes.

        Gradients are only sent down. What forward left is better at hand, but can be sent up from a stage
        below, too: no op goes below its floor for that. owners: the stages to choose from, None for all.
        """
        made = [self.made_in.get(v) for v in statement.uses if v not in self.stages_of]
        stage = min((m for m in made if m is not None), default=self.count - 1)
        forward = [self.stages_of[v] for v in statement.uses if v in self.stages_of]
        if owners is not None:
            open_ = [s for s in owners if s <= stage]
            near = [s for s in open_ if all(s in have for have in forward)]
            return max(near or open_)
        moved = True
        while moved:
            moved = False
            for have in forward:
                below = [s for s in have if floor <= s <= stage]
                if below and max(below) < stage:
                    stage, moved = max(below), True
        return stage

    def _gradients(self) -> list[tuple[int, str, frozenset[int]]]:
        """(place among the results, value, stages of the parameter) of every gradient of a parameter."""
        names = {p.target: p.name for p in self.joint.ports if p.kind == "param"}
        return [
            # a parameter that nothing uses is in the first stage
            (k, value, frozenset(self.stages_of.get(names[result.target], ())) or frozenset((0,)))
            for k, (result, value) in enumerate(zip(self.joint.results, self.whole.results, strict=True))
            if result.kind == "grad"
        ]

    def _find_owners(self) -> None:
        """Which stages want each gradient; one that serves something else as well is copied for its owner."""
        gradients = self._gradients()
        wanted: dict[str, set[frozenset[int]]] = {}
        for _, value, stages in gradients:
            wanted.setdefault(value, set()).add(stages)
        main, results, values = list(self.whole.lowered.main), list(self.whole.results), self.whole.values
        added: list[Statement] = []
        copied: dict[str, Placed] = {}
        taken: set[str] = set()
        for k, value, stages in gradients:
            again = value in taken
            taken.add(value)
            if value in self.users or len(wanted[value]) > 1 or again:
                name, type_ = f"{value}_own{k}", values[value].type
                node = Node(
                    "aten.clone.default", (Ref(value),), (), (name,), (type_,), self._origin(value), True
                )
                added.append(Statement(len(main), -1, node, (value,), (name,), True))
                main.append(node)
                copied[name] = values[value]
                results[k] = value = name
            self.owners[value] = stages
        if added:
            lowered = self.whole.lowered
            self.whole = replace(
                self.whole,
                lowered=replace(lowered, main=tuple(main), values={**lowered.values, **copied}),
                all=(*self.whole.all, *added),
                results=tuple(results),
                values={**values, **copied},
            )
            self.users, self.maker = _index(self.whole)

    def _origin(self, value: str) -> Origin:
        return self.whole.all[self.maker[value]].node.origin if value in self.maker else Origin()

    def _floors(self) -> list[int]:
        """Per place, the lowest stage an op of backward may be in: below it, a gradient would miss its
        parameter."""
        floors = [0] * len(self.whole.all)
        for place in range(len(self.whole.all) - 1, -1, -1):
            statement = self.whole.all[place]
            if not statement.backward:
                continue
            lowest = 0
            for value in statement.makes:
                if value in self.owners:
                    lowest = max(lowest, min(self.owners[value]))
                for user in self.users.get(value, ()):
                    if floors[user] > lowest:
                        lowest = floors[user]
            floors[place] = lowest
        return floors

    def _owned(self) -> dict[int, frozenset[int]]:
        """Place of every op that makes the gradient of a parameter, or a term of it -> the stages to be in.

        What merely reshapes, reduces or adds up gradients hands this on to the ops before.
        """
        found: dict[int, frozenset[int]] = {}
        for value, stages in self.owners.items():
            left = [value]
            while left:
                place = self.maker.get(left.pop(), -1)
                if place < 0 or not self.whole.all[place].backward:
                    continue
                found[place] = stages
                uses = self.whole.all[place].uses
                if len(uses) != 1 and self.whole.all[place].node.op != "aten.add.Tensor":
                    continue
                if all(len(self.users[u]) == 1 for u in uses):
                    left += uses
        return found

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
            home = min(self.owners[value])
            stages = {self._where(term, home) for term in terms}
            if len(stages) < 2:
                continue
            for stage in stages:
                own = tuple(term for term in terms if self._where(term, home) == stage)
                found.setdefault(stage, {})[value] = _Sum(own, tuple(reversed(tail)), at)
            for place in (*tail, *dropped):
                self.at[place] = _NOWHERE
        return found

    def _where(self, value: str, home: int) -> int:
        """The stage of a term; home: of one that any stage could make."""
        stage = self.made_in.get(value)
        return home if stage is None else stage

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
        users = Counter(v for need in needs for v in need)
        pieces: dict[tuple[int, bool], list[Instruction]] = {}
        for stage, statements in enumerate(chosen):
            made = {v for s in statements for v in s.makes}
            elsewhere = {v for v in made if v in wanted or users.get(v, 0) > (v in needs[stage])}
            items = taker.take(statements, elsewhere)
            for backward in (False, True):
                pieces[stage, backward] = [i for i in items if i.backward == backward]
            extra = self._sum_items(sums.get(stage, {}), taker.values)
            pieces[stage, True] = _renamed(pieces[stage, True], extra.renamed) + extra.items
        order = [(Part(s, "forward", 0, 0), pieces[s, False]) for s in range(self.count)]
        order += [(Part(s, "backward", 0, 0), pieces[s, True]) for s in reversed(range(self.count))]
        values = {**taker.values, **{p.name: self.whole.values[p.name] for p in self.joint.ports}}
        values |= {r: self.whole.values[r] for r in self.whole.results}
        lowered = replace(
            self.whole.lowered, segments=taker.segments, values=values, results=self.whole.results
        )
        return with_parts(lowered, order)

    @cached_property
    def places(self) -> Mapping[int | None, Sequence[int]]:
        """Stage -> the places of its statements, last first; None -> of those that any stage may make."""
        found: dict[int | None, list[int]] = {}
        for place in range(len(self.whole.all) - 1, -1, -1):
            found.setdefault(self.at[place], []).append(place)
        return found

    def _chosen(self, stage: int, sums: Mapping[str, _Sum]) -> list[Statement]:
        """The statements of a stage in order, with those that it makes for itself."""
        needed = {t for s in sums.values() for t in s.terms}
        needed |= {v for v in self.whole.results if self._is_here(v, stage)}
        picked: list[Statement] = []
        # places, last first, as negative numbers; those that any stage may make are added as they are needed
        left = [-p for p in self.places.get(stage, ())]
        left += [-p for p in self._anywhere(needed, len(self.whole.all))]
        heapify(left)
        before = -1
        while left:
            place = -heappop(left)
            if place == before:
                continue
            before = place
            statement, at = self.whole.all[place], self.at[place]
            # what backward makes again may be used in other stages only, which have it from forward
            optional = at is not None and statement.backward and self._repeats(statement)
            if optional and needed.isdisjoint(statement.makes):
                continue
            if self.repeats:
                uses = tuple([self._at_hand(v, stage) for v in statement.uses])
                statement = statement._replace(uses=uses)
            picked.append(statement)
            for found in self._anywhere(statement.uses, place):
                heappush(left, -found)
            needed.update(statement.uses)
        picked.reverse()
        return picked

    def _anywhere(self, values: Iterable[str], end: int) -> list[int]:
        """The places before ``end`` that make these values and are of no stage."""
        places = [self.maker.get(v, end) for v in values]
        return [p for p in places if p < end and self.at[p] is None]

    def _at_hand(self, value: str, stage: int) -> str:
        """The value, or what forward made of it if another stage makes it again in backward."""
        if value in self.repeats and self.made_in.get(value) not in (None, stage):
            return self.repeats[value]
        return value

    def _is_here(self, value: str, stage: int) -> bool:
        """Whether a result that any stage could make is made in this one."""
        place = self.maker.get(value)
        if place is None or self.at[place] is not None:
            return False
        return self.position.get(place, max(self.owners.get(value, (0,)))) == stage

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
