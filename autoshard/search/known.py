"""Solutions of one problem by the weights of its terms, since stages ask for the same network again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from autoshard.search.direct import Orders
from autoshard.search.network import Array, Limits, Solution

Weights: TypeAlias = tuple[float, ...]


class Known:
    """What was solved: weights of seconds, of bytes with the budget (None without one), limits -> solution.

    orders: of elimination of its networks. What pins leave is compared by identity: a problem has one set of
    masks, or few.
    """

    def __init__(self, orders: Orders | None = None) -> None:
        self.orders = orders or Orders()
        self._found: dict[object, list[tuple[tuple[Array | None, ...], Solution]]] = {}

    def get(
        self, times: Weights, held: Weights | None, limits: Limits | None, allowed: Sequence[Array | None]
    ) -> Solution | None:
        """The solution, or None if there is none yet."""
        for masks, solution in self._found.get((times, held, limits), ()):
            if len(masks) == len(allowed) and all(a is b for a, b in zip(masks, allowed, strict=True)):
                return solution
        return None

    def put(
        self,
        times: Weights,
        held: Weights | None,
        limits: Limits | None,
        allowed: Sequence[Array | None],
        solution: Solution,
    ) -> None:
        self._found.setdefault((times, held, limits), []).append((tuple(allowed), solution))
