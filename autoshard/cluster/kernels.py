"""How close the kernels of a device come to its peak rates, by the shape of their work."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from autoshard.errors import UsageError


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

    multiprocessors: int = 0
    tile: tuple[int, int] = (256, 128)
    depth: float = 0.0
    attention: float = 0.6
    attention_backward: float = 0.5
    attention_earlier: float = 1.0
    traffic: float = 0.85
    small: float = 0.0
    narrow: float = 0.75
    dispatch: float = 0.0
    eager: float = 0.0
    clock: float = 1.0
    best: float = 0.0
    watts: float = 0.0
    attention_start: float = 0.0
    view: float = 0.0
    hand: float = 0.0
    cache: float = 0.0
    cached: float = 1.0

    def __post_init__(self) -> None:
        for name in (
            "attention",
            "attention_backward",
            "attention_earlier",
            "traffic",
            "narrow",
            "clock",
        ):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise UsageError(
                    f"{name} is {value}", where="kernels", why="it must be above 0 and at most 1"
                )
        for name in (
            "multiprocessors",
            "depth",
            "small",
            "cache",
            "dispatch",
            "eager",
            "best",
            "watts",
            "attention_start",
            "view",
            "hand",
        ):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise UsageError(f"{name} is {value}", where="kernels", why="it must be 0 or more")
        if not (isfinite(self.cached) and self.cached >= 1):
            raise UsageError(f"cached is {self.cached}", where="kernels", why="it must be 1 or more")
        if len(self.tile) != 2 or min(self.tile) < 1:
            raise UsageError(f"tile is {self.tile}", where="kernels", why="it is rows and columns, 1 or more")
