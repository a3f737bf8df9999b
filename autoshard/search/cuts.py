"""Where to cut a model into pipeline stages: a dynamic programme over the ops of the forward pass.

The model is a line of slots (ops, each with the backward that belongs to it); a stage is a run of slots. A
step of m microbatches through p stages takes about

    (m v - 1) * slowest + (sum of all stages) / v

with v stages per rank (the slowest stage works m times and its rank at v of them, the first microbatch passes
through every stage; for stages that are alike this is the formula of Narayanan et al., SC'21, section 2.2),
where a stage's seconds are its forward, its backward and what it takes to send to the next one.

For every bound on the slowest stage the programme finds the cheapest cuts that keep it. A looser bound never
makes the sum of all stages larger, so that ranges of bounds are ruled out by their ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite

import numpy as np

from autoshard.search.network import Array


@dataclass(frozen=True, eq=False)
class Line:
    """A model op by op; arrays over n slots.

    forward, backward: seconds of one microbatch. held: bytes kept for backward, per microbatch in flight.
    state: bytes of parameters, gradients and optimizer. send: seconds to send what crosses behind a slot to
    the next stage and its gradient back, inf where no cut may be; the last one is not used.
    """

    forward: Array
    backward: Array
    held: Array
    state: Array
    send: Array

    def __len__(self) -> int:
        return len(self.forward)


@dataclass(frozen=True)
class Ask:
    """What the stages are for.

    stages: how many. microbatches: of a step. chunks: stages per rank. in_flight: per stage, how many
    microbatches it holds at once. budget: bytes of a rank for state and activations, None for no limit; with
    several stages on a rank each may use its share.
    """

    stages: int
    microbatches: int
    chunks: int = 1
    in_flight: tuple[int, ...] = ()
    budget: float | None = None


@dataclass(frozen=True)
class Stages:
    """ends: the slots behind which stages end, the last one left out. seconds: of a step, by the formula.

    slowest: seconds of the slowest stage for one microbatch.
    """

    ends: tuple[int, ...]
    seconds: float
    slowest: float


def step_seconds(times: Sequence[float], ask: Ask) -> float:
    """Seconds of a step whose stages take these seconds per microbatch.

    With several stages per rank the slowest one stands for all of its rank: a rank takes them in turns, and
    an emptier one beside it does not make good for it.
    """
    return (ask.microbatches * ask.chunks - 1) * max(times) + sum(times) / ask.chunks


def best_cuts(line: Line, ask: Ask) -> Stages | None:
    """The cuts of the least step, None if no stages fit the memory.

    Exact for `step_seconds`.
    """
    table = _Table(line, ask)
    least = table.least_bound()
    if not isfinite(least):
        return None
    bounds = table.bounds_from(least)
    known: dict[int, tuple[float, Stages]] = {}

    def at(k: int) -> tuple[float, Stages]:
        """(least sum of all stages, those stages) with none slower than the k-th bound."""
        if k not in known:
            ends = table.cheapest(bounds[k])
            assert ends is not None
            times = table.times(ends)
            known[k] = (sum(times), Stages(ends, step_seconds(times, ask), max(times)))
        return known[k]

    last = len(bounds) - 1
    best = min((at(0)[1], at(last)[1]), key=lambda s: s.seconds)
    waiting = [(0, last)]
    while waiting:
        low, high = waiting.pop()
        if high - low < 2:
            continue
        # a looser bound never adds to the sum, so nothing between the two is below this
        turns = ask.microbatches * ask.chunks - 1
        floor = turns * bounds[low + 1] + at(high)[0] / ask.chunks
        if floor >= best.seconds or at(low)[0] <= at(high)[0]:
            continue
        middle = (low + high) // 2
        best = min((best, at(middle)[1]), key=lambda s: s.seconds)
        waiting += [(middle, high), (low, middle)]
    return best


class _Table:
    """Seconds of every run of slots that may be a stage: ``run[a, b]`` is slots a to b - 1."""

    def __init__(self, line: Line, ask: Ask) -> None:
        self.line, self.ask = line, ask
        n = len(line)
        work = np.concatenate([[0.0], np.cumsum(line.forward + line.backward)])
        self.send = np.where(np.arange(n) < n - 1, line.send, 0.0)
        self.run = work[None, :] - work[:, None] + np.concatenate([[0.0], self.send])[None, :]
        self.run[np.tril_indices(n + 1)] = inf
        self.held = np.concatenate([[0.0], np.cumsum(line.held)])
        self.state = np.concatenate([[0.0], np.cumsum(line.state)])
        self._by_flight: dict[int, Array] = {}

    def _allowed(self, stage: int) -> Array:
        """Seconds of the runs that fit as this stage; stages that hold as many microbatches are alike."""
        ask = self.ask
        if ask.budget is None:
            return self.run
        flight = ask.in_flight[stage] if ask.in_flight else 1
        if flight not in self._by_flight:
            self._by_flight[flight] = self._fitting(flight, ask.budget)
        return self._by_flight[flight]

    def _fitting(self, flight: int, budget: float) -> Array:
        """Runs that fit with so many microbatches in flight."""
        held = self.held[None, :] - self.held[:, None]
        state = self.state[None, :] - self.state[:, None]
        fits = state + flight * held <= budget / self.ask.chunks
        return np.where(fits, self.run, inf)

    def least_bound(self) -> float:
        """The least possible slowest stage."""
        ask = self.ask
        best = self._allowed(0)[0]
        for stage in range(1, ask.stages):
            runs = self._allowed(stage)
            best = np.min(np.maximum(best[:, None], runs), axis=0)
        return float(best[-1])

    def bounds_from(self, least: float) -> Sequence[float]:
        """Values that the slowest stage may have, ascending."""
        known = np.unique(self.run[np.isfinite(self.run) & (self.run >= least)])
        return [float(x) for x in known]

    def cheapest(self, bound: float) -> tuple[int, ...] | None:
        """The ends of stages of least total seconds none of which is slower than ``bound``."""
        ask = self.ask
        slack = bound * (1 + 1e-12)
        bounded: dict[int, Array] = {}

        def runs_of(stage: int) -> Array:
            runs = self._allowed(stage)
            if id(runs) not in bounded:
                bounded[id(runs)] = np.where(runs <= slack, runs, inf)
            return bounded[id(runs)]

        total = runs_of(0)[0]
        came: list[Array] = []
        for stage in range(1, ask.stages):
            sums = total[:, None] + runs_of(stage)
            came.append(np.argmin(sums, axis=0))
            total = np.min(sums, axis=0)
        if not isfinite(total[-1]):
            return None
        at, ends = len(self.line), []
        for choice in reversed(came):
            at = int(choice[at])
            ends.append(at - 1)
        return tuple(reversed(ends))

    def times(self, ends: Sequence[int]) -> list[float]:
        """Seconds of every stage."""
        edges = [0, *(e + 1 for e in ends), len(self.line)]
        return [float(self.run[a, b]) for a, b in pairwise(edges)]
