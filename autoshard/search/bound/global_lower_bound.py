"""What no step of any configuration goes below: whoever may be lowest is looked at again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from math import inf

from autoshard.search.bound.estimate import Estimated

#: those that are looked at by problems of their own together, their states in all, and by how much of the
#: limit a thousand states have to raise the bound to be worth it
_TOGETHER, _STATES, _GAIN = 6, 40_000, 0.0015


class GlobalLowerBound:
    """The bound of many configurations.

    exactly: a bound of one by its own problem, which takes far longer to pose than all else: the best one, or
    any of so many seconds.
    """

    def __init__(self, others: Iterable[Estimated], exactly: Callable[[Estimated, float], float]) -> None:
        self._others, self._exactly = list(others), exactly
        self._looks: list[tuple[float, int, Iterator[float]]] = [
            (e.bound, number, e.bounds()) for number, e in enumerate(self._others)
        ]
        heapify(self._looks)
        #: of which only their own problems say more, lowest first; and the bound of those that these were
        #: asked about
        self._aside: list[tuple[float, int]] = []
        self._done, self._left = inf, _STATES

    @property
    def seconds(self) -> float:
        """That none of them goes below, as far as that is known."""
        firsts = [look[0] for look in self._looks[:1]] + [bound for bound, _ in self._aside[:1]]
        return min((self._done, *firsts))

    def raised(self, limit: float) -> float:
        """The same, ``limit`` at most, once nothing more can be said of the lowest that is worth the time."""
        while self.seconds < limit:
            beyond = min(limit, self._done, *[look[0] for look in self._looks[:1]])
            if self._aside and self._is_worth_it(beyond, limit):
                self._look_exactly(beyond)
            elif beyond >= min(limit, self._done) or len(self._aside) == _TOGETHER:
                break
            else:
                self._look()
        return min(limit, self.seconds)

    def _look(self) -> None:
        """Once more at the lowest."""
        bound, number, better = self._looks[0]
        following = next(better, None)
        if following is not None:
            heapreplace(self._looks, (following, number, better))
        else:
            heappop(self._looks)
            self._aside.append((bound, number))

    def _is_worth_it(self, beyond: float, limit: float) -> bool:
        """Whether to pose those aside. beyond: seconds up to which they may raise the bound."""
        states = sum(self._others[number].choices for _, number in self._aside)
        return states <= self._left and beyond - self._aside[0][0] > _GAIN * limit * states / 1000

    def _look_exactly(self, beyond: float) -> None:
        while self._aside:
            one = self._others[self._aside[0][1]]
            self._left -= one.choices
            self._done = min(self._done, max(self._aside[0][0], self._exactly(one, beyond)))
            del self._aside[0]
