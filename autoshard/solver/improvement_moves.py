"""Better assignments from good ones, by moves that keep within the budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.solver.network import Array
from autoshard.solver.prune import Residual

_SWEEPS = 20


class Meter:
    """Seconds and bytes of many assignments of one residual; always summed in the same order."""

    def __init__(self, net: Residual) -> None:
        self._seconds = [u.item for u in net.unary]
        self._bytes = [m.item for m in net.memory]
        rows = ([(j, table.item) for j, table in row.items() if i < j] for i, row in enumerate(net.rows))
        self._rows = [(i, row) for i, row in enumerate(rows) if row]

    def of(self, states: Sequence[int]) -> tuple[float, float]:
        """(seconds, bytes) of states of the residual; forbidden is inf."""
        seconds = sum([at(s) for at, s in zip(self._seconds, states, strict=True)])
        for i, row in self._rows:
            s = states[i]
            seconds += sum([at(s, states[j]) for j, at in row])
        return seconds, sum([at(s) for at, s in zip(self._bytes, states, strict=True)], 0.0)


def measure(net: Residual, states: Sequence[int]) -> tuple[float, float]:
    """The same for a single assignment."""
    return Meter(net).of(states)


def descend(
    net: Residual, states: Sequence[int], budget: float = np.inf, meter: Meter | None = None
) -> list[int]:
    """Coordinate descent: move one variable at a time to its best state that fits, until none moves.

    Less time counts first, then less memory, then the lower index. meter: of the residual, if there is one.
    """
    states_ = list(states)
    slack = budget - (meter or Meter(net)).of(states_)[1]
    dirty = {i for i, u in enumerate(net.unary) if len(u) > 1}
    for _ in range(_SWEEPS):
        todo, dirty = sorted(dirty), set()
        for i in todo:
            cost = _cost_around(net, i, states_)
            now, held = states_[i], net.memory[i]
            if slack >= 0 and np.count_nonzero(cost <= cost[now]) == 1:
                continue  # nothing is as good as what there is
            cost = np.where(held - held[now] <= slack, cost, np.inf)
            best = int(np.lexsort((held, cost))[0])
            if (cost[best], held[best]) < (cost[now], held[now]):
                slack -= float(held[best] - held[now])
                states_[i] = best
                dirty.update(j for j in net.rows[i] if len(net.unary[j]) > 1)
    return states_


def _cost_around(net: Residual, i: int, states: Sequence[int]) -> Array:
    """Seconds of every state of i, its neighbours being as they are. [k_i]"""
    cost = net.unary[i]
    for j, table in net.rows[i].items():
        cost = cost + table[:, states[j]]
    return cost


def squeeze(
    net: Residual, states: Sequence[int], budget: float, meter: Meter | None = None
) -> list[int] | None:
    """Save bytes, one variable at a time and the cheapest per byte first, until the budget is met.

    None when single moves do not lead there.
    """
    states_ = list(states)
    held = (meter or Meter(net)).of(states_)[1]
    moves = {i: _cheapest_saving(net, i, states_) for i in range(len(states_))}
    while held > budget:
        price, i, s = min(moves.values(), default=(np.inf, 0, 0))
        if not np.isfinite(price):
            return None
        held += float(net.memory[i][s] - net.memory[i][states_[i]])
        states_[i] = s
        for j in (i, *net.rows[i]):
            moves[j] = _cheapest_saving(net, j, states_)
    return states_


def _cheapest_saving(net: Residual, i: int, states: Sequence[int]) -> tuple[float, int, int]:
    """(seconds per byte saved, i, state) of the best move of variable i that saves bytes."""
    if len(net.unary[i]) == 1:
        return np.inf, i, 0
    cost, now = _cost_around(net, i, states), states[i]
    saved = net.memory[i][now] - net.memory[i]
    price = np.full(len(cost), np.inf)
    np.divide(cost - cost[now], saved, out=price, where=saved > 0.0)
    best = int(price.argmin())
    return float(price[best]), i, best


def blend(
    net: Residual, fits: Sequence[int], fast: Sequence[int], budget: float, meter: Meter | None = None
) -> list[int]:
    """Go from an assignment that fits towards a faster one, as far as the budget allows.

    Variables in which the two differ fall into connected parts that can change independently of each
    other: those that win most go first.
    """
    states = list(fits)
    meter = meter or Meter(net)
    seconds, held = meter.of(states)
    parts: list[tuple[float, float, list[int]]] = []
    for part in _differing_parts(net, fits, fast):
        trial = list(fits)
        for i in part:
            trial[i] = fast[i]
        t, m = meter.of(trial)
        if t < seconds:
            parts.append((t - seconds, m - held, part))
    for _, extra, part in sorted(parts):
        if held + extra <= budget:
            held += extra
            for i in part:
                states[i] = fast[i]
    return states


def _differing_parts(net: Residual, one: Sequence[int], other: Sequence[int]) -> list[list[int]]:
    left = {i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b}
    parts = []
    for start in sorted(left):
        if start not in left:
            continue
        left.remove(start)
        part = [start]
        for i in part:
            new = [j for j in net.rows[i] if j in left]
            left.difference_update(new)
            part.extend(new)
        parts.append(sorted(part))
    return parts
