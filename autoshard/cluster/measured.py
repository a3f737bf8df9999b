"""Collectives as they were timed: seconds by kind, ranks and bytes."""

from __future__ import annotations

from math import isfinite

import msgspec
import numpy as np
import numpy.typing as npt

from autoshard.errors import UsageError, nearest

#: collectives that have a price (`autoshard.cost.collective`)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


class CollectiveTimings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Timings of one kind of collective among so many ranks of a level, all groups of it at once.

    nbytes: as `autoshard.cost.collective.seconds` counts them, rising; seconds: of each.
    """

    kind: str
    ranks: int
    nbytes: tuple[int | float, ...] = msgspec.field(name="bytes")
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"there is no collective {self.kind!r}", hint=nearest(self.kind, KINDS))
        where = f"measured {self.kind} of {self.ranks} ranks"
        if self.ranks < 2 or len(self.nbytes) < 2 or len(self.nbytes) != len(self.seconds):
            why = "it has two sizes or more, with a time each, of two ranks or more"
            raise UsageError("the table is not complete", where=where, why=why)
        rising = all(a < b for a, b in zip(self.nbytes, self.nbytes[1:], strict=False))
        if not rising or self.nbytes[0] < 1 or not all(isfinite(s) and s > 0 for s in self.seconds):
            raise UsageError("the table is not in order", where=where, why="sizes rise, times are above 0")

    def at(self, nbytes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Seconds: between two sizes by a power of the bytes; below the smallest as long as that; above the
        largest at the rate between the last two."""
        nbytes_, times = np.array(self.nbytes, dtype=np.float64), np.array(self.seconds)
        inside = np.exp(np.interp(np.log(np.maximum(nbytes, 1.0)), np.log(nbytes_), np.log(times)))
        slope = max(0.0, float((times[-1] - times[-2]) / (nbytes_[-1] - nbytes_[-2])))
        beyond = times[-1] + slope * (nbytes - nbytes_[-1])
        return np.where(nbytes > nbytes_[-1], beyond, inside)
