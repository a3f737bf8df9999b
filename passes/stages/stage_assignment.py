"""Which stage of a pipeline every op runs in.

Forward ops go to stages by where they stand. An op of backward goes where what it needs is: gradients flow
down, so it is never above a stage whose gradient it takes, and below that where the values that forward left
are at hand; but never below every stage of a parameter whose gradient still depends on it. What only depends
on the inputs of the model (positions, masks) every stage that uses it makes for itself, since every stage has
the inputs. What backward recomputes is computed in the stage that made it in forward; other stages take
what they were sent then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.errors import UsageError
from autoshard.ir import Joint
from autoshard.ir.collectives import is_collective
from autoshard.ir.statements import Statement
from autoshard.ir.views import ALIASES, RESHAPES, TRANSPOSES, UNIT_DIMS
from autoshard.passes.stages.gradient_owners import floors_of, makers_of, owners_of
from autoshard.passes.stages.unpartitioned import Unpartitioned

#: kinds of inputs that every stage has
_EVERYWHERE = ("input", "const", "buffer")

#: but for those that drop several dims, which stay where they stand
_VIEWS = (RESHAPES | TRANSPOSES | UNIT_DIMS | ALIASES) - {"aten.squeeze.default", "aten.squeeze.dims"}


@dataclass(frozen=True)
class StagePlaces:
    """Every statement in its stage.

    uncut: the program, with copies of gradients that serve several parameters. at: place of a statement ->
    its stage; None: wherever it is needed. position: place of an op of forward -> the stage that it stands
    in, also if it runs wherever it is needed. made_in: value -> the stage that makes it, None: any. owners:
    gradient of a parameter -> the stages that have the parameter. weight: places of ops that make such
    gradients alone, which a schedule may put off. bases: value -> what it is a view of. uncut_ends: stages
    behind which nothing can be cut, since what makes a gradient of a parameter would be below all stages that
    have the parameter.
    """

    uncut: Unpartitioned
    at: Mapping[int, int | None]
    position: Mapping[int, int]
    made_in: Mapping[str, int | None]
    owners: Mapping[str, frozenset[int]]
    weight: frozenset[int]
    bases: Mapping[str, frozenset[str]]
    uncut_ends: frozenset[int]

    def makes_again(self, statement: Statement) -> bool:
        """Whether backward recomputes what a single stage made in forward."""
        return _makes_again(statement, self.uncut.repeats, self.made_in)


def stage_places(uncut: Unpartitioned, joint: Joint, ends: Sequence[int]) -> StagePlaces:
    """The stage of every statement; ends: how many statements come before the end of each stage but the last.

    Raises UsageError if a buffer that forward updates is read in another stage than the one that updates it,
    or no stage of a parameter has what its gradient is made of.
    """
    deciding = _Deciding(uncut, joint, len(ends) + 1)
    result = deciding.places(ends)
    deciding.check_gradients()
    deciding.check_buffers()
    return result


def places_apart(uncut: Unpartitioned, joint: Joint) -> StagePlaces:
    """Where every statement would run if every op of forward were a stage of its own.

    What the cost of a stage is made of, wherever the cuts will fall; ``at`` then says the place of an op of
    forward.
    """
    count = sum(not s.backward for s in uncut.whole.all)
    return _Deciding(uncut, joint, count).places(range(1, count))


@dataclass
class _Deciding:
    """Statements being given to stages; see `StagePlaces`.

    stages_of: value -> the stages that have it, for values of forward and for parameters. late: statement
    that makes a gradient of a parameter -> the stages between that of the parameter and the highest that has
    all it takes, which is below.
    """

    uncut: Unpartitioned
    joint: Joint
    count: int
    at: dict[int, int | None] = field(default_factory=dict)
    stages_of: dict[str, set[int]] = field(default_factory=dict)
    made_in: dict[str, int | None] = field(default_factory=dict)
    position: dict[int, int] = field(default_factory=dict)
    owners: Mapping[str, frozenset[int]] = field(default_factory=dict)
    late: dict[int, range] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kinds = {p.name: p.kind for p in self.joint.ports}
        #: value that is derived from others for nothing -> those others; parameters from themselves
        self.bases = {p.name: frozenset((p.name,)) for p in self.joint.ports if p.kind == "param"}
        #: parameters, and what is derived from parameters alone
        self.of_parameters = set(self.bases)
        self._know(self.uncut)

    def _know(self, uncut: Unpartitioned) -> None:
        self.uncut = uncut
        self.whole, self.repeats = uncut.whole, uncut.repeats
        self.users, self.maker = uncut.users, uncut.maker

    def places(self, ends: Sequence[int]) -> StagePlaces:
        """The stage of everything; ends: see `stage_places`."""
        self._assign_forward(ends)
        weight = self._assign_backward()
        uncut_ends = frozenset(end for between in self.late.values() for end in between)
        return StagePlaces(
            self.uncut, self.at, self.position, self.made_in, self.owners, weight, self.bases, uncut_ends
        )

    def _assign_forward(self, ends: Sequence[int]) -> None:
        stage = 0
        updates = self._buffer_updates()
        for place, statement in enumerate(self.whole.all):
            if statement.backward:
                continue
            while stage < len(ends) and place >= ends[stage]:
                stage += 1
            self.position[place] = stage
            if place in updates and (new := self.made_in.get(statement.uses[0])) is not None:
                # behind all layers, but a buffer is updated where its new value is made
                self.position[place] = new
                self._put(place, statement, new)
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
        results: set[int] = set()
        while left:
            value = left.pop()
            place = self.maker.get(value)
            if place is None or not is_collective(self.whole.all[place].node):
                continue
            if results.issuperset(self.users.get(value, ())):
                results.add(place)
                left.append(self.whole.all[place].uses[0])
        return results

    def _find_stages(self, value: str) -> None:
        """The stages of what is derived: those that have all it is made from."""
        have = [self.stages_of.get(b, {self.count - 1}) for b in self.bases[value]]
        self.stages_of[value] = set.intersection(*have) or set.union(*have)

    def _derives(self, place: int, statement: Statement) -> bool:
        """Whether an op recomputes, for nothing, what a stage has: a view, or something of parameters alone.

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

    def _assign_backward(self) -> frozenset[int]:
        """The places of ops that make gradients of parameters and nothing else; see `StagePlaces.weight`."""
        owned = owners_of(self.uncut, self.joint, self.stages_of)
        self.owners = owned.owners
        self._know(owned.uncut)
        floors, makers = floors_of(owned), makers_of(owned)
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
            elif _makes_again(statement, self.repeats, self.made_in):
                self._put(place, statement, self.made_in[self.repeats[statement.makes[0]]])
                for value in statement.makes:
                    self.stages_of[value] = self.stages_of[self.repeats[value]]
            else:
                self._put(place, statement, self._backward_stage(place, floors[place], makers.get(place)))
        self._move_views()
        return self._alone(makers)

    def _alone(self, makers: Iterable[int]) -> frozenset[int]:
        """Those of these places on which nothing else waits."""
        alone: set[int] = set()
        for place in sorted(makers, reverse=True):
            if all(u in alone for v in self.whole.all[place].makes for u in self.users.get(v, ())):
                alone.add(place)
        return frozenset(alone)

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
            if _makes_again(statement, self.repeats, self.made_in):
                continue
            highest = max(u for u in users if u is not None)
            if highest < stage and self.owners.keys().isdisjoint(statement.makes):
                self._put(place, statement, highest)

    def _backward_stage(self, place: int, floor: int, owners: frozenset[int] | None) -> int:
        """The highest stage that has or is sent everything a backward op takes.

        Gradients are only sent down. What forward left is better at hand, but can be sent up from a stage
        below, too: no op goes below its floor for that. owners: the stages to choose from, None for all. If
        all of them are above, that is noted in ``late``.
        """
        statement = self.whole.all[place]
        new = [self.made_in.get(v) for v in statement.uses if v not in self.stages_of]
        stage = min((m for m in new if m is not None), default=self.count - 1)
        forward = [self.stages_of[v] for v in statement.uses if v in self.stages_of]
        if owners is not None:
            open_ = [s for s in owners if s <= stage]
            if not open_:
                self.late[place] = range(stage, min(owners))
                return stage
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

    def check_gradients(self) -> None:
        """What makes a gradient of a parameter has to be in a stage of the parameter."""
        if self.late:
            raise UsageError(
                "a gradient of a parameter cannot be made in any stage that has the parameter",
                where=self.whole.all[min(self.late)].node.origin.source,
                why="what it is made of is only at hand below all of them",
                hint="recompute all layers that share parameters or none, or choose other cuts",
            )

    # -- buffers that forward updates --------------------------------------------------------------------

    def check_buffers(self) -> None:
        """What a stage changes, no other stage may read: it would see old values."""
        if not any(r.kind == "buffer" for r in self.joint.results):
            return
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
                    hint="a mesh without pp; or call the module once, with its inputs joined by torch.cat",
                )

    def _readers(self, buffers: Iterable[str]) -> dict[str, set[int]]:
        """Buffer -> the stages that use it, also through what every stage makes of it for itself."""
        made_of = {name: frozenset((name,)) for name in buffers}
        result: dict[str, set[int]] = {name: set() for name in made_of}
        for place, statement in enumerate(self.whole.all):
            read = frozenset(b for v in statement.uses for b in made_of.get(v, ()))
            stage = self.at[place]
            if stage is None:
                made_of.update(dict.fromkeys(statement.makes, read))
                continue
            for name in read:
                result[name].add(stage)
        return result

    def _home(self, value: str) -> int:
        """The stage of a result of forward."""
        place = self.maker.get(value)
        if place is None:
            return self.count - 1
        stage = self.at[place]
        return self.position[place] if stage is None else stage


def _makes_again(statement: Statement, repeats: Mapping[str, str], made_in: Mapping[str, int | None]) -> bool:
    """See `StagePlaces.makes_again`."""
    original = repeats.get(statement.makes[0])
    return original is not None and made_in.get(original) is not None
