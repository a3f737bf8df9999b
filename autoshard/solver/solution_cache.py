"""Solutions of one problem by the weights of its terms, since stages ask for the same network again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypeVar

from autoshard.solver.network import Array, CostNetwork, Limits, Solution
from autoshard.solver.reduced_network import Reduction
from autoshard.solver.single_elimination import Orders

T = TypeVar("T")
Weights: TypeAlias = tuple[float, ...]

#: a variable takes as long as so many states more
_ALONE = 10


class SolutionCache:
    """What was solved: weights of seconds, of bytes with the budget (None without one), limits -> solution.

    orders: of elimination of its networks. What pins leave is compared by identity: a problem has one set of
    masks, or few. work: states and variables of networks, as often as these were solved.
    """

    def __init__(self, orders: Orders | None = None) -> None:
        self.orders = orders or Orders()
        self.work = 0
        self._cache: dict[object, list[tuple[tuple[Array | None, ...], Solution]]] = {}
        self._reduced: dict[object, list[tuple[tuple[Array | None, ...], Reduction]]] = {}

    def get(
        self, times: Weights, held: Weights | None, limits: Limits | None, allowed: Sequence[Array | None]
    ) -> Solution | None:
        """The solution, or None if there is none yet."""
        return _of_masks(self._cache.get((times, held, limits), ()), allowed)

    def reduction(self, times: Weights, held: Weights, allowed: Sequence[Array | None]) -> Reduction:
        """What is left of a network after pruning, to be filled in by whoever prunes it first.

        held: weights of bytes; the budget decides nothing yet.
        """
        entries = self._reduced.setdefault((times, held), [])
        cached = _of_masks(entries, allowed)
        if cached is None:
            cached = Reduction()
            entries.append((tuple(allowed), cached))
        return cached

    def count(self, network: CostNetwork, times: int = 1) -> None:
        """A network is solved so many times."""
        self.work += times * sum([_ALONE + len(u) for u in network.unary])

    def put(
        self,
        times: Weights,
        held: Weights | None,
        limits: Limits | None,
        allowed: Sequence[Array | None],
        solution: Solution,
    ) -> None:
        self._cache.setdefault((times, held, limits), []).append((tuple(allowed), solution))


def _of_masks(
    entries: Iterable[tuple[tuple[Array | None, ...], T]], allowed: Sequence[Array | None]
) -> T | None:
    """The entry of these masks."""
    for masks, value in entries:
        if len(masks) == len(allowed) and all(a is b for a, b in zip(masks, allowed, strict=True)):
            return value
    return None
