"""The schedules that have a name and an order of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoshard.schedules.breadth_first import breadth_first
from autoshard.schedules.gpipe import gpipe
from autoshard.schedules.interleaved import interleaved
from autoshard.schedules.one_f_one_b import one_f_one_b
from autoshard.schedules.schedule import Schedule
from autoshard.schedules.zb_h1 import zb_h1
from autoshard.schedules.zb_v import zb_v


@dataclass(frozen=True)
class Named:
    """make: (ranks, microbatches, chunks) to schedule. chunks: stages per rank that it takes; None: any.

    sliced: (ranks, microbatches, chunks, slices) to schedule, for those that divide the sequence.
    """

    make: Callable[[int, int, int], Schedule]
    chunks: int | None = None
    sliced: Callable[[int, int, int, int], Schedule] | None = None


NAMED = {
    "gpipe": Named(gpipe, chunks=1),
    "1f1b": Named(one_f_one_b, chunks=1),
    "interleaved": Named(interleaved),
    "breadth-first": Named(breadth_first),
    "zb-h1": Named(zb_h1, chunks=1),
    "zb-v": Named(zb_v, chunks=2),
}
