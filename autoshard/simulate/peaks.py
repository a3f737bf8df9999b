"""What every pipeline rank of a program holds at most: bytes alone, no seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from math import inf

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
        state = prices.states[rank]
        missing = {} if prices.behaviour.gradient_buffers else dict(prices.gradients_of[rank])
        most, level, absent = -inf, state.total, 0.0
        without = sum(missing.values())
        for before, rise, done in self._parts(rank, state.total):
            if before - without + rise > most:
                most, level, absent = before - without + rise, before, without
            if done in missing:
                del missing[done]
                without = sum(missing.values())
        held = replace(state, gradients=state.gradients - absent, activations=level - state.total)
        return held, most

    def _parts(self, rank: int, base: float) -> Iterator[tuple[float, float, int | None]]:
        """(bytes before, how far it rises, the stage that has gradients from then on) of every action."""
        row, before = self.schedule.actions[rank], base
        flying = in_flight_bytes(self.schedule, row, self.prices.held)
        for action, after in zip(row, flying, strict=True):
            yield (
                before,
                self.transients.of(action.stage, action.kind),
                action.stage if action.kind in "BW" else None,
            )
            before = base + after
        yield before, self.transients.end(rank), None
        yield before, self.prices.behaviour.step_bytes * self.prices.updated(rank), None
