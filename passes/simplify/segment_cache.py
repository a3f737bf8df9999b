"""What passes made of segments, for the programs of one model that are placed alike.

The program of a deep model is looked at in several lengths (`planner/depth_extrapolation.py`): most of their
segments are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from autoshard.ir.lowered import LoweredSegment


class SegmentCache:
    """Looked up by all that a pass is given."""

    def __init__(self) -> None:
        self._made: dict[Hashable, LoweredSegment] = {}

    def of(
        self, what: str, segment: LoweredSegment, given: Hashable, make: Callable[[], LoweredSegment]
    ) -> LoweredSegment:
        """What a pass makes of a segment. what: its name. given: all that it looks at beside the segment."""
        key = (what, segment.graph, tuple(segment.layouts.items()), tuple(segment.why.items()), given)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
