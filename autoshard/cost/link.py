"""What a mesh axis has for its collectives: the levels of wiring that it crosses, or the links measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, lcm
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from autoshard.cluster.cluster import Cluster, Level
from autoshard.cluster.measured import CollectiveTimings
from autoshard.cluster.mesh import Axis, Mesh
from autoshard.cluster.order import RankOrder

_Ranks: TypeAlias = npt.NDArray[np.int64]


class LevelShare(NamedTuple):
    """A level of wiring that groups of an axis cross. bandwidth: bytes/s of one rank; local: ranks of a group
    on the same side of it."""

    name: str
    bandwidth: float
    local: int


@dataclass(frozen=True)
class AxisLink:
    """What one group of a mesh axis has for its collectives, all groups of the axis being active at once.

    latency: seconds per message. bandwidth: bytes/s in one direction between two neighbouring parts of a
    ring through the group. size: ranks in a group. device_bandwidth: bytes/s in one direction of one rank
    alone over the level crossed that is slowest where all pairs of ranks exchange parts (None: equal to
    ``bandwidth``). local: ranks of the group on the same side of that level. measured: collectives of such
    groups that were timed. hops: of one way round a ring, which ends a step short of its beginning: (how many
    cross a level, seconds per message there), innermost first; () where all are of ``latency``. nccl: whether
    collectives have NCCL's algorithms. levels: of a group over several nodes, the links of the ranks in the
    same place of each, and of those inside one; () if nodes do not have as many ranks each. crossed: all
    levels of wiring that a group crosses.
    """

    latency: float
    bandwidth: float
    size: int
    device_bandwidth: float | None = None
    local: int = 1
    measured: tuple[CollectiveTimings, ...] = ()
    hops: tuple[tuple[int, float], ...] = ()
    nccl: bool = False
    levels: tuple[AxisLink, ...] = field(default=(), compare=False)
    crossed: tuple[LevelShare, ...] = field(default=(), compare=False)

    @property
    def across(self) -> AxisLink:
        """The link of the ranks in the same place of each node."""
        return self.levels[0]

    @property
    def inside_nodes(self) -> AxisLink:
        """The link of the ranks of a node."""
        return self.levels[1]

    @property
    def together(self) -> int:
        """Ranks of each part of the outermost level, which follow each other; 0 if there is one part, if each
        is one rank, or if they differ."""
        ranks, rest = divmod(self.size, self.parts)
        return ranks if 1 < ranks < self.size and not rest else 0

    @property
    def round(self) -> float:
        """Seconds that a message takes round the ring, from the first rank to the last."""
        if not self.hops:
            return (self.size - 1) * self.latency
        return sum(count * latency for count, latency in self.hops)

    @property
    def parts(self) -> int:
        """Parts of the outermost level that the group lies in: nodes, mostly."""
        return self.hops[-1][0] + 1 if self.hops else self.size

    @property
    def inside(self) -> float:
        """Seconds that a message takes through one of these parts, rank by rank."""
        return sum(count * latency for count, latency in self.hops[:-1]) / self.parts

    @property
    def alone(self) -> float:
        """Bytes/s of one rank alone over the level that is slowest for pairs."""
        return self.bandwidth if self.device_bandwidth is None else self.device_bandwidth


@dataclass(frozen=True)
class _Crossed:
    """A level that groups of an axis cross.

    bandwidth: bytes/s of a device with the link its own. local: fewest ranks that a group has on one side.
    """

    level: Level
    bandwidth: float
    local: int


def link_of(cluster: Cluster, mesh: Mesh, axis: int, order: RankOrder | None = None) -> AxisLink:
    """The link that the groups of a mesh axis have, with rank r on device r, or on ``order.devices[r]``.

    order: by default that of the cluster.

    Latency is that of the outermost level crossed, bandwidth that of the slowest. A group with m ranks in
    each node runs m rings at once, over the network cards of its m devices (as NCCL does), so that it has m
    times the share of one device; that is how the groups of an axis divide the links that they cross at once.

    Where the cluster has groups of different wiring, the slowest of them counts, as a step waits for all.
    Where links were measured, a level has the bandwidth of the slowest link between neighbours in a ring
    through a group of the axis, in the order of its ranks, instead of its nominal one; latency likewise, if
    it was measured.

    Raises UsageError if the mesh has no such axis, does not fit the cluster, or is not what is ordered.
    """
    cluster.check_world_size(mesh.world_size)
    order = order or cluster.order
    if order is not None:
        order.check(mesh.world_size, cluster.devices)
    axis = mesh.index(axis)
    size = mesh.sizes[axis]
    if size == 1:
        return AxisLink(0.0, inf, 1)
    crossed: list[list[_Crossed]] | None = None
    rows = None
    if order is None and cluster.links is None:
        crossed = _in_closed_form(cluster, mesh, axis)
    if crossed is None:
        rows = _rows(cluster, mesh, axis, order)
        crossed = _by_rows(cluster, mesh.world_size, rows, ordered=order is None)
    shares = [
        LevelShare(each.level.name, each.bandwidth / min(each.level.shared_by, mesh.world_size), each.local)
        for part in crossed
        for each in part
    ]
    # pairs of ranks do not profit from rings: what most of them send far, each sends over its own card
    far = max(shares, key=lambda s: (size - s.local) / s.bandwidth)
    latency = max(part[-1].level.latency for part in crossed if part)
    if cluster.links is not None and cluster.links.latency is not None:
        assert rows is not None
        latency = float(cluster.links.latency[rows, np.roll(rows, -1, axis=1)].max())
    ways = {_hops(part, size) for part in crossed if part}
    result = AxisLink(
        latency,
        min(each.bandwidth * each.local for each in shares),
        size,
        far.bandwidth,
        far.local,
        _tables(crossed, size),
        ways.pop() if len(ways) == 1 and cluster.links is None else (),
        cluster.collectives == "nccl",
        crossed=tuple(shares),
    )
    if not result.together:
        return result
    at, (name, inside) = mesh.axes[:axis], (mesh.axes[axis].name, result.together)
    apart = (Axis(f"{name}_across", size // inside), Axis(f"{name}_inside", inside))
    parts = Mesh((*at, *apart, *mesh.axes[axis + 1 :]))
    return replace(result, levels=tuple(link_of(cluster, parts, axis + k, order) for k in (0, 1)))


def _hops(crossed: Sequence[_Crossed], size: int) -> tuple[tuple[int, float], ...]:
    """What messages round a group of that size cross, level by level."""
    below = [-(-size // each.local) for each in crossed]
    above = [*below, 1][1:]
    return tuple(
        (b - a, each.level.latency) for each, b, a in zip(crossed, below, above, strict=True) if b > a
    )


def _tables(crossed: Sequence[Sequence[_Crossed]], size: int) -> tuple[CollectiveTimings, ...]:
    """What was timed among as many ranks of the only level that groups of an axis cross."""
    levels = {each.level.name: each.level for part in crossed for each in part}
    if len(levels) != 1:
        return ()
    (level,) = levels.values()
    return tuple(table for table in level.measured if table.ranks == size)


def _in_closed_form(cluster: Cluster, mesh: Mesh, axis: int) -> list[list[_Crossed]] | None:
    """The levels crossed, by group of the cluster; None where groups of the axis do not lie alike."""
    size, stride, world = mesh.sizes[axis], mesh.stride(axis), mesh.world_size
    if not cluster.groups:
        crossed = _levels_crossed(cluster.levels, size, stride, world)
        return None if crossed is None else [crossed]
    used = cluster.used_by(world)
    if not used.groups:
        return _in_closed_form(used, mesh, axis)
    if any(start % (size * stride) for start in used.starts):
        return None
    parts = [_levels_crossed(g.levels, size, stride, g.devices or world) for g in used.groups]
    counts = [part for part in parts if part is not None]
    return counts if len(counts) == len(parts) else None


def _levels_crossed(levels: tuple[Level, ...], size: int, stride: int, world: int) -> list[_Crossed] | None:
    """Levels that ranks s, s + stride, ... cross, if they do so alike wherever their group begins.

    A group extends over ``size * stride`` ranks. They lie alike if each level's parts hold whole strides and
    full groups, or the other way round; the group of all ranks ends where the mesh ends, wherever that is.
    """
    extent = size * stride
    for level in levels:
        part = level.size or world
        if part >= world:
            continue
        if (part % stride and stride % part) or (part % extent and extent % part and extent != world):
            return None
    crossed: list[_Crossed] = []
    below = 1
    for level in levels:
        above = level.size or world
        if below < extent and below < above and stride < above:
            fewest = min(below, extent % below or below)  # the last part of the mesh may not be full
            crossed.append(_Crossed(level, level.reached, max(1, fewest // stride)))
        below = above
    return crossed


def _rows(cluster: Cluster, mesh: Mesh, axis: int, order: RankOrder | None) -> _Ranks:
    """Devices of the groups of an axis, a row each; rows that lie like others on the wiring are left out."""
    size, stride, world = mesh.sizes[axis], mesh.stride(axis), mesh.world_size
    rows: _Ranks = np.arange(world).reshape(-1, size, stride)
    if order is None and cluster.links is None:
        levels = [level for part in (cluster, *cluster.groups) for level in part.levels]
        parts = [level.size for level in levels if level.size is not None and level.size < world]
        if not cluster.groups:  # the pattern repeats
            rows = rows[: lcm(size * stride, *parts) // (size * stride)]
        alike = all(part % stride == 0 or stride % part == 0 for part in parts)
        if alike and all(start % stride == 0 for start in cluster.starts):
            rows = rows[:, :, :1]
    rows = rows.swapaxes(1, 2).reshape(-1, size)
    return rows if order is None else np.array(order.devices)[rows]


def _by_rows(cluster: Cluster, world: int, rows: _Ranks, *, ordered: bool) -> list[list[_Crossed]]:
    """The levels that rows of devices cross, by group of the cluster, those that join groups last.

    ordered: whether devices ascend along each row.
    """
    parts: list[tuple[_Ranks, tuple[Level, ...], _Ranks]] = []
    if not cluster.groups:
        parts.append((rows, cluster.levels, rows))
    else:
        group = np.searchsorted(np.array(cluster.starts), rows, side="right") - 1
        for number, (start, each) in enumerate(zip(cluster.starts, cluster.groups, strict=True)):
            inside = np.where(group == number, rows - start, -1)  # -1: a device elsewhere
            parts.append((inside, each.levels, inside))
        parts.append((group, cluster.levels, rows))
    counts = []
    for innermost, levels, devices in parts:
        crossed: list[_Crossed] = []
        below = innermost
        for level in levels:
            above = np.zeros_like(devices) if level.size is None else devices // level.size
            above = np.where(devices < 0, -1, above)
            bandwidth = _crossing(cluster, level, below, above, rows)
            if bandwidth is not None:
                crossed.append(_Crossed(level, bandwidth, _fewest_together(below, ordered)))
            below = above
        counts.append(crossed)
    return counts


def _crossing(cluster: Cluster, level: Level, below: _Ranks, above: _Ranks, rows: _Ranks) -> float | None:
    """Bytes/s with which neighbours in a ring cross a level; None if none do.

    They cross it if they are in different parts below it and in the same part above it.
    """
    after = np.roll(below, -1, axis=1), np.roll(above, -1, axis=1)
    crosses = (below != after[0]) & (above == after[1]) & (below >= 0) & (after[0] >= 0)
    if not crosses.any():
        return None
    if cluster.links is None:
        return level.reached
    return float(cluster.links.bandwidth[rows, np.roll(rows, -1, axis=1)][crosses].min())


def _fewest_together(below: _Ranks, ordered: bool) -> int:
    """The smallest number of ranks that a row has in one part, among rows with more than one part."""
    lowest, highest = np.where(below < 0, np.iinfo(np.int64).max, below).min(axis=1), below.max(axis=1)
    rows = below[lowest < highest]
    labels = (np.arange(len(rows))[:, None] * (int(below.max()) + 1) + rows)[rows >= 0]
    if not ordered:
        labels = np.sort(labels)
    ends = np.flatnonzero(np.diff(labels))
    return int(np.diff(np.concatenate([[-1], ends, [len(labels) - 1]])).min())
