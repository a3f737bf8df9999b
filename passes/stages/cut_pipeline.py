"""Cut the program into pipeline stages.

Where the stages end is in `stage_ends`, which op runs in which of them in `stage_places`; here the program is
put together anew from that. A value keeps its name in every stage; a stage that uses a value it does not make
gets it from the one that does. The gradient of a parameter that several stages use is, in each of them, the
sum of what that stage adds to it (`gradient_sums`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from heapq import heapify, heappop, heappush

from autoshard.ir import Joint
from autoshard.ir.lowered import Instruction, Lowered, StagePart, with_parts
from autoshard.ir.statements import Statement, Taker
from autoshard.passes.stages.gradient_sums import Sum, sum_items, sums_of
from autoshard.passes.stages.stage_assignment import StagePlaces, stage_places
from autoshard.passes.stages.stage_boundaries import stage_ends
from autoshard.passes.stages.unpartitioned import Unpartitioned
from autoshard.rules.local import MeshShape
from autoshard.search.plan.plan import Cut

#: the stage of statements that are replaced by what every stage adds
_NOWHERE = -1


def cut_pipeline(
    lowered: Lowered, joint: Joint, cuts: Sequence[Cut], mesh: MeshShape, uncut: Unpartitioned | None = None
) -> Lowered:
    """The program with its parts: forward and backward of every stage; without cuts there is one stage.

    uncut: of the same program, if it is known.

    Raises UsageError if a cut is not in the model, cuts are out of order, or a buffer that forward updates
    is read in another stage than the one that updates it.
    """
    if not cuts:
        forward, backward = StagePart(0, "forward", 0, 0), StagePart(0, "backward", 0, 0)
        return with_parts(lowered, [(forward, _half(lowered, False)), (backward, _half(lowered, True))])
    uncut = uncut or Unpartitioned.of(lowered)
    places = stage_places(uncut, joint, stage_ends(uncut.whole, cuts, mesh))
    return _Rebuilding(places, joint, len(cuts) + 1).built()


def _half(lowered: Lowered, backward: bool) -> list[Instruction]:
    return [i for i in lowered.main if i.backward == backward]


class _Rebuilding:
    """The program being put together from its stages; count: of them."""

    def __init__(self, places: StagePlaces, joint: Joint, count: int) -> None:
        self.places, self.joint, self.count = places, joint, count
        self.uncut, self.whole = places.uncut, places.uncut.whole
        self.sums = sums_of(places, joint)
        #: place of a statement -> its stage; None: wherever it is needed
        self.at = {**places.at, **dict.fromkeys(self.sums.replaced, _NOWHERE)}

    def built(self) -> Lowered:
        sums = self.sums.of
        taker = Taker(self.whole)
        chosen = [self._chosen(stage, sums.get(stage, {})) for stage in range(self.count)]
        wanted = set(self.whole.results)
        wanted |= {t for parts in sums.values() for s in parts.values() for t in s.terms}
        needs = [{v for s in statements for v in s.uses} for statements in chosen]
        users = Counter(v for need in needs for v in need)
        pieces: dict[tuple[int, bool], list[Instruction]] = {}
        for stage, statements in enumerate(chosen):
            new = {v for s in statements for v in s.makes}
            elsewhere = {v for v in new if v in wanted or users.get(v, 0) > (v in needs[stage])}
            items = taker.take(statements, elsewhere)
            for backward in (False, True):
                pieces[stage, backward] = [i for i in items if i.backward == backward]
            extra = sum_items(self.uncut, sums.get(stage, {}), taker.values)
            pieces[stage, True] = _renamed(pieces[stage, True], extra.renamed) + extra.items
        order = [(StagePart(s, "forward", 0, 0), pieces[s, False]) for s in range(self.count)]
        order += [(StagePart(s, "backward", 0, 0), pieces[s, True]) for s in reversed(range(self.count))]
        values = {**taker.values, **{p.name: self.whole.values[p.name] for p in self.joint.ports}}
        values |= {r: self.whole.values[r] for r in self.whole.results}
        lowered = replace(
            self.whole.lowered, segments=taker.segments, values=values, results=self.whole.results
        )
        return with_parts(lowered, order)

    @cached_property
    def of_stage(self) -> Mapping[int | None, Sequence[int]]:
        """Stage -> the places of its statements, last first; None -> of those that any stage may make."""
        result: dict[int | None, list[int]] = {}
        for place in range(len(self.whole.all) - 1, -1, -1):
            result.setdefault(self.at[place], []).append(place)
        return result

    def _chosen(self, stage: int, sums: Mapping[str, Sum]) -> list[Statement]:
        """The statements of a stage in order, with those that it makes for itself."""
        needed = {t for s in sums.values() for t in s.terms}
        needed |= self.results_of.get(stage, set())
        picked: list[Statement] = []
        # places, last first, as negative numbers; those that any stage may make are added as they are needed
        left = [-p for p in self.of_stage.get(stage, ())]
        left += [-p for p in self._anywhere(needed, len(self.whole.all))]
        heapify(left)
        before = -1
        while left:
            place = -heappop(left)
            if place == before:
                continue
            before = place
            statement, at = self.whole.all[place], self.at[place]
            # what backward recomputes may be used in other stages only, which have it from forward
            optional = at is not None and statement.backward and self.places.makes_again(statement)
            if optional and needed.isdisjoint(statement.makes):
                continue
            if not self.uncut.repeats.keys().isdisjoint(statement.uses):
                uses = tuple([self._at_hand(v, stage) for v in statement.uses])
                statement = statement._replace(uses=uses)
            picked.append(statement)
            for result in self._anywhere(statement.uses, place):
                heappush(left, -result)
            needed.update(statement.uses)
        picked.reverse()
        return picked

    def _anywhere(self, values: Iterable[str], end: int) -> list[int]:
        """The places before ``end`` that make these values and are of no stage."""
        return [p for v in values if (p := self.free.get(v, end)) < end]

    @cached_property
    def free(self) -> Mapping[str, int]:
        """Value that is of no stage -> the place that makes it."""
        return {v: place for v, place in self.uncut.maker.items() if self.at[place] is None}

    def _at_hand(self, value: str, stage: int) -> str:
        """The value, or what forward made of it if another stage makes it again in backward."""
        if value in self.uncut.repeats and self.places.made_in.get(value) not in (None, stage):
            return self.uncut.repeats[value]
        return value

    @cached_property
    def results_of(self) -> Mapping[int, set[str]]:
        """Stage -> the results that any stage could make and this one does."""
        result: dict[int, set[str]] = {}
        for value in self.whole.results:
            place = self.uncut.maker.get(value)
            if place is not None and self.at[place] is None:
                stage = self.places.position.get(place, max(self.places.owners.get(value, (0,))))
                result.setdefault(stage, set()).add(value)
        return result


def _renamed(items: list[Instruction], names: Mapping[str, str]) -> list[Instruction]:
    """Outputs under other names."""
    if not names:
        return items
    return [replace(i, outs=tuple(names.get(o, o) for o in i.outs)) for i in items]
