"""The ops of forward in order, what each costs as a part of a pipeline stage, and stages made of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from autoshard.cost.collective import AxisLink, seconds
from autoshard.ir.slices import Slices
from autoshard.passes.stages.truncate_layers import Gap
from autoshard.schedules.schedule import Schedule
from autoshard.schedules.timeline import StageCosts, least_makespan, makespan, peak_bytes
from autoshard.search.plan.plan import Cut, Pipeline
from autoshard.search.solve.stage_cuts import CutRequest, Line, best_cuts, places_of
from autoshard.simulate.slices import in_slices, of_equal_work

#: (slots, bytes) of parameters that several slots use
Shared: TypeAlias = tuple[tuple[tuple[int, ...], float], ...]
#: by more than this share a simulated step never differs from another for rounding alone
_ROUNDING = 1e-9


class Slot(NamedTuple):
    """One op of forward.

    call: number of its call among those of forward, -1 for an op between calls. label: of the layer that the
    call stands for. value: what the op makes, "" between calls. last: whether it ends its call. open: whether
    a cut may be behind it.
    """

    call: int
    label: str
    value: str
    last: bool
    open: bool


@dataclass(frozen=True, eq=False)
class SlotCosts:
    """Per slot, all arrays as long as there are slots.

    forward, input, weight: seconds of a microbatch, backward in two halves. held: bytes of a microbatch that
    are kept from forward on; held_weight: those of them that gradients of parameters need; made: what
    backward makes for those. state, update: bytes of parameters, gathered copies, summed gradients and
    optimizer, and those that the optimizer moves, in seconds. seen, seen_back: the part of forward and
    backward that is attention. steps: by how many seconds a send behind this slot takes longer than one
    behind the slot before.
    """

    forward: np.ndarray
    input: np.ndarray
    weight: np.ndarray
    held: np.ndarray
    held_weight: np.ndarray
    made: np.ndarray
    state: np.ndarray
    update: np.ndarray
    seen: np.ndarray
    seen_back: np.ndarray
    steps: np.ndarray

    @property
    def send(self) -> np.ndarray:
        """Seconds for what crosses behind every slot, there and (its gradient) back."""
        return 2 * np.cumsum(self.steps)

    def slower(self, factor: float) -> SlotCosts:
        """With all ops taking so many times as long."""
        timed = ("forward", "input", "weight", "seen", "seen_back")
        return replace(self, **{k: factor * getattr(self, k) for k in timed})

    def filled(self, source: slice, at: int, times: int) -> SlotCosts:
        """With some slots once more, so many times, before a place."""
        rows = {f.name: getattr(self, f.name) for f in fields(self)}
        return SlotCosts(
            **{k: np.concatenate((x[:at], np.tile(x[source], times), x[at:])) for k, x in rows.items()}
        )

    def equals(self, other: SlotCosts) -> bool:
        """Whether all is the same."""
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    def alike(self, one: slice, other: slice) -> bool:
        """Whether some slots cost what others do."""
        return all(
            np.array_equal(getattr(self, f.name)[one], getattr(self, f.name)[other]) for f in fields(self)
        )


@dataclass(frozen=True, eq=False)
class Slots:
    """See above. link: between stages, the slowest. slices: of the sequence of a microbatch. units: equal
    parts of it that they are made of.

    kinds: the costs on unlike pipeline ranks, those of a send as on the link behind the rank; of: the kind of
    every rank, () if all are as ``costs_of`` says: the costs on what no rank is slower than. shared:
    parameters that several slots use, whose gradients unlike ranks may have to add up over a slow link.
    stages: those that have the parameters of a slot already, None for any; () if none are fixed.
    """

    all: tuple[Slot, ...]
    costs_of: SlotCosts
    link: AxisLink
    slices: int
    kinds: tuple[SlotCosts, ...] = ()
    of: tuple[int, ...] = ()
    shared: Shared = ()
    stages: tuple[frozenset[int] | None, ...] = ()
    units: int = 1

    @cached_property
    def sliced(self) -> Slices:
        """The slices, with as much work in each as can be."""
        if self.slices == 1 or self.units == self.slices:
            return Slices.equal(self.slices)
        own = self.costs_of
        seconds = float((own.forward + own.input + own.weight).sum())
        attention = float((own.seen + own.seen_back).sum()) / seconds if seconds else 0.0
        return of_equal_work(self.slices, self.units, attention)

    def equals(self, other: Slots) -> bool:
        """Whether all slots are the same and cost the same."""
        return (self.all, self.shared) == (other.all, other.shared) and all(
            a.equals(b) for a, b in zip(self._costs, other._costs, strict=True)
        )

    @property
    def _costs(self) -> tuple[SlotCosts, ...]:
        return (self.costs_of, *self.kinds)

    def on(self, rank: int) -> SlotCosts:
        """The costs on a pipeline rank."""
        return self.kinds[self.of[rank]] if self.of else self.costs_of

    def between(self, one: int, other: int) -> SlotCosts:
        """The costs of the pipeline rank behind which is the link between two neighbours."""
        around = abs(one - other) > 1
        return self.on(max(one, other) if around else min(one, other))

    def filled(self, gap: Gap) -> Slots | None:
        """With the layers that were left out; None if those at the gap do not look as these would."""
        first: dict[str, int] = {}
        for k, slot in enumerate(self.all):
            if slot.label:
                first.setdefault(slot.label, k)
        if gap.end not in first:
            return None
        start, at, end = first[gap.like[0]], first[gap.behind[0]], first[gap.end]
        like, behind = slice(start, at), slice(at, end)
        turns = dict(zip(gap.like, gap.behind, strict=True))
        calls = self.all[at].call - self.all[start].call
        if [_moved(s, calls, turns) for s in self.all[like]] != list(self.all[behind]):
            return None
        if not all(costs.alike(like, behind) for costs in self._costs):
            return None
        between: list[Slot] = []
        for block in range(gap.blocks):
            labels = gap.left_out[block * len(gap.like) :]
            names = dict(zip(gap.like, labels, strict=False))
            between += [_moved(s, (block + 1) * calls, names) for s in self.all[like]]
        rest = [_moved(s, gap.blocks * calls, {}) for s in self.all[at:]]
        more = len(between)
        return replace(
            self,
            all=(*self.all[:at], *between, *rest),
            costs_of=self.costs_of.filled(like, at, gap.blocks),
            kinds=tuple(costs.filled(like, at, gap.blocks) for costs in self.kinds),
            shared=tuple((tuple(k + more * (k >= at) for k in slots), n) for slots, n in self.shared),
        )

    def scaled(self, microbatch: float) -> Slots:
        """With all ops together taking so many seconds; on faster ranks by as much less as before."""
        own = self.costs_of
        total = float((own.forward + own.input + own.weight).sum())
        factor = microbatch / total if total else 1.0
        return replace(
            self, costs_of=own.slower(factor), kinds=tuple(kind.slower(factor) for kind in self.kinds)
        )

    @property
    def count(self) -> int:
        return len(self.all)

    @cached_property
    def send(self) -> np.ndarray:
        """Seconds for what crosses behind every slot, there and (its gradient) back."""
        return self.costs_of.send

    @cached_property
    def places(self) -> list[int]:
        """Slots behind which a cut may be, in calls; see `places_of`."""
        rows: dict[int, list[int]] = {}
        apart = self._apart
        for k, slot in enumerate(self.all[:-1]):
            if slot.open and (apart is None or apart[k]):
                rows.setdefault(slot.call, []).append(k)
        calls = list(rows.values())
        # sums of the same sends differ by rounding
        crossing = [[float(f"{float(self.send[k]):.6e}") for k in row] for row in calls]
        return [calls[call][number] for call, number in places_of(crossing)]

    @property
    def _apart(self) -> np.ndarray | None:
        """Whether stages that are fixed let a cut be behind a slot; None if none are."""
        if not self.stages:
            return None
        least = np.maximum.accumulate([min(s) if s else 0 for s in self.stages])
        most = np.minimum.accumulate([max(s) if s else self.count for s in reversed(self.stages)])[::-1]
        return np.append(least[:-1] < most[1:], False)

    def _barred(self, stage: int, edges: Sequence[int]) -> np.ndarray | None:
        if not self.stages:
            return None
        barred = np.array([s is not None and stage not in s for s in self.stages])
        return np.logical_or.reduceat(barred, edges[:-1])

    @property
    def most_stages(self) -> int:
        """As many as there are runs of slots that use parameters; all runs where stages are fixed."""
        if self.stages:
            return len(self.places) + 1
        runs = np.logical_or.reduceat(self.uses_params, [0, *(p + 1 for p in self.places)])
        return int(runs.sum()) or len(runs)

    def cut_behind(self, k: int) -> Cut:
        """The cut behind a slot, by the call it is in."""
        slot = self.all[k]
        assert slot.call >= 0
        return Cut(slot.call, "" if slot.last else slot.value, slot.label)

    def pipeline(self, trial: Trial) -> Pipeline:
        """The pipeline with its cuts."""
        schedule, cuts = trial.schedule, tuple(self.cut_behind(e) for e in trial.ends)
        parts = () if self.sliced.even else self.sliced.counts
        return Pipeline(schedule.ranks, 0, schedule.name, trial.chunks, cuts, self.slices, parts)

    def cut(self, schedule: Schedule, request: CutRequest, bare: float = 0.0) -> Trial | None:
        """The best cuts for one schedule, simulated; None if nothing fits. bare: see `StagePartition`."""
        edges = [0, *(p + 1 for p in self.places), self.count]
        tried: list[list[int]] = []
        for lines in self._lines(schedule, edges, idle=request.chunks > 1):
            cuts = best_cuts(lines, request)
            ends = [] if cuts is None else [edges[e + 1] - 1 for e in cuts.ends]
            tried += [ends] if cuts is not None and ends not in tried else []
        # the formula is not the simulation: what people do by hand is tried as well
        alike = [] if self.stages else self._alike(schedule.stages)
        tried += [alike] if alike and alike not in tried else []
        best: Trial | None = None
        for ends in tried:
            if self._leaves_idle(schedule, ends):
                continue
            costs = self.costs(schedule, ends)
            unhidden = bare * _fullest(costs.base)
            if best is not None and least_makespan(schedule, costs) + unhidden > (1 + _ROUNDING) * best.total:
                continue
            rooms = (request.room(schedule.owner.index(rank)) for rank in range(schedule.ranks))
            peaks = peak_bytes(schedule, costs)
            if any(limit is not None and most > limit for most, limit in zip(peaks, rooms, strict=True)):
                continue
            step = makespan(schedule, costs)
            if best is None or step + unhidden < best.total:
                best = Trial(schedule, request.chunks, tuple(ends), costs, step, unhidden)
        return best

    @cached_property
    def uses_params(self) -> np.ndarray:
        """Whether a slot uses parameters; those of several slots count for each."""
        uses = self.costs_of.state > 0
        for slots, _ in self.shared:
            uses[list(slots)] = True
        return uses

    def _leaves_idle(self, schedule: Schedule, ends: Sequence[int]) -> bool:
        """Whether a rank's stages would have no parameters: its optimizer would get an empty list."""
        having = np.logical_or.reduceat(self.uses_params, [0, *(e + 1 for e in ends)])
        return bool(having.any()) and len({schedule.owner[k] for k in np.nonzero(having)[0]}) < schedule.ranks

    def _lines(self, schedule: Schedule, edges: Sequence[int], *, idle: bool) -> list[list[Line]]:
        """The slots between places that may be cut, as one each; for every stage. Where links are unlike,
        also as if nothing were sent: a stage that waits for a slow link has time to compute.

        idle: whether a stage may have no parameters, as others of its rank may have some.
        """
        lines_: dict[tuple[int, int, bool, int], Line] = {}

        def line(stage: int, sends: bool) -> Line:
            owner = schedule.owner
            own = self.on(owner[stage])
            behind = self.between(owner[stage], owner[min(stage + 1, len(owner) - 1)])
            key = (id(own), id(behind), sends, stage if self.stages else 0)
            if key not in lines_:
                new = self._line(own, behind, edges, sends, idle)
                lines_[key] = replace(new, barred=self._barred(stage, edges))
            return lines_[key]

        ways = (True, False) if self.of else (True,)
        return [[line(stage, sends) for stage in range(schedule.stages)] for sends in ways]

    def _line(self, own: SlotCosts, behind: SlotCosts, edges: Sequence[int], sends: bool, idle: bool) -> Line:
        def grouped(x: np.ndarray) -> np.ndarray:
            return np.add.reduceat(x, edges[:-1])

        crossing = behind.send if sends else np.zeros(self.count)
        send = np.array([*(crossing[e - 1] for e in edges[1:-1]), 0.0])
        params = np.logical_or.reduceat(self.uses_params, edges[:-1])
        return Line(
            grouped(own.forward),
            grouped(own.input + own.weight),
            grouped(own.held),
            grouped(own.state),
            send,
            None if idle or not self.uses_params.any() else params,
        )

    def costs(self, schedule: Schedule, ends: Sequence[int]) -> StageCosts:
        """Of the stages that end behind these slots."""
        edges, owner = [0, *(e + 1 for e in ends)], schedule.owner

        def total(part: Callable[[SlotCosts], np.ndarray]) -> tuple[float, ...]:
            if not self.of:
                return tuple(float(v) for v in np.add.reduceat(part(self.costs_of), edges))
            rows = [np.add.reduceat(part(kind), edges) for kind in self.kinds]
            return tuple(float(rows[self.of[rank]][stage]) for stage, rank in enumerate(owner))

        crossing = (
            [self.between(a, b).send for a, b in pairwise(owner)] if self.of else [self.send] * len(ends)
        )
        sends = tuple(float(row[e]) / 2 for row, e in zip(crossing, ends, strict=True))
        held, produced = total(lambda x: x.held), total(lambda x: x.made)
        held_weight = tuple(min(a, b) for a, b in zip(total(lambda x: x.held_weight), held, strict=True))
        state, update = total(lambda x: x.state), total(lambda x: x.update)
        base, updates = [0.0] * schedule.ranks, [0.0] * schedule.ranks
        for stage, rank in enumerate(schedule.owner):
            base[rank] += state[stage]
            updates[rank] += update[stage]
        for slots, nbytes in self.shared if self.of else ():
            ranks = {owner[bisect_right(edges, slot) - 1] for slot in slots}
            link = AxisLink(self.link.latency, self.link.alone, len(ranks), nccl=self.link.nccl)
            for rank in ranks if len(ranks) > 1 else ():
                updates[rank] += float(seconds("all_reduce", nbytes, link))
        costs = StageCosts(
            total(lambda x: x.forward),
            total(lambda x: x.input + x.weight),
            total(lambda x: x.input),
            total(lambda x: x.weight),
            sends,
            sends,
            held,
            held_weight,
            tuple(base),
            tuple(updates),
            produced,
        )
        if schedule.slices == 1:
            return costs
        seen, seen_back = total(lambda x: x.seen), total(lambda x: x.seen_back)
        return in_slices(costs, seen, seen_back, self.link.latency, self.sliced)

    @cached_property
    def _layers(self) -> list[int]:
        """The last op of every layer."""
        return [k for k, slot in enumerate(self.all) if slot.last and slot.label]

    def _alike(self, stages: int) -> list[int]:
        """The ends of stages with equally many layers, embedding and head at the ends; [] with too few."""
        layers = self._layers
        if len(layers) < stages:
            return []
        return [layers[len(layers) * k // stages - 1] for k in range(1, stages)]

    def equal(self, schedule: Schedule) -> StageCosts | None:
        """Of stages with equally many layers, None where there are too few."""
        ends = self._alike(schedule.stages)
        return self.costs(schedule, ends) if ends else None


@dataclass(frozen=True)
class Trial:
    """A schedule with its best cuts. ends: the slots behind which its stages end. seconds: of a simulated
    step; bare: of collectives of parameters that nothing hides, on the rank that holds most."""

    schedule: Schedule
    chunks: int
    ends: tuple[int, ...]
    costs: StageCosts
    seconds: float
    bare: float

    @property
    def total(self) -> float:
        return self.seconds + self.bare


def _fullest(held: Sequence[float]) -> float:
    """How many times as much the fullest rank holds as they do on average."""
    total = sum(held)
    return len(held) * max(held) / total if total else 1.0


def _moved(slot: Slot, calls: int, labels: dict[str, str]) -> Slot:
    """The same so many calls later. labels: of its layer -> of the other."""
    if slot.call < 0:
        return slot
    return slot._replace(call=slot.call + calls, label=labels.get(slot.label, slot.label))
