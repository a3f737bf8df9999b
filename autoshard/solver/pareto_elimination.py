"""Elimination with Pareto fronts of (seconds, bytes), cut by bounds: closes the gap a multiplier leaves.

Every bucket sends fronts instead of numbers. A label goes as soon as even its best completion, known from
min-marginals for time, for bytes and for the multiplier, is over the budget or no better than the incumbent.
What remains near the best multiplier is little, and a budget that no multiplier meets exactly is met.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from autoshard.solver.eliminate import Elimination
from autoshard.solver.elimination_order import Order
from autoshard.solver.network import Array, Indices
from autoshard.solver.prune import Residual

#: seconds closer than this share of the incumbent are equal when fronts are thinned
_TIE = 1e-13
#: a label must promise to beat the incumbent by this share
_BETTER = 1e-11
#: a join may be this many times larger than a front before it is cut
_BURST = 20
#: integers below this one are exact, and so are their sums
_LARGEST = 2.0**52


#: of every row of a join: the row it extends, and the child's label it took
_Step: TypeAlias = tuple[Indices, Indices]


@dataclass(frozen=True)
class ParetoOutcome:
    """states: an assignment faster than the incumbent, or None. lower_bound: in seconds, proven."""

    states: list[int] | None
    lower_bound: float
    complete: bool


@dataclass(frozen=True)
class _Marginals:
    """Of one kind of cost: belief per entry of each bucket, up per entry of each message, total."""

    belief: list[Array]
    up: list[Array]
    total: float


@dataclass(frozen=True)
class _Labels:
    """A front per entry of a bucket's message, sorted by entry: arrays [labels]; start, count are [entries].

    excess: how far above the optimum below the bucket, [labels, 3] (multiplier, seconds, bytes).
    state: of the bucket's variable. origin, trail: where they came from, as in rows.
    """

    start: Indices
    count: Indices
    seconds: Array
    held: Array
    excess: Array
    state: Indices
    origin: Indices
    trail: list[_Step]


@dataclass
class _Rows:
    """Labels under construction in a bucket. cell: flat entry [rows]. bound: [rows, 3] as in excess.

    trail: what each join made its rows of. origin: which row of the last join, [rows].
    """

    cell: Indices
    seconds: Array
    held: Array
    bound: Array
    origin: Indices
    trail: list[_Step]

    def take(self, index: Indices) -> _Rows:
        return _Rows(
            self.cell[index],
            self.seconds[index],
            self.held[index],
            self.bound[index],
            self.origin[index],
            self.trail,
        )


def close_gap(
    net: Residual, order: Order, lam: float, budget: float, incumbent: float, labels: int
) -> ParetoOutcome:
    """Search everything that could beat the incumbent within the budget.

    lam: the multiplier, seconds per byte. labels: kept per variable; beyond, the least promising are
    dropped and their bound is reported.
    """
    return _Fronts(net, order, lam, budget, incumbent, labels).run()


class _Fronts:
    def __init__(
        self, net: Residual, order: Order, lam: float, budget: float, incumbent: float, labels: int
    ) -> None:
        self.net, self.order, self.lam, self.limit = net, order, lam, labels
        self.tie = _TIE * abs(incumbent)
        better = incumbent - _BETTER * abs(incumbent)
        self.cap = np.array([better + lam * budget, better, budget + _TIE * 10 * abs(budget)])
        self.offset = lam * budget
        self.incumbent = incumbent
        self.dropped = np.inf
        self.marginals = [
            _marginals(Elimination(net.weighted(lam), order)),
            _marginals(Elimination(net, order)),
            _marginals(Elimination(net.of_memory(all_edges=True), order)),
        ]
        self.children: list[list[int]] = [[] for _ in net.unary]
        for v in order.variables:
            if order.later[v]:
                self.children[order.later[v][0]].append(v)
        self.done: list[_Labels | None] = [None] * len(net.unary)

    def run(self) -> ParetoOutcome:
        open_ = [v for v in self.order.variables if not self._is_decided(v)]
        for v in open_:
            rows = self._own(v)
            for child in self.children[v]:
                rows = self._join(rows, child, self._entries(v, rows.cell, child))
            self.done[v] = self._send(v, rows)
        roots = [v for v in self.order.variables if not self.order.later[v]]
        one = np.zeros(1, dtype=np.intp)
        rows = _Rows(one, np.zeros(1), np.zeros(1), np.array([[m.total for m in self.marginals]]), one, [])
        rows = rows.take(np.flatnonzero(self._alive(rows.bound)))
        for root in roots:
            if self._is_decided(root):
                rows.seconds = rows.seconds + self.net.unary[root]
                rows.held = rows.held + self.net.memory[root]
            else:
                rows = self._join(rows, root, np.zeros(len(rows.cell), dtype=np.intp))
        states = self._read(rows, [v for v in roots if not self._is_decided(v)], open_)
        seconds = self.incumbent if states is None else float(rows.seconds.min())
        return ParetoOutcome(states, min(seconds, self.dropped), not np.isfinite(self.dropped))

    def _is_decided(self, v: int) -> bool:
        """Whether a variable has one state and no edges left: it only adds its costs."""
        return len(self.net.unary[v]) == 1 and not self.order.later[v] and not self.children[v]

    def _own(self, v: int) -> _Rows:
        """The entries of a bucket that can still win, with the costs that are its own."""
        bounds = np.stack([m.belief[v].ravel() for m in self.marginals], axis=1)
        cell = np.flatnonzero(self._alive(bounds))
        at = np.unravel_index(cell, self.marginals[0].belief[v].shape)
        seconds = self.net.unary[v][at[0]]
        for axis, w in enumerate(self.order.later[v], 1):
            if w in self.net.rows[v]:
                seconds = seconds + self.net.rows[v][w][at[0], at[axis]]
        return _Rows(cell, seconds, self.net.memory[v][at[0]], bounds[cell], cell, [])

    def _alive(self, bounds: Array) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        multiplier, seconds, held = bounds.T
        cap = self.cap
        return np.asarray((multiplier < cap[0]) & (seconds < cap[1]) & (held <= cap[2]))

    def _entries(self, v: int, cell: Indices, child: int) -> Indices:
        """Which entry of the child's message each cell of the bucket looks up."""
        at = np.unravel_index(cell, self.marginals[0].belief[v].shape)
        axis = {w: a for a, w in enumerate((v, *self.order.later[v]))}
        near = self.order.later[child]
        shape = [len(self.net.unary[w]) for w in near]
        return np.asarray(np.ravel_multi_index([at[axis[w]] for w in near], shape))

    def _join(self, rows: _Rows, child: int, entry: Indices) -> _Rows:
        """Every row with every label of the child that it may go with."""
        labels = self.done[child]
        assert labels is not None
        rows, entry = self._bounded(rows, entry, labels)
        count = labels.count[entry]
        row = np.repeat(np.arange(len(entry)), count)
        label = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count) + labels.start[entry][row]
        bound = rows.bound[row] + labels.excess[label]
        alive = np.flatnonzero(self._alive(bound))
        row, label, bound = row[alive], label[alive], bound[alive]
        joined = _Rows(
            rows.cell[row],
            rows.seconds[row] + labels.seconds[label],
            rows.held[row] + labels.held[label],
            bound,
            np.arange(len(row)),
            [*rows.trail, (rows.origin[row], label)],
        )
        if len(alive) > len(rows.cell):
            joined = joined.take(self._front(joined.cell, joined.seconds, joined.held))
        return self._thinned(joined)

    def _bounded(self, rows: _Rows, entry: Indices, labels: _Labels) -> tuple[_Rows, Indices]:
        """Drop the least promising rows of a join that would burst."""
        if labels.count[entry].sum() <= _BURST * self.limit:
            return rows, entry
        best = np.argsort(rows.bound[:, 0], kind="stable")
        fit = int(np.searchsorted(np.cumsum(labels.count[entry[best]]), _BURST * self.limit))
        keep, rest = np.sort(best[:fit]), best[fit:]
        self._drop(rows.bound[rest])
        return rows.take(keep), entry[keep]

    def _thinned(self, rows: _Rows) -> _Rows:
        if len(rows.cell) <= self.limit:
            return rows
        best = np.argsort(rows.bound[:, 0], kind="stable")
        self._drop(rows.bound[best[self.limit :]])
        return rows.take(np.sort(best[: self.limit]))

    def _drop(self, bounds: Array) -> None:
        if len(bounds):
            proven = np.maximum(bounds[:, 0] - self.offset, bounds[:, 1])
            self.dropped = min(self.dropped, float(proven.min()))

    def _send(self, v: int, rows: _Rows) -> _Labels:
        """The bucket's fronts per entry of its message, over all states of its variable."""
        ups = [m.up[v].ravel() for m in self.marginals]
        entries = len(ups[0])
        # the variable is the first axis, so a flat entry is state * entries + entry of the message
        state, entry = np.divmod(rows.cell, entries)
        keep = self._front(entry, rows.seconds, rows.held)
        rows, state, entry = rows.take(keep), state[keep], entry[keep]
        count = np.bincount(entry, minlength=entries).astype(np.intp)
        costs = (rows.seconds + self.lam * rows.held, rows.seconds, rows.held)
        excess = np.stack([np.maximum(c - up[entry], 0.0) for c, up in zip(costs, ups, strict=True)], axis=1)
        start = np.cumsum(count) - count
        return _Labels(start, count, rows.seconds, rows.held, excess, state, rows.origin, rows.trail)

    def _front(self, group: Indices, seconds: Array, held: Array) -> Indices:
        """Rows that no other row of the group beats, sorted by group and bytes."""
        tie = self.tie or 1.0
        order = np.lexsort((seconds, held, group))
        rank, ranks = _ranks(np.floor(seconds[order] / tie), len(order))
        # a later group starts below all earlier ones, so one running minimum serves them all
        number = np.cumsum(np.diff(group[order], prepend=group[order][:1]) != 0)
        key = rank - number * (ranks + 1)
        first = np.ones(len(key), dtype=np.bool_)
        first[1:] = key[1:] < np.minimum.accumulate(key)[:-1]
        return np.asarray(order[first])

    def _read(self, rows: _Rows, roots: list[int], variables: list[int]) -> list[int] | None:
        """The states of the fastest label, back from the roots; those of other variables are decided."""
        if not len(rows.cell):
            return None
        at = [0] * len(self.done)
        states = [0] * len(at)
        _follow(roots, rows.trail, int(rows.origin[np.argmin(rows.seconds)]), at)
        for v in reversed(variables):
            labels = self.done[v]
            assert labels is not None
            states[v] = int(labels.state[at[v]])
            _follow(self.children[v], labels.trail, int(labels.origin[at[v]]), at)
        return states


def _ranks(whole: Array, groups: int) -> tuple[Indices, int]:
    """(numbers in the order of these whole ones, more than the largest), small enough for so many groups."""
    if not len(whole):
        return np.zeros(0, dtype=np.intp), 0
    least = whole.min()
    span = whole.max() - least + 1
    if span * (groups + 1) < _LARGEST:
        return (whole - least).astype(np.intp), int(span)
    return np.unique(whole, return_inverse=True)[1].ravel(), len(whole)


def _follow(children: list[int], trail: list[_Step], row: int, at: list[int]) -> None:
    """Note which label of every child a row was made of."""
    for child, (previous, label) in zip(reversed(children), reversed(trail), strict=True):
        at[child] = int(label[row])
        row = int(previous[row])


def _marginals(elimination: Elimination) -> _Marginals:
    count = len(elimination.order.later)
    belief: list[Array] = [np.empty(0)] * count
    up: list[Array] = [np.empty(0)] * count
    total = 0.0
    for v, mine, below in elimination.calibrate():
        belief[v], up[v] = mine, below
        if not elimination.order.later[v]:
            total += float(below)
    return _Marginals(belief, up, total)
