"""Estimates, the fastest first; only what comes to the front is looked at closely."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from math import isfinite

from autoshard.search.bound.estimate import Estimated


class CandidateQueue:
    """Takes estimates in order of their seconds.

    unsure: those that seem not to fit, as far as that was looked at.
    """

    def __init__(self, estimates: Iterable[Estimated] = ()) -> None:
        self.unsure: list[Estimated] = []
        self._heap: list[tuple[float, int, str, int, Estimated]] = []
        self._count = 0
        self.extend(estimates)

    def __iter__(self) -> Iterator[Estimated]:
        """All that are left, in no order."""
        yield from (entry[-1] for entry in self._heap)
        yield from self.unsure

    def extend(self, estimates: Iterable[Estimated]) -> None:
        for one in estimates:
            if isfinite(one.seconds):
                self._heap.append(self._entry(one))
            else:
                self.unsure.append(one)
        heapify(self._heap)

    def pop(self) -> Estimated | None:
        """Take the first as it is, rough or not; None if there is no other that may fit."""
        return heappop(self._heap)[-1] if self._heap else None

    def put(self, one: Estimated | None) -> None:
        """Put back what was taken, as it looks by now; None if it is out."""
        if one is not None and isfinite(one.seconds):
            heappush(self._heap, self._entry(one))
        elif one is not None:
            self.unsure.append(one)

    def first(self, accepts: Callable[[Estimated], bool] = lambda _: True) -> Estimated | None:
        """The fastest that is wanted, looked at closely; it stays."""
        estimated = self.take(accepts)
        self.put(estimated)
        return estimated

    def take(self, accepts: Callable[[Estimated], bool] = lambda _: True) -> Estimated | None:
        """The same, taken away."""
        passed: list[Estimated] = []
        try:
            while (one := self.pop()) is not None:
                passed.append(one)  # an interrupted look loses nothing
                if not accepts(one):
                    continue
                closer = one.closer()
                passed.pop()
                if closer is one:
                    return one
                self.put(closer)
            return None
        finally:
            for other in passed:
                self.put(other)

    def nearest(self, count: int) -> Iterator[Estimated]:
        """Take up to so many that seem to fit, looked at closely."""
        for _ in range(count):
            one = self.take()
            if one is None:
                return
            yield one

    def _entry(self, one: Estimated) -> tuple[float, int, str, int, Estimated]:
        self._count += 1
        mesh = one.configuration.mesh
        free = sum(axis.meaning.is_free for axis in mesh.axes)
        # sums of the same in another order are the same; axes with a meaning first, as they say more; in the
        # end by the order in which they came, so that estimates are never compared
        return float(f"{one.seconds:.9e}"), free, str(mesh), self._count, one
