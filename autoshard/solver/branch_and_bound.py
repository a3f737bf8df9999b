"""Depth-first branch and bound with mini-bucket bounds, for networks too wide to eliminate.

Mini-buckets (Dechter and Rish 2003) split a bucket that would be too large and minimise its parts apart:
the result can only be too low. Their messages, read downwards, bound every completion of a partial
assignment (Kask and Dechter 2001).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from autoshard.solver.eliminate import Factor, column
from autoshard.solver.elimination_order import Order
from autoshard.solver.network import Array
from autoshard.solver.prune import Residual


@dataclass(frozen=True)
class MiniBuckets:
    """Bounds for one kind of cost.

    value: a lower bound on the total. buckets: per variable, the factors it is the first of. sent: per
    variable, the messages its mini-buckets handed on.
    """

    value: float
    buckets: list[list[Factor]]
    sent: list[list[Factor]]


def mini_buckets(net: Residual, order: Order, limit: int) -> MiniBuckets:
    """Approximate elimination with no table above ``limit`` entries (or that of a single edge)."""
    at = {v: p for p, v in enumerate(order.variables)}
    sizes = net.sizes
    buckets: list[list[Factor]] = [[((v,), u)] for v, u in enumerate(net.unary)]
    for i, row in enumerate(net.rows):
        buckets[i].extend(((i, j), table) for j, table in row.items() if at[i] < at[j])
    sent: list[list[Factor]] = [[] for _ in buckets]
    value = 0.0
    for v in order.variables:
        for scope, total in _groups(buckets[v], sizes, at, limit):
            message = np.asarray(total.min(axis=0))
            sent[v].append((scope[1:], message))
            if len(scope) > 1:
                buckets[scope[1]].append(sent[v][-1])
            else:
                value += float(message)
    return MiniBuckets(value, buckets, sent)


def _groups(factors: list[Factor], sizes: Sequence[int], at: dict[int, int], limit: int) -> list[Factor]:
    """Sums of factors, as few as fit the limit; larger factors are placed first."""
    groups: list[tuple[set[int], list[Factor]]] = []
    for scope, table in sorted(factors, key=lambda f: -len(f[0])):
        for inside, members in groups:
            if prod(sizes[w] for w in inside.union(scope)) <= limit:
                inside.update(scope)
                members.append((scope, table))
                break
        else:
            groups.append((set(scope), [(scope, table)]))
    return [_sum(tuple(sorted(inside, key=at.__getitem__)), members) for inside, members in groups]


def _sum(scope: tuple[int, ...], members: list[Factor]) -> Factor:
    total: Array = np.zeros((1,) * len(scope))
    for own, table in sorted(members, key=lambda f: len(f[0])):
        total = total + table.reshape([table.shape[own.index(w)] if w in own else 1 for w in scope])
    return scope, total


@dataclass(frozen=True)
class Criterion:
    """A cost that must not exceed a cap; with follow, that must stay below the best time.

    offset is added to the bounds.
    """

    bounds: MiniBuckets
    offset: float = 0.0
    cap: float = np.inf
    follow: bool = True


@dataclass(frozen=True)
class Branched:
    """What branch and bound found.

    states: the best, or None. lower_bound: on the first criterion over everything that was not looked at,
    never above the best. complete: whether nothing was left out.
    """

    states: list[int] | None
    seconds: float
    lower_bound: float
    complete: bool


@dataclass
class _Frame:
    """Choices left at one depth: states, best last, and their bounds [choices, criteria]."""

    states: list[int]
    bounds: Array


def depth_first(
    order: Order, criteria: Sequence[Criterion], best: float = np.inf, nodes: int | None = None
) -> Branched:
    """Search for less than ``best`` seconds. The last criterion that follows must be the time itself.

    The first criterion says which state to try first. nodes: how many to look at; None for all of them.
    """
    path = order.variables[::-1]
    timed = max(c for c, criterion in enumerate(criteria) if criterion.follow)
    states = [0] * len(path)
    incumbent: list[int] | None = None
    start = np.array([c.bounds.value + c.offset for c in criteria])
    if not path:
        return Branched([], 0.0, 0.0, True)
    stack = [_expand(path[0], states, start, criteria, best)]
    looked = 0
    while stack:
        if nodes is not None and looked >= nodes:
            bound = min((_open_bound(f, criteria) for f in stack), default=np.inf)
            return Branched(incumbent, best, min(best, bound), False)
        frame = stack[-1]
        if not frame.states:
            stack.pop()
            continue
        s, bounds = frame.states.pop(), frame.bounds[len(frame.states)]
        if not _open(bounds, criteria, best):
            continue
        looked += 1
        states[path[len(stack) - 1]] = s
        if len(stack) == len(path):
            best, incumbent = float(bounds[timed]), list(states)
        else:
            stack.append(_expand(path[len(stack)], states, bounds, criteria, best))
    return Branched(incumbent, best, best, True)


def _open(bounds: Array, criteria: Sequence[Criterion], best: float) -> bool:
    return all(b < best if c.follow else b <= c.cap for b, c in zip(bounds, criteria, strict=True))


def _open_bound(frame: _Frame, criteria: Sequence[Criterion]) -> float:
    follow = [c for c, criterion in enumerate(criteria) if criterion.follow]
    left = frame.bounds[: len(frame.states)]
    return float(left[:, follow].max(axis=1).min()) if len(left) else np.inf


def _expand(
    v: int, states: Sequence[int], bounds: Array, criteria: Sequence[Criterion], best: float
) -> _Frame:
    """The states of v worth trying, given those of all variables after it."""
    columns = []
    for base, criterion in zip(bounds, criteria, strict=True):
        given = criterion.bounds
        # what the messages promised for v is replaced by what its states cost
        promised = sum(float(t[tuple(states[w] for w in scope)]) for scope, t in given.sent[v])
        cost: Array = np.zeros(1)
        for scope, table in given.buckets[v]:
            cost = cost + column(table, [states[w] for w in scope[1:]])
        columns.append(base - promised + cost)
    table = np.stack(columns, axis=1)
    worth = [s for s in range(len(table)) if _open(table[s], criteria, best)]
    worth.sort(key=lambda s: (-table[s, 0], -s))
    return _Frame(worth, table[worth])
