"""What is left of a network that is too wide to eliminate, once all that is easily eliminated is gone.

Variables with at most two neighbours are most of a network. Eliminating them is exact, takes a moment, and
is how an order of elimination begins anyway. Bounds, moves and neighbourhoods then only look at the few
variables in which the network is wide, each of whose states stands for the best of all around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from autoshard.search.network import Array
from autoshard.search.order import Order
from autoshard.search.prune import Residual

#: neighbours of a variable that is eliminated: what comes of it is an edge at most
_FEW = 2


@dataclass(frozen=True, eq=False)
class Core:
    """The variables that are left. net: their costs, which hold those of the others, and no bytes. order: of
    its elimination. numbers: theirs in the whole network.

    seconds: of what is tied to none of them. gone: the others, the last eliminated first: number, seconds
    [k], and with each neighbour that was left then [k, k of the neighbour].
    """

    net: Residual
    order: Order
    numbers: tuple[int, ...]
    seconds: float
    gone: tuple[tuple[int, Array, dict[int, Array]], ...]

    @staticmethod
    def of(net: Residual, order: Order) -> Core:
        """Of a network and its order of elimination, which is followed until a table would be needed."""
        unary, rows = list(net.unary), [dict(row) for row in net.rows]
        gone: list[tuple[int, Array, dict[int, Array]]] = []
        seconds = 0.0
        for v in order.variables:
            near = order.later[v]
            if len(near) > _FEW:
                break
            cost, row = unary[v], rows[v]
            gone.append((v, cost, row))
            for w in near:
                del rows[w][v]
            if not near:
                seconds += float(cost.min())
            elif len(near) == 1:
                unary[near[0]] = unary[near[0]] + np.minimum.reduce(row[near[0]] + cost[:, None])
            else:
                a, b = near
                both = np.minimum.reduce((cost[:, None] + row[a])[:, :, None] + row[b][:, None, :])
                both = rows[a][b] + both if b in rows[a] else both
                rows[a][b], rows[b][a] = both, np.ascontiguousarray(both.T)
        numbers = tuple(sorted(order.variables[len(gone) :]))
        left = Residual()
        left.unary, left.rows = unary, rows
        left.memory, left.kept = [np.zeros(len(u)) for u in unary], [np.arange(len(u)) for u in unary]
        edges = ((v, w, table) for v in numbers for w, table in rows[v].items() if v < w)
        left.hard = {(v, w) for v, w, table in edges if not np.isfinite(table).all()}
        return Core(
            left.only(numbers), _rest(order, numbers, net.sizes), numbers, seconds, tuple(reversed(gone))
        )

    def whole(self, states: Sequence[int]) -> list[int]:
        """States of all variables, given those of the core: the others as is best for them."""
        found = [0] * (len(self.numbers) + len(self.gone))
        for v, s in zip(self.numbers, states, strict=True):
            found[v] = s
        for v, cost, row in self.gone:
            for w, table in row.items():
                cost = cost + table[:, found[w]]
            found[v] = int(cost.argmin())
        return found


def _rest(order: Order, numbers: Sequence[int], sizes: Sequence[int]) -> Order:
    """The end of an order of elimination, its variables renumbered."""
    new = {v: k for k, v in enumerate(numbers)}
    later = tuple([tuple([new[w] for w in order.later[v]]) for v in numbers])
    tables = [sizes[v] * prod([sizes[w] for w in order.later[v]]) for v in numbers]
    variables = tuple([new[v] for v in order.variables[len(order.variables) - len(numbers) :]])
    width = max(map(len, later), default=0)
    return Order(variables, later, width, max(tables, default=0), sum(tables))
