"""Fewer states, same optimum: arc consistency, dominance, and folding of what is decided.

Dominance (dead-end elimination in the protein design literature: Desmet 1992, Goldstein 1994): a state
goes if another state of the variable is no dearer even after paying the worst difference on every edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from autoshard.solver.network import Array, CostNetwork, Indices

#: an edge that is a sum of two vectors up to this share of its largest entry is absorbed by its ends
_ADDITIVE = 1e-15
#: differences of one variable computed in one piece; above, likely pairs are sought first
_DENSE = 60_000
#: differences of likely pairs in one piece, which stays in the cache
_CHUNK = 100_000
_ROUNDS = 8
#: of so few states it is faster to look at each alone
_FEW = 8
#: of more states than this, those that the best ones dominate go first, as long as of so many of these each
#: has one that does; two costs as near as this are as good
_MANY, _BEST, _ROUNDING = 256, 16, 1e-12


class Contradiction(Exception):
    """Arc consistency left a variable without a state."""


class Residual:
    """What is left of a network while it is being reduced.

    unary, memory: [k_i] of the states left. kept: their original indices [k_i]. rows[i][j]: the edge
    between i and j as [k_i, k_j], stored both ways. hard: edges that hold an inf, as (low, high).
    Arrays are replaced, never written to, so copies share them.
    """

    __slots__ = ("hard", "kept", "memory", "rows", "unary")

    def __init__(self) -> None:
        self.unary: list[Array] = []
        self.memory: list[Array] = []
        self.kept: list[Indices] = []
        self.rows: list[dict[int, Array]] = []
        self.hard: set[tuple[int, int]] = set()

    @classmethod
    def of(cls, network: CostNetwork) -> Residual:
        """The full network, not yet reduced. Raises ValueError on nan and on -inf."""
        residual = cls()
        residual.unary = [np.asarray(u, dtype=np.float64) for u in network.unary]
        residual.memory = [np.asarray(m, dtype=np.float64) for m in network.memory]
        residual.kept = [np.arange(len(u)) for u in residual.unary]
        residual.rows = [{} for _ in residual.unary]
        if not _all_finite([*residual.unary, *residual.memory]):
            for i, (u, m) in enumerate(zip(residual.unary, residual.memory, strict=True)):
                if np.isnan(u).any() or (u == -np.inf).any() or not np.isfinite(m).all():
                    raise ValueError(f"variable {i} has nan or -inf seconds, or bytes that are not finite")
        tables = [np.ascontiguousarray(given, dtype=np.float64) for given in network.edges.values()]
        finite = _all_finite(tables)
        for (a, b), table in zip(network.edges, tables, strict=True):
            if not finite and not np.isfinite(table).all():
                if np.isnan(table).any() or (table == -np.inf).any():
                    raise ValueError(f"edge ({a}, {b}) has nan or -inf seconds")
                residual.hard.add((a, b))
            residual.rows[a][b] = table
            residual.rows[b][a] = np.ascontiguousarray(table.T)
        return residual

    def copy(self) -> Residual:
        residual = Residual()
        residual.unary, residual.memory, residual.kept = list(self.unary), list(self.memory), list(self.kept)
        residual.rows, residual.hard = [dict(r) for r in self.rows], set(self.hard)
        return residual

    def priced(self, lam: float) -> list[Array]:
        """Seconds + lam * bytes of every state; in one go, as most variables have few."""
        both = np.concatenate(self.unary) + lam * np.concatenate(self.memory)
        ends = [*accumulate(map(len, self.unary))]
        return [both[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    def weighted(self, lam: float) -> Residual:
        """The network of seconds + lam * bytes, without a second objective."""
        residual = self.copy()
        if lam and residual.unary:
            residual.unary = self.priced(lam)
        residual.memory = [np.zeros(len(m)) for m in self.memory]
        return residual

    def of_memory(self, *, all_edges: bool = False) -> Residual:
        """The network whose cost is bytes; what is forbidden stays so. Edges that forbid nothing go."""
        residual = self.copy()
        residual.unary = [
            np.where(np.isfinite(u), m, np.inf) for u, m in zip(self.unary, self.memory, strict=True)
        ]
        residual.memory = [np.zeros(len(m)) for m in self.memory]
        residual.rows = [{} for _ in self.rows]
        every = ((a, b) for a, row in enumerate(self.rows) for b in row if a < b)
        for a, b in every if all_edges else sorted(self.hard):
            table = np.where(np.isfinite(self.rows[a][b]), 0.0, np.inf)
            residual.rows[a][b], residual.rows[b][a] = table, np.ascontiguousarray(table.T)
        return residual

    @property
    def sizes(self) -> list[int]:
        return [len(u) for u in self.unary]

    def is_hard(self, i: int, j: int) -> bool:
        return ((i, j) if i < j else (j, i)) in self.hard

    def shrink(self, i: int, keep: Indices) -> None:
        """Keep only these states of variable i."""
        self.unary[i], self.memory[i] = self.unary[i][keep], self.memory[i][keep]
        self.kept[i] = self.kept[i][keep]
        for j, table in self.rows[i].items():
            self.rows[i][j] = table[keep]
            self.rows[j][i] = self.rows[j][i].take(keep, axis=1)

    def drop_edge(self, i: int, j: int) -> None:
        del self.rows[i][j], self.rows[j][i]
        self.hard.discard((i, j) if i < j else (j, i))

    def undecided(self) -> tuple[Residual, list[int]]:
        """The variables with several states, renumbered, and their numbers here.

        The others must have been folded into their neighbours.
        """
        numbers = [i for i, u in enumerate(self.unary) if len(u) > 1]
        return self.only(numbers), numbers

    def only(self, numbers: Sequence[int]) -> Residual:
        """These variables, renumbered, which have no edges with others."""
        new = {i: k for k, i in enumerate(numbers)}
        residual = Residual()
        residual.unary, residual.memory = [self.unary[i] for i in numbers], [self.memory[i] for i in numbers]
        residual.kept = [self.kept[i] for i in numbers]
        residual.rows = [{new[j]: table for j, table in self.rows[i].items()} for i in numbers]
        residual.hard = {(new[a], new[b]) for a, b in self.hard}
        return residual

    def original(self, states: Iterable[int]) -> tuple[int, ...]:
        """States of the residual in the original numbering."""
        return tuple(int(k[s]) for k, s in zip(self.kept, states, strict=True))


def _all_finite(arrays: list[Array]) -> bool:
    """In one go: most arrays are small."""
    return not arrays or bool(np.isfinite(np.concatenate([a.ravel() for a in arrays])).all())


def make_consistent(net: Residual) -> None:
    """Remove states that no assignment of finite time can have, as far as single edges tell (AC-3)."""
    if not _all_finite(net.unary):
        for i, u in enumerate(net.unary):
            finite = np.isfinite(u)
            if not finite.all():
                net.shrink(i, np.flatnonzero(finite))
    if not all(map(len, net.unary)):
        raise Contradiction
    around: dict[int, list[int]] = {}
    for a, b in sorted(net.hard):
        around.setdefault(a, []).append(b)
        around.setdefault(b, []).append(a)
    queue = _unsupported(net)
    waiting = set(queue)
    for i in queue:
        waiting.discard(i)
        if _support(net, i, around[i]):
            new = [j for j in around[i] if j not in waiting]
            waiting.update(new)
            queue.extend(new)


def _unsupported(net: Residual) -> list[int]:
    """Variables with a state that has no finite partner on some edge, all edges looked at in one go."""
    ends = [end for a, b in sorted(net.hard) for end in ((a, b), (b, a))]
    if not ends:
        return []
    tables = [net.rows[i][j] for i, j in ends]
    heights = [len(table) for table in tables]
    widths = np.repeat([table.shape[1] for table in tables], heights)
    least = np.minimum.reduceat(
        np.concatenate([table.ravel() for table in tables]), np.cumsum(widths) - widths
    )
    alone = np.repeat([i for i, _ in ends], heights)[~np.isfinite(least)]
    return [int(i) for i in np.unique(alone)]


def _support(net: Residual, i: int, around: list[int]) -> bool:
    """Keep the states of i with a finite partner on every edge; whether any went."""
    alive = np.ones(len(net.unary[i]), dtype=np.bool_)
    for j in around:
        alive &= np.isfinite(net.rows[i][j]).any(axis=1)
    if alive.all():
        return False
    if not alive.any():
        raise Contradiction
    net.shrink(i, np.flatnonzero(alive))
    return True


def fold_decided(net: Residual) -> None:
    """Fold variables with one state into their neighbours, and absorb edges that decide nothing."""
    with np.errstate(invalid="ignore"):
        for i in range(len(net.unary)):
            _simplify(net, i)


def prune(net: Residual) -> None:
    """Remove dominated states in place until nothing changes, or for a few rounds.

    A state must be dominated in seconds and in bytes, so the optimum of every multiplier and under every
    budget survives; with all bytes zero this is the dominance of one objective. The network must be
    arc consistent, and stays so.
    """
    fold_decided(net)
    with np.errstate(invalid="ignore"):
        dirty = set(range(len(net.unary)))
        # where nothing holds bytes, they dominate nothing
        bytes_too = bool(net.memory) and bool(np.concatenate(net.memory).any())
        for _ in range(_ROUNDS):
            if not dirty:
                return
            todo, dirty = sorted(dirty), set()
            for i in todo:
                if len(net.unary[i]) > 1 and _prune_variable(net, i, bytes_too):
                    dirty.update(net.rows[i])
                    dirty.update((i,) if len(net.unary[i]) > 1 else ())
                    _simplify(net, i)


def _prune_variable(net: Residual, i: int, bytes_too: bool) -> bool:
    """Whether states of a variable went. bytes_too: whether any state of the network holds bytes."""
    went = len(net.unary[i]) > _MANY and _remove_worse_than_best(net, i)
    tables = [net.unary[i][None], *[net.rows[j][i] for j in net.rows[i]]]
    heights = [len(table) for table in tables]
    dense = len(net.unary[i]) ** 2 * (sum(heights) - 1) <= _DENSE
    memory = net.memory[i] if bytes_too else None
    dominates = _dominance(tables, heights, memory) if dense else _dominance_of_pairs(net, i)
    dominates.ravel()[:: len(dominates) + 1] = False
    if not np.count_nonzero(dominates):
        return went
    net.shrink(i, survivors(dominates))
    return True


def _dominance(tables: list[Array], heights: list[int], m: Array | None) -> NDArray[np.bool_]:
    """[t, s]: whether state t makes state s superfluous.

    tables: seconds [1, states] of the variable itself and [heights, states] with each neighbour. m: bytes,
    None if no state holds any.
    """
    starts = [0, *accumulate(heights[:-1])]
    rows = np.concatenate(tables)
    # where both are forbidden the difference is nan, which fmax passes over
    worst = np.add.reduce(np.fmax.reduceat(rows[:, :, None] - rows[:, None, :], starts))
    cheaper = np.asarray(worst <= 0.0)
    return cheaper if m is None else cheaper & (m[:, None] <= m)


def _remove_worse_than_best(net: Residual, i: int) -> bool:
    """Remove what the states that look best dominate, one after the other, as long as that removes more than
    it looks at: of many states most pairs need no look then. Returns whether any went.

    What is as good up to rounding only goes behind a state before it, as in `survivors`.
    """
    u, m, backs = net.unary[i], net.memory[i], [net.rows[j][i] for j in net.rows[i]]
    forbidden, remaining = np.zeros(len(u)), u.copy()
    for back in backs:
        finite = np.isfinite(back)
        forbidden += len(back) - np.count_nonzero(finite, axis=0)
        remaining += np.where(finite, back, 0.0).sum(axis=0) / len(back)
    near = _ROUNDING * float(np.abs(remaining).max())
    others, removed = np.arange(len(u)), 0
    alive = np.ones(len(u), dtype=np.bool_)
    for count, state in enumerate(s for s in np.lexsort((remaining, forbidden)).tolist() if alive[s]):
        if count % _BEST == 0:
            if count and removed < _BEST:
                break
            removed, others = 0, np.flatnonzero(alive)
            left = [back[:, others] for back in backs]
        worst = u[state] - u[others]
        for back, rest in zip(backs, left, strict=True):
            worst += np.fmax.reduce(back[:, state, None] - rest, axis=0)
        over = (worst < -near) | ((worst <= 0.0) & (others > state))
        gone = others[over & (m[state] <= m[others])]
        removed += int(np.count_nonzero(alive[gone]))
        alive[gone] = False
    went = not alive.all()
    if went:
        net.shrink(i, np.flatnonzero(alive))
    return went


def _dominance_of_pairs(net: Residual, i: int) -> NDArray[np.bool_]:
    """The same for many states: a few columns of every edge rule out most pairs first."""
    u, m = net.unary[i], net.memory[i]
    least = u[:, None] - u
    for j in net.rows[i]:
        back = net.rows[j][i]
        some = back[:: max(1, len(back) // 4)]
        least = least + np.fmax.reduce(some[:, :, None] - some[:, None, :], axis=0)
    likely = ~(least > 0.0) & (m[:, None] <= m)
    np.fill_diagonal(likely, False)
    better, worse = np.nonzero(likely)
    dominated = np.zeros_like(likely)
    step = max(1, _CHUNK // max((len(net.unary[j]) for j in net.rows[i]), default=1))
    for at in range(0, len(better), step):
        t, s = better[at : at + step], worse[at : at + step]
        worst = u[t] - u[s]
        for table in net.rows[i].values():
            apart = table[t]
            apart -= table[s]
            worst += np.fmax.reduce(apart, axis=1)
        dominated[t, s] = worst <= 0.0
    return dominated


def survivors(dominates: NDArray[np.bool_]) -> Indices:
    """States to keep where some are dominated. Of equal states the first stays."""
    count = len(dominates)
    if count == 2:
        return np.array([0 if dominates[0, 1] else 1])
    if count <= _FEW:
        return _few_survivors(dominates.tolist())
    number = np.arange(count)
    gone = (dominates & (~dominates.T | (number[:, None] < number))).any(axis=0)
    left = ~gone
    if gone.all() or not (dominates[left].any(axis=0) | left).all():
        # rounding can close a circle of nearly equal states; one after the other cannot
        alive = np.ones(count, dtype=np.bool_)
        for s in range(count - 1, -1, -1):
            alive[s] = not (dominates[:, s] & alive).any()
        return np.flatnonzero(alive)
    return np.flatnonzero(left)


def _few_survivors(dominates: list[list[bool]]) -> Indices:
    """The same, one state after the other."""
    number = range(len(dominates))
    gone = [any(dominates[t][s] and (t < s or not dominates[s][t]) for t in number if t != s) for s in number]
    left = [s for s in number if not gone[s]]
    if not all(any(dominates[t][s] for t in left) for s in number if gone[s]):
        alive = [True] * len(dominates)
        for s in reversed(number):
            alive[s] = not any(dominates[t][s] and alive[t] for t in number)
        left = [s for s in number if alive[s]]
    return np.array(left)


def _simplify(net: Residual, i: int) -> None:
    """Fold a decided variable into its neighbours, and absorb edges that are a sum of two vectors."""
    for j in list(net.rows[i]):
        table = net.rows[i][j]
        if len(table) == 1:
            net.unary[j] = net.unary[j] + table[0]
            net.drop_edge(i, j)
        elif table.shape[1] == 1:
            net.unary[i] = net.unary[i] + table[:, 0]
            net.drop_edge(i, j)
        elif _is_soft(net, i, j) and _is_additive(table):
            net.unary[i] = net.unary[i] + table[:, 0]
            net.unary[j] = net.unary[j] + (table[0] - table[0, 0])
            net.drop_edge(i, j)


def _is_soft(net: Residual, i: int, j: int) -> bool:
    """Whether nothing is forbidden on an edge (any more)."""
    if not net.is_hard(i, j):
        return True
    if not np.isfinite(net.rows[i][j]).all():
        return False
    net.hard.discard((i, j) if i < j else (j, i))
    return True


def _is_additive(table: Array) -> bool:
    corner, opposite = table.item(0, 0), table.item(-1, -1)
    off = abs(opposite - table.item(-1, 0) - table.item(0, -1) + corner)
    if not off <= _ADDITIVE * (abs(opposite) + abs(corner)):
        return False
    sums = table[:, :1] + (table[:1] - corner)
    return bool(np.abs(table - sums).max() <= _ADDITIVE * np.abs(table).max())
