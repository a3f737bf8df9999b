"""How close the kernels of a device come to its peak rates, by the shape of their work."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.errors import UsageError
from autoshard.ir.decode import Count, Factor, NotNegative, Number, Share, check_fields


@dataclass(frozen=True)
class Kernels:
    """Figures of a device's kernels; the defaults stand for one of unlimited width.

    multiprocessors: a product's tiles are done in waves of as many; 0: they fill the device evenly. tile:
    rows and columns of the largest tile. depth: length of the summed dim at which a product reaches half of
    its rate. attention, attention_backward: part of the peak that fused attention reaches where it is written
    for the device, of which that for devices before reaches ``attention_earlier``. traffic: part of
    the memory bandwidth that elementwise kernels reach. small: bytes at which they reach half of that.
    narrow: part of their rate that products of 8-bit floats reach, of what other products reach of theirs.
    dispatch: seconds that the host takes to issue an op, which it does ahead of the device; eager: the same
    where modules of layers issue it in Python (0: as dispatch). clock: of products, as a part of what the
    peak is stated for, where less power than usual is allowed. best: part of the peak that the best product
    alone reaches, from which calibration starts; 0: not known.
    watts: power that the device may draw, of which `autoshard validate --fit` makes what it sustains; 0: not
    known. attention_start: seconds that attention takes beside its FLOP and a launch. view: seconds of an op
    that only looks at a tensor in another way, hand: seconds in which a parameter is handed to a call of the
    model and its gradient back, both where ops are not issued ahead. cache: bytes of what an op moves that
    stay in caches, which it moves ``cached`` times as fast.
    """

    multiprocessors: Number = 0
    tile: tuple[Count, Count] = (256, 128)
    depth: NotNegative = 0.0
    attention: Share = 0.6
    attention_backward: Share = 0.5
    attention_earlier: Share = 1.0
    traffic: Share = 0.85
    small: NotNegative = 0.0
    narrow: Share = 0.75
    dispatch: NotNegative = 0.0
    eager: NotNegative = 0.0
    clock: Share = 1.0
    best: NotNegative = 0.0
    watts: NotNegative = 0.0
    attention_start: NotNegative = 0.0
    view: NotNegative = 0.0
    hand: NotNegative = 0.0
    cache: NotNegative = 0.0
    cached: Factor = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "kernels")
        if len(self.tile) != 2 or min(self.tile) < 1:
            raise UsageError(f"tile is {self.tile}", where="kernels", why="it is rows and columns, 1 or more")
