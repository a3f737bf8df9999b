"""What every pipeline rank of a program holds at most: bytes alone, no seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from autoshard.schedules.timeline import in_flight_bytes
from autoshard.simulate.saved_for_backward import ResidentBytes
from autoshard.simulate.stage_costs import StagePrices
from autoshard.simulate.transients import Course, Transients


class _Stop(NamedTuple):
    """An action, or the end of a step; a tuple, since pipelines have tens of thousands. level: bytes as it
    begins, with all gradients. absent: of gradients that are not there yet. kept: that stay as it ends, of
    those that it makes."""

    level: float
    absent: float
    course: Course
    kept: float = 0.0

    @property
    def start(self) -> float:
        return self.level - self.absent

    @property
    def peak(self) -> float:
        return self.start + self.course.peak


class Peaks:
    """Peaks of the ranks of a program. A rank computes one part at a time, so only their order counts; of two
    that run as one, each has what the other needs at most beside it."""

    def __init__(self, prices: StagePrices) -> None:
        self.prices, self.schedule = prices, prices.schedule
        self.transients = Transients(prices.program, prices.sheets)

    @cached_property
    def all(self) -> tuple[tuple[ResidentBytes, float], ...]:
        """`of` every pipeline rank."""
        return tuple(self.of(rank) for rank in range(self.schedule.ranks))

    @cached_property
    def fullest(self) -> tuple[ResidentBytes, float]:
        """`of` the rank that holds most."""
        return max(self.all, key=itemgetter(1))

    def of(self, rank: int) -> tuple[ResidentBytes, float]:
        """(what the rank holds when it holds most, bytes at that point). What a part keeps for backward
        counts from its peak on."""
        state = self.prices.states[rank]
        most = max(self._stops(rank), key=lambda stop: stop.peak)
        activations = most.level - state.total + min(most.kept, max(0.0, most.course.peak))
        return replace(state, gradients=state.gradients - most.absent, activations=activations), most.peak

    def along(self, rank: int) -> Iterator[tuple[Sequence[str], Sequence[float]]]:
        """Of every action of a rank, and of what ends a step: what calls its instructions, and the bytes that
        the rank holds at each of them and as it ends."""
        row = self.schedule.actions[rank]
        stops = list(self._stops(rank))
        for action, stop in zip(row, stops, strict=False):
            labels = self.transients.labels(action)
            yield labels, [stop.start + stop.course.ahead + bytes_ for bytes_ in stop.course.along]
        for stop in stops[len(row) :]:
            yield (), [stop.peak]

    def _stops(self, rank: int) -> Iterator[_Stop]:
        """Gradients are there from the first backward of their stage on, unless they lie in buffers that are
        always there."""
        prices = self.prices
        state, row = prices.states[rank], self.schedule.actions[rank]
        missing = {} if prices.behaviour.gradient_buffers else dict(prices.gradients_of[rank])
        base = before = state.total
        without = sum(missing.values())
        beside = 0.0
        levels = in_flight_bytes(self.schedule, row, prices.held)
        for action, behind, after in zip(row, (*row[1:], None), levels, strict=True):
            stage, kind = action.stage, action.kind
            course = self.transients.course(action)
            other, beside = beside, 0.0
            if behind is not None and action in self.schedule.paired:
                other = self.transients.course(behind).peak
                beside = max(0.0, course.peak - (base + after - before))
            course = replace(course, ahead=course.ahead + other) if other else course
            yield _Stop(before, without, course, max(0.0, base + after - before))
            if stage in missing and kind in "BW":
                del missing[stage]
                without = sum(missing.values())
            before = base + after
        yield _Stop(before, without, self.transients.course_of_end(rank))
        step = prices.behaviour.step_bytes * prices.updated(rank)
        yield _Stop(before, without, Course((step,)))
