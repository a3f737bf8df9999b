"""Good assignments of networks too wide to eliminate: constraint propagation, then exact neighbourhoods.

`dive` finds some finite assignment: states are tried cheapest first, and after each choice all states that
no longer have a finite partner are taken out (maintaining arc consistency, Sabin and Freuder 1994). `widen`
improves it: with some variables held as they are the rest is narrow enough to be solved exactly, and the
held ones change from round to round (large neighbourhood search, Shaw 1998).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.solver.eliminate import Elimination
from autoshard.solver.elimination_order import Order, order_beside
from autoshard.solver.improvement_moves import Meter
from autoshard.solver.network import Array, Limits
from autoshard.solver.prune import Residual

Mask = NDArray[np.bool_]
#: choices taken back before `dive` gives up
_FAILURES = 2000
#: neighbourhoods tried, and those in a row that gain nothing after which it ends
_ROUNDS, _IDLE = 16, 3
#: entries of the largest table of one neighbourhood, and how many times as many in all
_TABLE, _ALL = 500_000, 20


@dataclass
class _Dive:
    net: Residual
    alive: list[Mask]
    trail: list[tuple[int, Mask]]

    def keep(self, v: int, mask: Mask) -> None:
        self.trail.append((v, self.alive[v]))
        self.alive[v] = mask

    def undo(self, length: int) -> None:
        while len(self.trail) > length:
            v, mask = self.trail.pop()
            self.alive[v] = mask

    def propagate(self, changed: Sequence[int]) -> bool:
        """Take out states without a finite partner; False if a variable has none left."""
        todo = deque(changed)
        while todo:
            v = todo.popleft()
            for j, table in self.net.rows[v].items():
                if (min(v, j), max(v, j)) not in self.net.hard:
                    continue
                left = self.alive[j] & np.isfinite(table[self.alive[v]]).any(axis=0)
                if not left.any():
                    return False
                if (left != self.alive[j]).any():
                    self.keep(j, left)
                    todo.append(j)
        return True

    def ranked(self, v: int, states: Sequence[int | None]) -> list[int]:
        """States left of v, the one that looks cheapest last."""
        cost: Array = np.where(self.alive[v], self.net.unary[v], np.inf)
        for j, table in self.net.rows[v].items():
            chosen = states[j]
            cost = cost + (table[:, chosen] if chosen is not None else table[:, self.alive[j]].min(axis=1))
        order = np.argsort(-cost, kind="stable")
        return [int(s) for s in order if self.alive[v][s]]


def dive(net: Residual, path: Sequence[int]) -> list[int] | None:
    """Some assignment with finite cost, variables in the order of ``path``; None if none was found."""
    work = _Dive(net, [np.isfinite(u) for u in net.unary], [])
    if not all(mask.any() for mask in work.alive) or not work.propagate(range(len(net.unary))):
        return None
    states: list[int | None] = [None] * len(net.unary)
    stack: list[tuple[int, list[int], int]] = []
    failures = 0
    while len(stack) < len(path):
        v = path[len(stack)]
        stack.append((v, work.ranked(v, states), len(work.trail)))
        while stack:
            v, left, mark = stack[-1]
            work.undo(mark)
            states[v] = None
            if not left:
                stack.pop()
                failures += 1
                if failures > _FAILURES:
                    return None
                continue
            states[v] = left.pop()
            only = np.zeros_like(work.alive[v])
            only[states[v]] = True
            work.keep(v, only)
            if work.propagate([v]):
                break
            failures += 1
        if not stack:
            return None
    return [s for s in states if s is not None]


def widen(net: Residual, order: Order, states: Sequence[int], limits: Limits) -> list[int]:
    """The assignment improved by solving neighbourhoods exactly, until a few of them gain nothing."""
    best, meter = list(states), Meter(net)
    seconds = meter.of(best)[0]
    rng = np.random.default_rng(0)
    table = min(limits.table, _TABLE)
    idle = 0
    for _ in range(_ROUNDS):
        eagerness = rng.uniform(0.2, 1.0, len(best)).tolist()
        small, held = order_beside(order, net.sizes, net.rows, eagerness, table, _ALL * table)
        _, tried = Elimination(_holding(net, best, held), small).solve()
        for v in held:
            tried[v] = best[v]
        now = meter.of(tried)[0]
        idle = 0 if now < seconds else idle + 1
        if now < seconds:
            best, seconds = tried, now
        if idle == _IDLE or not held:
            break
    return best


def _holding(net: Residual, states: Sequence[int], held: Sequence[int]) -> Residual:
    """The network with one state left of every held variable, whose costs lie with those around it."""
    part = net.copy()
    for v in held:
        s = states[v]
        part.unary[v], part.memory[v] = part.unary[v][s : s + 1], part.memory[v][s : s + 1]
        for j, table in part.rows[v].items():
            del part.rows[j][v]
            part.unary[j] = part.unary[j] + table[s]
        part.rows[v].clear()
    return part
