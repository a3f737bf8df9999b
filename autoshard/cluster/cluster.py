"""A cluster as data: what one device can do, and how devices are wired, level by level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import gcd, isfinite
from typing import Annotated, Literal

from msgspec import Meta

from autoshard.cluster.host import Host, bounding_host
from autoshard.cluster.kernels import Kernels
from autoshard.cluster.links import Links
from autoshard.cluster.measured import CollectiveTimings
from autoshard.cluster.order import RankOrder
from autoshard.errors import UsageError, nearest
from autoshard.ir.decode import Count, Factor, NotNegative, Positive, Share, check_fields
from autoshard.ir.types import DTYPES

#: Part of a device's memory that a plan may fill. The rest goes to the CUDA or HIP context
#: (0.4-0.6 GiB), the buffers of the collective library (NCCL: a few MiB per channel and peer, 0.3-1 GiB)
#: and blocks that the caching allocator cannot reuse.
USABLE_FRACTION = 0.94
#: Share of computing that hides collectives of parameters where a cluster file does not say: NCCL's kernels
#: take multiprocessors and memory bandwidth from what they hide behind. Assumed.
OVERLAP = 0.8
#: types that a device may have a rate for; f8, f4: of products of 8-bit and 4-bit floats with scales
RATES = (*DTYPES, "f8", "f4")


@dataclass(frozen=True)
class Device:
    """One device.

    memory_bytes: bytes that the driver shows. peak_flops: short dtype name -> dense FLOP/s; ``f32`` is the
    rate of the vector units and must be there. memory_bandwidth: bytes/s. matmul_efficiency: part of
    ``peak_flops`` that a large matrix product reaches. launch_overhead: seconds per op. overlap:
    share of the time of computing that can hide collectives of parameters, 0 if nothing runs beside it.
    kernels: how the shape of work tells on its kernels. compiled: whether programs are compiled on it by
    default, so that a chain of elementwise ops reads and writes once (`options.PassOptions.codegen`).
    host: the memory of its node, None where unknown. alone: how many times as fast it is while all others
    of its node wait, as processes are that share the cores of a CPU; the other figures are those while
    all compute.
    """

    name: str
    memory_bytes: Count
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: Positive
    matmul_efficiency: Share
    launch_overhead: NotNegative
    overlap: Annotated[float, Meta(ge=0, le=1)] = OVERLAP
    kernels: Kernels = field(default_factory=Kernels)
    host: Host | None = None
    alone: Factor = 1.0
    compiled: bool = True

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        check_fields(self, where)
        for dtype in self.peak_flops:
            if dtype not in RATES:
                what = f"unknown key {dtype!r}"
                raise UsageError(what, where=f"{where}, peak_flops", hint=nearest(dtype, RATES))
        positive(f"{where}, peak_flops", **self.peak_flops)
        if "f32" not in self.peak_flops:
            raise UsageError("peak_flops has no f32", where=where, why="f32 is the rate of all other dtypes")

    @property
    def half_flops(self) -> float:
        """FLOP/s in 16 bits, in 32 bits where there are no others."""
        return self.peak_flops.get("bf16", self.peak_flops.get("f16", self.peak_flops["f32"]))

    @property
    def traffic(self) -> float:
        """Bytes/s that kernels reach which only read and write."""
        return self.memory_bandwidth * self.kernels.traffic


@dataclass(frozen=True)
class Level:
    """One level of wiring: what connects the groups of the level below (or the devices, if innermost).

    size: devices per group of this level, None for all. latency: seconds per message. bandwidth: bytes/s
    in one direction that a device gets if the link is its own. shared_by: neighbouring devices (by rank)
    that share one such link; used all at once, each gets ``bandwidth / shared_by``.
    efficiency: part of all that collectives reach. measured: collectives that were timed on this level, for
    which the table counts instead of the formula.
    """

    name: str
    size: Count | None
    latency: NotNegative
    bandwidth: Positive
    shared_by: Count = 1
    efficiency: Share = 1.0
    measured: tuple[CollectiveTimings, ...] = ()

    @property
    def reached(self) -> float:
        """Bytes/s in one direction that long messages of a device get if the link is its own."""
        return self.bandwidth * self.efficiency

    def __post_init__(self) -> None:
        check_fields(self, f"level {self.name!r}")


@dataclass(frozen=True)
class Cluster:
    """Devices and the levels that connect them, innermost first; rank r is the r-th device.

    devices: how many there are, None for any number; a single one needs no level. groups: parts of different
    devices or wiring, each a cluster of its own, in the order of their devices; then ``levels`` are those
    that join the groups, and ``device`` is the one that bounds all of them (`joined` sees to both). links:
    what was measured between single devices, which then counts instead of the bandwidth of the levels. order:
    the device of every rank, if rank r is not on device r. collectives: whose algorithms collectives have:
    ``nccl`` (RCCL has the same), or ``mpi`` for the forms of textbooks (see `autoshard.cost.collective`).
    """

    name: str
    devices: int | None
    device: Device
    levels: tuple[Level, ...]
    groups: tuple[Cluster, ...] = ()
    links: Links | None = None
    order: RankOrder | None = None
    collectives: Literal["nccl", "mpi"] = "nccl"

    def __post_init__(self) -> None:
        where = f"cluster {self.name!r}"
        if self.devices is not None:
            positive(where, devices=self.devices)
        if not self.levels and self.devices != 1:
            why = "levels say what connects the devices"
            raise UsageError("a cluster needs at least one level", where=where, why=why)
        if self.levels and self.levels[-1].size is not None:
            hint = "leave out its size: the outermost level connects all devices"
            what = f"the outermost level {self.levels[-1].name!r} has a size"
            raise UsageError(what, where=where, hint=hint)
        if self.groups:
            self._check_groups(where)
        inner = 1
        for level in self.levels[:-1]:
            if level.size is None or level.size % inner or (level.size == inner and inner > 1):
                why = f"a level holds two or more whole groups of the level below, here of {inner}"
                raise UsageError(f"level {level.name!r} has size {level.size}", where=where, why=why)
            inner = level.size
        if self.links is not None and self.links.devices != self.devices:
            raise UsageError(
                f"the links are those of {self.links.devices} devices, the cluster has {self.devices}",
                where=where,
                hint="give one row and one column per device, and `devices` as many",
            )

    def _check_groups(self, where: str) -> None:
        names = [group.name for group in self.groups]
        if len(names) < 2 or len(set(names)) < len(names):
            why = "one group is a plain cluster, and groups are told apart by their names"
            raise UsageError(f"the groups are called {', '.join(names)}", where=where, why=why)
        for group in self.groups:
            if group.devices is None or group.groups or group.links is not None:
                why = "a group says how many devices it has, and holds no groups or measured links"
                raise UsageError(f"group {group.name!r} cannot be part of a cluster", where=where, why=why)
        if self.devices != sum(group.devices or 0 for group in self.groups):
            what = f"devices is {self.devices}, the groups hold others"
            raise UsageError(what, where=where, hint="leave it out: it is the sum over the groups")
        if self.device != bounding([group.device for group in self.groups]):
            hint = "make the cluster by Cluster.joined"
            raise UsageError("the device is not the one that bounds the groups", where=where, hint=hint)
        for level in self.levels[:-1]:
            parts = set(range(level.size or 1, self.devices or 0, level.size or 1))
            if not parts <= set(self.starts) or (level.size or 0) <= min(g.devices or 0 for g in self.groups):
                why = f"groups begin at devices {', '.join(map(str, self.starts))}"
                hint = "a level that joins groups holds whole groups, two or more, or has no size"
                what = f"level {level.name!r} has size {level.size}"
                raise UsageError(what, where=where, why=why, hint=hint)

    @classmethod
    def joined(
        cls, name: str, groups: Sequence[Cluster], levels: Sequence[Level], links: Links | None = None
    ) -> Cluster:
        """Groups of different devices or wiring, joined by levels; a step waits for the slowest device."""
        if not groups:
            raise UsageError("there are no groups to join", where=f"cluster {name!r}")
        devices = sum(group.devices or 0 for group in groups)
        device = bounding([group.device for group in groups])
        kind = groups[0].collectives
        return cls(name, devices, device, tuple(levels), tuple(groups), links, collectives=kind)

    def used_by(self, world_size: int) -> Cluster:
        """The part that ranks 0 .. world_size - 1 run on: groups without a rank do not hold it back."""
        self.check_world_size(world_size)
        if not self.groups or world_size == self.devices:
            return self
        used: list[Cluster] = []
        for start, group in zip(self.starts, self.groups, strict=True):
            if start < world_size:
                used.append(replace(group, devices=min(group.devices or 0, world_size - start)))
        links = None if self.links is None else self.links.first(world_size)
        if len(used) == 1:
            return replace(used[0], name=self.name, links=links)
        levels = [level for level in self.levels if level.size is None or level.size < world_size]
        return Cluster.joined(self.name, used, levels, links)

    def laid(self, order: RankOrder | None) -> Cluster:
        """The part that so many ranks run on, in an order of theirs."""
        return self if order is None else replace(self.used_by(len(order.devices)), order=order)

    @property
    def alike(self) -> bool:
        """Whether any two blocks of devices that lie alike on the levels are alike."""
        return not self.groups and self.links is None

    def peak(self, dtype: str, world_size: int) -> float:
        """FLOP/s of so many ranks together at their peaks, that of f32 for types without one."""
        used = self.used_by(world_size)
        parts = [(g.device.peak_flops, g.devices or 0) for g in used.groups]
        parts = parts or [(used.device.peak_flops, world_size)]
        return sum(count * peaks.get(dtype, peaks["f32"]) for peaks, count in parts)

    def check_world_size(self, world_size: int) -> None:
        """UsageError if the cluster has fewer devices than that."""
        if self.devices is not None and world_size > self.devices:
            raise UsageError(
                f"{world_size} ranks do not fit on {self.devices} devices",
                where=f"cluster {self.name!r}",
                hint="make the mesh smaller, or raise `devices` in the cluster file",
            )

    @property
    def starts(self) -> tuple[int, ...]:
        """The first device of every group; (0,) if there are no groups."""
        if not self.groups:
            return (0,)
        return tuple(accumulate((group.devices or 0 for group in self.groups[:-1]), initial=0))

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Devices per group of every level but the outermost, innermost first.

        With groups, these are the sizes of all of them together, and the largest size of blocks of devices
        of which every group but the last is made.
        """
        own = {level.size for level in self.levels if level.size is not None}
        if not self.groups:
            return tuple(level.size for level in self.levels if level.size is not None)
        inner = {size for group in self.groups for size in group.group_sizes}
        return tuple(sorted(own | inner | {gcd(*self.starts)}))


def bounding(devices: Sequence[Device]) -> Device:
    """The device that is as slow and as small as the worst of these in every figure.

    Synchronous training runs at the pace of the slowest device. The efficiency is the largest at which no
    matrix product is faster than on the slowest device; a dtype that one of them has no rate for runs at
    that device's rate of f32, as `autoshard.cost` has it.
    """
    if not devices:
        raise UsageError("there is no device to bound")
    distinct = list(dict.fromkeys(device.name for device in devices))
    first = devices[0]
    if all(device == first for device in devices):
        return first
    dtypes = dict.fromkeys(dtype for device in devices for dtype in device.peak_flops)

    def rate(device: Device, dtype: str) -> float:
        return device.peak_flops.get(dtype, device.peak_flops["f32"])

    peaks = {dtype: min(rate(device, dtype) for device in devices) for dtype in dtypes}
    reached = {
        dtype: min(rate(device, dtype) * device.matmul_efficiency for device in devices) for dtype in dtypes
    }
    return Device(
        " and ".join(distinct),
        min(device.memory_bytes for device in devices),
        peaks,
        min(device.memory_bandwidth for device in devices),
        min(reached[dtype] / peaks[dtype] for dtype in dtypes),
        max(device.launch_overhead for device in devices),
        min(device.overlap for device in devices),
        min(devices, key=lambda device: device.matmul_efficiency).kernels,
        bounding_host([device.host for device in devices]),
        min(device.alone for device in devices),
        all(device.compiled for device in devices),
    )


def host_of(device: Device) -> Host:
    """The host memory of a device. Raises UsageError if the cluster's file does not say."""
    if device.host is None:
        raise UsageError(
            f"the cluster file does not say how device {device.name!r} reaches host memory",
            why="what is offloaded is priced by the link to the host and must fit its memory",
            hint="add a [device.host] table with bandwidth, latency, memory_bytes, memory_bandwidth and "
            "devices to the cluster file, or name a cluster of the catalog with --cluster",
        )
    return device.host


def usable_memory(device: Device) -> int:
    """Default memory budget of a plan in bytes: 0.94 of the device (see ``USABLE_FRACTION``)."""
    return int(device.memory_bytes * USABLE_FRACTION)


def positive(where: str, **figures: float) -> None:
    """UsageError if one of the named figures is not a finite number above zero."""
    for name, value in figures.items():
        if not (value > 0 and isfinite(value)):
            raise UsageError(f"{name} is {value}", where=where, why="it must be a finite number above 0")
