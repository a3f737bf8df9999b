"""The ops of forward in order, what each costs as a part of a pipeline stage, and stages made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autoshard.cost.collective import AxisLink
from autoshard.passes.shorten import Gap
from autoshard.schedules.schedule import Schedule
from autoshard.search.cuts import Ask, Line, best_cuts, places_of
from autoshard.search.plan import Cut, Pipeline
from autoshard.simulate.pipeline import StageCosts, least_makespan, makespan, peak_bytes
from autoshard.simulate.slices import in_slices

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
    """See above. link: between stages. slices: of the sequence of a microbatch."""

    all: tuple[Slot, ...]
    costs_of: SlotCosts
    link: AxisLink
    slices: int

    def equals(self, other: Slots) -> bool:
        """Whether all slots are the same and cost the same."""
        return self.all == other.all and self.costs_of.equals(other.costs_of)

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
        if not self.costs_of.alike(like, behind):
            return None
        between: list[Slot] = []
        for block in range(gap.blocks):
            labels = gap.left_out[block * len(gap.like) :]
            names = dict(zip(gap.like, labels, strict=False))
            between += [_moved(s, (block + 1) * calls, names) for s in self.all[like]]
        rest = [_moved(s, gap.blocks * calls, {}) for s in self.all[at:]]
        return replace(
            self,
            all=(*self.all[:at], *between, *rest),
            costs_of=self.costs_of.filled(like, at, gap.blocks),
        )

    def scaled(self, microbatch: float) -> Slots:
        """With all ops together taking so many seconds."""
        own = self.costs_of
        total = float((own.forward + own.input + own.weight).sum())
        factor = microbatch / total if total else 1.0
        timed = ("forward", "input", "weight", "seen", "seen_back")
        return replace(self, costs_of=replace(own, **{k: factor * getattr(own, k) for k in timed}))

    @property
    def count(self) -> int:
        return len(self.all)

    @cached_property
    def send(self) -> np.ndarray:
        """Seconds for what crosses behind every slot, there and (its gradient) back."""
        return 2 * np.cumsum(self.costs_of.steps)

    @cached_property
    def places(self) -> list[int]:
        """Slots behind which a cut may be, in calls; see `places_of`."""
        rows: dict[int, list[int]] = {}
        for k, slot in enumerate(self.all[:-1]):
            if slot.open:
                rows.setdefault(slot.call, []).append(k)
        calls = list(rows.values())
        # sums of the same sends differ by rounding
        crossing = [[float(f"{float(self.send[k]):.6e}") for k in row] for row in calls]
        return [calls[call][number] for call, number in places_of(crossing)]

    @property
    def most_stages(self) -> int:
        return len(self.places) + 1

    def cut_behind(self, k: int) -> Cut:
        """The cut behind a slot, by the call it is in."""
        slot = self.all[k]
        assert slot.call >= 0
        return Cut(slot.call, "" if slot.last else slot.value, slot.label)

    def pipeline(self, trial: Trial) -> Pipeline:
        """The pipeline with its cuts."""
        schedule, cuts = trial.schedule, tuple(self.cut_behind(e) for e in trial.ends)
        return Pipeline(schedule.ranks, 0, schedule.name, trial.chunks, cuts, self.slices)

    def cut(self, schedule: Schedule, ask: Ask) -> Trial | None:
        """The best cuts for one schedule, simulated; None if nothing fits."""
        budget, edges = ask.budget, [0, *(p + 1 for p in self.places), self.count]
        found = best_cuts(self._line(edges), ask)
        tried = [] if found is None else [[edges[e + 1] - 1 for e in found.ends]]
        # the formula is not the simulation: what people do by hand is tried as well
        alike = self._alike(schedule.stages)
        tried += [alike] if alike and alike not in tried else []
        best: Trial | None = None
        for ends in tried:
            costs = self.costs(schedule, ends)
            if best is not None and least_makespan(schedule, costs) > (1 + _ROUNDING) * best.seconds:
                continue
            if budget is not None and max(peak_bytes(schedule, costs)) > budget:
                continue
            seconds = makespan(schedule, costs)
            if best is None or seconds < best.seconds:
                best = Trial(schedule, ask.chunks, tuple(ends), costs, seconds)
        return best

    def _line(self, edges: Sequence[int]) -> Line:
        """The slots between places that may be cut, as one each."""
        own = self.costs_of

        def grouped(x: np.ndarray) -> np.ndarray:
            return np.add.reduceat(x, edges[:-1])

        send = np.array([*(self.send[e - 1] for e in edges[1:-1]), 0.0])
        return Line(
            grouped(own.forward),
            grouped(own.input + own.weight),
            grouped(own.held),
            grouped(own.state),
            send,
        )

    def costs(self, schedule: Schedule, ends: Sequence[int]) -> StageCosts:
        """Of the stages that end behind these slots."""
        own, edges = self.costs_of, [0, *(e + 1 for e in ends)]

        def total(x: np.ndarray) -> tuple[float, ...]:
            return tuple(float(v) for v in np.add.reduceat(x, edges))

        sends = tuple(float(self.send[e]) / 2 for e in ends)
        held, made = total(own.held), total(own.made)
        held_weight = tuple(min(a, b) for a, b in zip(total(own.held_weight), held, strict=True))
        state, update = total(own.state), total(own.update)
        base, updates = [0.0] * schedule.ranks, [0.0] * schedule.ranks
        for stage, rank in enumerate(schedule.owner):
            base[rank] += state[stage]
            updates[rank] += update[stage]
        costs = StageCosts(
            total(own.forward),
            total(own.input + own.weight),
            total(own.input),
            total(own.weight),
            sends,
            sends,
            held,
            held_weight,
            tuple(base),
            tuple(updates),
            made,
        )
        if schedule.slices == 1:
            return costs
        return in_slices(costs, total(own.seen), total(own.seen_back), self.link.latency, schedule.slices)

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
    """A schedule with its best cuts. ends: the slots behind which its stages end."""

    schedule: Schedule
    chunks: int
    ends: tuple[int, ...]
    costs: StageCosts
    seconds: float


def _moved(slot: Slot, calls: int, labels: dict[str, str]) -> Slot:
    """The same so many calls later. labels: of its layer -> of the other."""
    if slot.call < 0:
        return slot
    return slot._replace(call=slot.call + calls, label=labels.get(slot.label, slot.label))
