"""What was worked out of segments, for programs of one model that are placed alike on the same machines.

Passes that know a segment give the very same one to each of these programs
(`passes/simplify/segment_cache.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar, cast

from autoshard.ir.lowered import LoweredSegment

T = TypeVar("T")


class OfSegments:
    """Looked up by the segment itself, and all else that is looked at."""

    def __init__(self) -> None:
        #: a segment stays as long as what it is known by
        self._made: dict[Hashable, tuple[LoweredSegment, object]] = {}

    def of(self, what: str, segment: LoweredSegment, given: Hashable, make: Callable[[], T]) -> T:
        """what: is worked out. given: all that it depends on beside the segment."""
        key = (what, id(segment), given)
        if key not in self._made:
            self._made[key] = segment, make()
        return cast(T, self._made[key][1])
