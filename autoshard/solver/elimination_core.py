"""What is left of a network once all that is tied to few others is eliminated.

Variables with at most two neighbours are most of a network. Eliminating them is exact, takes a moment, and
is how any good order of elimination begins. Pruning, bounds, moves and neighbourhoods then only look at the
few variables in which the network is wide, each of whose states stands for the best of all around it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from autoshard.solver.network import Array
from autoshard.solver.prune import Residual

#: neighbours of a variable that is eliminated: what comes of it is an edge at most
_FEW = 2
#: of more joint states of a variable and its neighbours, pruning first takes less time
_MOST = 20_000


@dataclass(frozen=True, eq=False)
class Core:
    """The variables that are left. net: their costs, which hold those of the others, and no bytes. numbers:
    theirs in the full network.

    seconds: of what is tied to none of them. gone: the others, the last eliminated first: number, seconds
    [k], and with each neighbour that was left then [k, k of the neighbour].
    """

    net: Residual
    numbers: tuple[int, ...]
    seconds: float
    gone: tuple[tuple[int, Array, dict[int, Array]], ...]

    @staticmethod
    def of(net: Residual) -> Core:
        """Of a network, whose bytes are ignored; it stays as it is."""
        unary, rows = list(net.unary), [dict(row) for row in net.rows]
        gone: list[tuple[int, Array, dict[int, Array]]] = []
        seconds = 0.0
        left = dict.fromkeys(range(len(rows)))
        todo = deque(v for v, row in enumerate(rows) if len(row) <= _FEW)
        while todo:
            v = todo.popleft()
            cost, row = unary[v], rows[v]
            if v not in left or len(row) > _FEW or len(cost) * _joint(row) > _MOST:
                continue
            del left[v]
            gone.append((v, cost, row))
            for w in row:
                del rows[w][v]
            match tuple(row.items()):
                case ():
                    seconds += float(cost.min())
                case ((w, table),):
                    unary[w] = unary[w] + np.minimum.reduce(table + cost[:, None])
                case ((a, first), (b, second)):
                    both = np.minimum.reduce((cost[:, None] + first)[:, :, None] + second[:, None, :])
                    both = rows[a][b] + both if b in rows[a] else both
                    rows[a][b], rows[b][a] = both, np.ascontiguousarray(both.T)
            todo.extend(w for w in row if len(rows[w]) <= _FEW)
        numbers = tuple(left)
        residual = Residual()
        residual.unary, residual.rows = unary, rows
        residual.memory, residual.kept = [np.zeros(len(u)) for u in unary], [np.arange(len(u)) for u in unary]
        edges = ((v, w, table) for v in numbers for w, table in rows[v].items() if v < w)
        residual.hard = {(v, w) for v, w, table in edges if not np.isfinite(table).all()}
        return Core(residual.only(numbers), numbers, seconds, tuple(reversed(gone)))

    def whole(self, states: Sequence[int]) -> list[int]:
        """States of all variables, given those of the core: the others as is best for them."""
        full = [0] * (len(self.numbers) + len(self.gone))
        for v, s in zip(self.numbers, states, strict=True):
            full[v] = s
        for v, cost, row in self.gone:
            for w, table in row.items():
                cost = cost + table[:, full[w]]
            full[v] = int(cost.argmin())
        return full


def _joint(row: dict[int, Array]) -> int:
    """Joint states of the neighbours."""
    return prod([table.shape[1] for table in row.values()])
