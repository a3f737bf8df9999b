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

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from typing import TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from autoshard.solver.network import Array, Indices

#: places of a model that may be cut: with more of them, those are left out where most crosses
_PLACES = 250
#: the slowest stage is first sought within so many times what it takes at least
_NEAR = 1.25
#: steps that differ by less than this share differ by rounding alone
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Line:
    """A model op by op; arrays over n slots.

    forward, backward: seconds of one microbatch. held: bytes kept for backward, per microbatch in flight.
    state: bytes of parameters, gradients and optimizer. send: seconds to send what crosses behind a slot to
    the next stage and its gradient back, inf where no cut may be; the last one is not used. params: whether
    a slot uses parameters, of which every stage needs some; None if it need not. barred: slots that the stage
    must not have; None for none.
    """

    forward: Array
    backward: Array
    held: Array
    state: Array
    send: Array
    params: NDArray[np.bool_] | None = None
    barred: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.forward)


@dataclass(frozen=True)
class CutRequest:
    """What the stages are for.

    stages: how many. microbatches: of a step. chunks: stages per rank. in_flight: per stage, how many
    microbatches it holds at once. budget: bytes of a rank for state and activations, None for no limit; with
    several stages on a rank each may use its share. budgets: of the rank of every stage, where they differ.
    """

    stages: int
    microbatches: int
    chunks: int = 1
    in_flight: tuple[int, ...] = ()
    budget: float | None = None
    budgets: tuple[float, ...] = ()

    def room(self, stage: int) -> float | None:
        """Bytes of the rank of a stage."""
        return self.budgets[stage] if self.budgets else self.budget


@dataclass(frozen=True)
class StageCuts:
    """ends: the slots behind which stages end, the last one left out. seconds: of a step, by the formula.

    slowest: seconds of the slowest stage for one microbatch.
    """

    ends: tuple[int, ...]
    seconds: float
    slowest: float


#: whether a place is inside a call, what crosses there, and at how many places before it that does
_Rank: TypeAlias = tuple[bool, float, int]


def places_of(calls: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """(call, op) behind which a cut may be, in order: all, or the ends of calls and where little crosses.

    calls: what crosses behind each op. Of places alike in every layer each layer has its own.
    """
    if sum(map(len, calls)) <= _PLACES:
        return [(call, number) for call, row in enumerate(calls) for number in range(len(row))]
    ranked: dict[int, list[tuple[_Rank, int]]] = {}
    for row in calls:
        if id(row) not in ranked:  # calls of a segment have the same
            seen: Counter[float] = Counter()
            places = ranked[id(row)] = []
            for number, crossing in enumerate(row):
                places.append(((number != len(row) - 1, crossing, seen[crossing]), number))
                seen[crossing] += 1
    often = Counter(rank for row in calls for rank, _ in ranked[id(row)])
    last, count = min(often), 0
    for last in sorted(often):
        count += often[last]
        if count >= _PLACES:
            break
    near = {key: [place for place in row if place[0] <= last] for key, row in ranked.items()}
    keys = [(rank, call, number) for call, row in enumerate(calls) for rank, number in near[id(row)]]
    return sorted((call, number) for _, call, number in sorted(keys)[:_PLACES])


def step_seconds(times: Sequence[float], request: CutRequest) -> float:
    """Seconds of a step whose stages take these seconds per microbatch.

    With several stages per rank the slowest one stands for all of its rank: a rank takes them in turns, and
    an emptier one beside it does not make good for it.
    """
    return (request.microbatches * request.chunks - 1) * max(times) + sum(times) / request.chunks


def best_cuts(line: Line | Sequence[Line], request: CutRequest) -> StageCuts | None:
    """The cuts of the least step, None if no stages fit the memory.

    line: or that of every stage, where the same ops take unlike ranks different seconds; their bytes are the
    same. Exact for `step_seconds`.
    """
    table = _Table((line,) * request.stages if isinstance(line, Line) else tuple(line), request)
    least = table.least_bound()
    if not isfinite(least):
        return None
    turns = request.microbatches * request.chunks - 1
    bounds = [least]
    cache: dict[int, tuple[float, StageCuts]] = {}

    def at(k: int) -> tuple[float, StageCuts]:
        """(least sum of all stages, those stages) with none slower than the k-th bound."""
        if k not in cache:
            ends = table.cheapest(bounds[k])
            assert ends is not None
            times = table.times(ends)
            cache[k] = (sum(times), StageCuts(ends, step_seconds(times, request), max(times)))
        return cache[k]

    # with a slower stage than this, even stages that send nothing make no better step
    limit = at(0)[1].seconds * (1 + _ROUNDING) - table.work / request.chunks
    bounds += [x for x in table.bounds_above(least) if turns * x <= limit]
    last = len(bounds) - 1
    best = min((at(0)[1], at(last)[1]), key=lambda s: s.seconds)
    waiting = [(0, last)]
    while waiting:
        low, high = waiting.pop()
        if high - low < 2:
            continue
        # a looser bound never adds to the sum, so nothing between the two is below this
        floor = turns * bounds[low + 1] + at(high)[0] / request.chunks
        if floor >= best.seconds or at(low)[0] <= at(high)[0]:
            continue
        middle = (low + high) // 2
        best = min((best, at(middle)[1]), key=lambda s: s.seconds)
        waiting += [(middle, high), (low, middle)]
    return best


class _Table:
    """Seconds of every run of slots that may be a stage: ``runs[k][a, b]`` is slots a to b - 1 as a stage of
    the k-th kind.

    of: the kind of every stage.
    """

    def __init__(self, lines: Sequence[Line], request: CutRequest) -> None:
        kinds = {id(line): line for line in lines}
        numbers = {key: k for k, key in enumerate(kinds)}
        self.request, self.of = request, tuple(numbers[id(line)] for line in lines)
        self.lines = tuple(kinds.values())
        self.runs = tuple(_seconds(line) for line in self.lines)
        first = self.lines[0]
        self.held = np.concatenate([[0.0], np.cumsum(first.held)])
        self.state = np.concatenate([[0.0], np.cumsum(first.state)])
        #: of every slot at least, whichever stage it is in
        self.least = np.min([line.forward + line.backward for line in self.lines], axis=0)
        self._longest: dict[tuple[int, float], Indices] = {}

    def __len__(self) -> int:
        return len(self.least)

    def flight(self, stage: int) -> int:
        """Microbatches that a stage holds; stages with as many are alike."""
        return self.request.in_flight[stage] if self.request.in_flight else 1

    def longest(self, flight: int, limit: float | None) -> Indices | None:
        """Where the longest run to every end begins that fits with so many microbatches in flight, [n + 1].

        Whatever begins later fits, too. None without a limit. limit: bytes of the rank.
        """
        if limit is None:
            return None
        if (flight, limit) not in self._longest:
            self._longest[flight, limit] = self._fitting(flight, limit / self.request.chunks)
        return self._longest[flight, limit]

    def _fitting(self, flight: int, budget: float) -> Indices:
        ends = np.arange(len(self) + 1)
        low, high = np.zeros_like(ends), ends
        while (low < high).any():
            middle = (low + high) // 2
            fits = self.state - self.state[middle] + flight * (self.held - self.held[middle]) <= budget
            low, high = np.where(fits, low, middle + 1), np.where(fits, middle, high)
        return low

    def least_bound(self) -> float:
        """The least possible slowest stage; inf if no stages fit the memory."""
        heaviest = float(self.least.max())
        floor = max(self.work / self._stages, heaviest)
        least = self._least_within(_NEAR * floor)
        return least if isfinite(least) else self._least_within(inf)

    @property
    def _stages(self) -> float:
        """How many stages there are; one that takes longer for everything counts for less."""
        if len(self.lines) == 1:
            return self.request.stages
        work = [float((line.forward + line.backward).sum()) for line in self.lines]
        return sum(self.work / work[k] if work[k] else 1.0 for k in self.of)

    def _least_within(self, bound: float) -> float:
        """The least possible slowest stage, inf if it is slower than ``bound``."""
        runs = _Runs(self, bound)
        best = runs.first()
        for stage in range(1, self.request.stages):
            best = np.min(np.maximum(runs.before(best), runs.of(stage)), axis=1)
        return float(best[-1])

    @property
    def work(self) -> float:
        """Seconds that all stages together take at least, without sends."""
        return float(self.least.sum())

    def bounds_above(self, least: float) -> Sequence[float]:
        """Values above ``least`` that the slowest stage may have, ascending."""
        bounds = [run[np.isfinite(run) & (run > least)] for run in self.runs]
        return [float(x) for x in np.unique(np.concatenate(bounds))]

    def cheapest(self, bound: float) -> tuple[int, ...] | None:
        """The ends of stages of least total seconds none of which is slower than ``bound``."""
        runs = _Runs(self, bound * (1 + 1e-12))
        total = runs.first()
        came: list[Indices] = []
        for stage in range(1, self.request.stages):
            sums = runs.before(total) + runs.of(stage)
            choice = np.argmin(sums, axis=1)
            came.append(choice)
            total = np.take_along_axis(sums, choice[:, None], axis=1)[:, 0]
        if not isfinite(total[-1]):
            return None
        at, ends = len(self), []
        for choice in reversed(came):
            at = int(runs.begin[at, choice[at]])
            ends.append(at - 1)
        return tuple(reversed(ends))

    def times(self, ends: Sequence[int]) -> list[float]:
        """Seconds of every stage."""
        edges = pairwise([0, *(e + 1 for e in ends), len(self)])
        return [float(self.runs[k][a, b]) for k, (a, b) in zip(self.of, edges, strict=True)]


def _seconds(line: Line) -> Array:
    """Of every run of slots that may be a stage, inf for what is none; [n + 1, n + 1]."""
    n = len(line)
    work = np.concatenate([[0.0], np.cumsum(line.forward + line.backward)])
    send = np.where(np.arange(n) < n - 1, line.send, 0.0)
    run: Array = work[None, :] - work[:, None] + np.concatenate([[0.0], send])[None, :]
    run[np.tril_indices(n + 1)] = inf
    if line.params is not None:
        users = np.concatenate([[0], np.cumsum(line.params)])
        run[users[None, :] == users[:, None]] = inf
    if line.barred is not None:
        barred = np.concatenate([[0], np.cumsum(line.barred)])
        run[barred[None, :] != barred[:, None]] = inf
    return run


class _Runs:
    """The runs of a table that take at most ``bound`` seconds, by their ends.

    begin: where they begin, [n + 1, width], ascending. Long runs are slow, so few columns do for a low bound;
    runs that begin before the first slot, or have no slot, take forever.
    """

    def __init__(self, table: _Table, bound: float) -> None:
        self._table = table
        fine = [run <= bound for run in table.runs]
        ends = np.arange(len(table) + 1)
        lengths = [np.where(f.any(axis=0), ends - np.argmax(f, axis=0), 1) for f in fine]
        width = max(1, int(np.max(lengths)))
        self._whole = 2 * width > len(ends)
        if self._whole:
            self.begin = np.broadcast_to(ends, fine[0].shape)
            self._seconds = [
                np.ascontiguousarray(np.where(f, run, inf).T) for f, run in zip(fine, table.runs, strict=True)
            ]
        else:
            self.begin = ends[:, None] - width + np.arange(width)
            chosen = np.maximum(self.begin, 0), np.broadcast_to(ends[:, None], self.begin.shape)
            self._seconds = [
                np.where((self.begin >= 0) & f[chosen], run[chosen], inf)
                for f, run in zip(fine, table.runs, strict=True)
            ]
        self._cache: dict[tuple[int, int, float | None], Array] = {}

    def first(self) -> Array:
        """Seconds of the runs from the first slot on, as the first stage. [n + 1]"""
        return np.where(self.begin == 0, self.of(0), inf).min(axis=1)

    def of(self, stage: int) -> Array:
        """Seconds of the runs that may be a stage, inf for those that do not fit. [n + 1, width]"""
        table = self._table
        key = table.of[stage], table.flight(stage), table.request.room(stage)
        if key not in self._cache:
            kind, flight, limit = key
            longest, seconds = table.longest(flight, limit), self._seconds[kind]
            self._cache[key] = (
                seconds if longest is None else np.where(self.begin >= longest[:, None], seconds, inf)
            )
        return self._cache[key]

    def before(self, values: Array) -> Array:
        """Values of the slots that the runs begin at, to be broadcast to [n + 1, width]."""
        if self._whole:
            return values[None]
        width = self.begin.shape[1]
        return sliding_window_view(np.concatenate([np.full(width, inf), values[:-1]]), width)
