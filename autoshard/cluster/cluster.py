"""A cluster as data: what one device can do, and how devices are wired, level by level."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

from autoshard.errors import UsageError

#: Part of a device's memory that a plan may fill. The rest goes to the CUDA or HIP context
#: (0.4-0.6 GiB), the buffers of the collective library (NCCL: a few MiB per channel and peer, 0.3-1 GiB)
#: and blocks that the caching allocator cannot reuse.
USABLE_FRACTION = 0.94


@dataclass(frozen=True)
class Device:
    """One device.

    memory_bytes: bytes that the driver shows. peak_flops: short dtype name -> dense FLOP/s; ``f32`` is the
    rate of the vector units and must be there. memory_bandwidth: bytes/s. matmul_efficiency: part of
    ``peak_flops`` that a large matrix product reaches. launch_overhead: seconds per op.
    """

    name: str
    memory_bytes: int
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    matmul_efficiency: float
    launch_overhead: float

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        positive(where, memory_bytes=self.memory_bytes, memory_bandwidth=self.memory_bandwidth)
        positive(f"{where}, peak_flops", **self.peak_flops)
        if "f32" not in self.peak_flops:
            raise UsageError("peak_flops has no f32", where=where, why="f32 is the rate of all other dtypes")
        if not 0 < self.matmul_efficiency <= 1:
            what = f"matmul_efficiency is {self.matmul_efficiency}"
            raise UsageError(what, where=where, why="it must be above 0 and at most 1")
        if not (isfinite(self.launch_overhead) and self.launch_overhead >= 0):
            what = f"launch_overhead is {self.launch_overhead}"
            raise UsageError(what, where=where, why="it must be 0 seconds or more")


@dataclass(frozen=True)
class Level:
    """One level of wiring: what connects the groups of the level below (or the devices, if innermost).

    size: devices per group of this level, None for all. latency: seconds per message. bandwidth: bytes/s
    in one direction that a device gets if the link is its own. shared_by: neighbouring devices (by rank)
    that share one such link; used all at once, each gets ``bandwidth / shared_by``.
    """

    name: str
    size: int | None
    latency: float
    bandwidth: float
    shared_by: int = 1

    def __post_init__(self) -> None:
        where = f"level {self.name!r}"
        positive(where, bandwidth=self.bandwidth, shared_by=self.shared_by)
        if self.size is not None:
            positive(where, size=self.size)
        if not (isfinite(self.latency) and self.latency >= 0):
            raise UsageError(f"latency is {self.latency}", where=where, why="it must be 0 seconds or more")


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind and the levels that connect them, innermost first; rank r is the r-th device.

    devices: how many there are, None for any number.
    """

    name: str
    devices: int | None
    device: Device
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        where = f"cluster {self.name!r}"
        if self.devices is not None:
            positive(where, devices=self.devices)
        if not self.levels:
            raise UsageError("a cluster needs at least one level", where=where)
        if self.levels[-1].size is not None:
            hint = "leave out its size: the outermost level connects all devices"
            what = f"the outermost level {self.levels[-1].name!r} has a size"
            raise UsageError(what, where=where, hint=hint)
        inner = 1
        for level in self.levels[:-1]:
            if level.size is None or level.size % inner or (level.size == inner and inner > 1):
                why = f"a level holds two or more whole groups of the level below, here of {inner}"
                raise UsageError(f"level {level.name!r} has size {level.size}", where=where, why=why)
            inner = level.size

    def check_world_size(self, world_size: int) -> None:
        """UsageError if the cluster has fewer devices than that."""
        if self.devices is not None and world_size > self.devices:
            raise UsageError(
                f"{world_size} ranks do not fit on {self.devices} devices",
                where=f"cluster {self.name!r}",
                hint="make the mesh smaller, or raise `devices` in the cluster file",
            )

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Devices per group of every level but the outermost, innermost first."""
        return tuple(level.size for level in self.levels if level.size is not None)


def usable_memory(device: Device) -> int:
    """Default memory budget of a plan in bytes: 0.94 of the device (see ``USABLE_FRACTION``)."""
    return int(device.memory_bytes * USABLE_FRACTION)


def positive(where: str, **figures: float) -> None:
    """UsageError if one of the named figures is not a finite number above zero."""
    for name, value in figures.items():
        if not (isfinite(value) and value > 0):
            raise UsageError(f"{name} is {value}", where=where, why="it must be a finite number above 0")
