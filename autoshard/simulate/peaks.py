"""What every pipeline rank of a program holds at most: bytes alone, no seconds."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import inf

from autoshard.schedules.schedule import Kind
from autoshard.simulate.kept import Held
from autoshard.simulate.pipeline import in_flight_bytes
from autoshard.simulate.stage_costs import StagePrices
from autoshard.simulate.transients import Transients


class Peaks:
    """Peaks of the ranks of a program. A rank computes one part at a time, so only their order counts."""

    def __init__(self, prices: StagePrices) -> None:
        self.prices, self.schedule = prices, prices.schedule
        self.transients = Transients(prices.program, prices.sheets)

    @cached_property
    def all(self) -> tuple[tuple[Held, float], ...]:
        """`of` every pipeline rank."""
        return tuple(self.of(rank) for rank in range(self.schedule.ranks))

    def of(self, rank: int) -> tuple[Held, float]:
        """(what the rank holds as the part begins in which it holds most, bytes at that point).

        Gradients are there from the first backward of their stage on, unless they lie in buffers that are
        always there.
        """
        prices = self.prices
        state, row = prices.states[rank], self.schedule.actions[rank]
        missing = {} if prices.behaviour.gradient_buffers else dict(prices.gradients_of[rank])
        most, level, absent = -inf, state.total, 0.0
        base = before = state.total
        without = sum(missing.values())
        rises: dict[tuple[int, Kind], float] = {}
        for action, after in zip(row, in_flight_bytes(self.schedule, row, prices.held), strict=True):
            stage, kind = action.stage, action.kind
            rise = rises.get((stage, kind))
            if rise is None:
                rise = rises[stage, kind] = self.transients.of(stage, kind)
            if before - without + rise > most:
                most, level, absent = before - without + rise, before, without
            if stage in missing and kind in "BW":
                del missing[stage]
                without = sum(missing.values())
            before = base + after
        for rise in (self.transients.end(rank), prices.behaviour.step_bytes * prices.updated(rank)):
            if before - without + rise > most:
                most, level, absent = before - without + rise, before, without
        held = replace(state, gradients=state.gradients - absent, activations=level - state.total)
        return held, most
