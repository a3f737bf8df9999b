"""What each rank of a pipeline runs on, where devices and wiring are not all alike.

`pp` is the outermost axis, so that pipeline rank p is the p-th block of ranks, and ranks go group by group:
where groups of a cluster hold full blocks, the stages of a pipeline differ in speed, and slow links between
groups only join two of them (F. Yang et al., "Holmes", arXiv 2312.03549).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from autoshard.cluster.cluster import Cluster, Device, bounding, usable_memory
from autoshard.cluster.mesh import Axis, Mesh, mesh_candidates
from autoshard.cluster.order import RankOrder
from autoshard.cost.kernel_time import attention_rate
from autoshard.cost.link import AxisLink, link_of


@dataclass(frozen=True)
class StageMachine:
    """What a pipeline rank runs on. device: its slowest. links: of the axes of its mesh."""

    device: Device
    links: tuple[AxisLink, ...]


def full_mesh(inner: Mesh, ranks: int) -> Mesh:
    """The mesh of all ranks of a pipeline; the inner one without one."""
    return inner if ranks == 1 else Mesh((Axis("pp", ranks), *inner.axes))


def bounding_machine(cluster: Cluster, inner: Mesh, ranks: int) -> StageMachine:
    """The device and the links that no pipeline rank is slower than."""
    full = full_mesh(inner, ranks)
    used = cluster.used_by(full.world_size)
    return StageMachine(
        used.device, tuple(link_of(used, full, (ranks > 1) + k) for k in range(len(inner.axes)))
    )


def stage_machines(cluster: Cluster, inner: Mesh, ranks: int) -> tuple[StageMachine, ...]:
    """The machine of every pipeline rank, () if all are as the one that bounds them.

    Links that were measured between single devices count for all ranks as on the slowest.
    """
    if ranks == 1 or cluster.alike:
        return ()
    bound = bounding_machine(cluster, inner, ranks)
    used = cluster.used_by(ranks * inner.world_size)
    if not used.groups:
        return ()
    cache: dict[object, StageMachine] = {}
    machines: list[StageMachine] = []
    for block in _blocks(used, inner.world_size, ranks):
        inside = tuple(dict.fromkeys(_groups_of(used, block)))
        full = _is_aligned(used, inside, inner.world_size)
        key = inside if full else block
        if key not in cache:
            device = bounding([used.groups[k].device for k in inside])
            links = bound.links if used.links is not None else _links(used, inside, inner, block, full)
            cache[key] = StageMachine(device, links)
        machines.append(cache[key])
    distinct = list(dict.fromkeys(machines))
    return () if distinct == [bound] else tuple(machines)


def boundary_links(cluster: Cluster, inner_world: int, ranks: int) -> tuple[AxisLink, ...]:
    """Between every pipeline rank and the next, behind the last one the first, all devices sending at once;
    () where all are as the slowest. inner_world: devices of a pipeline rank."""
    used = cluster.used_by(ranks * inner_world)
    if ranks == 1 or used.alike:
        return ()
    blocks = _blocks(used, inner_world, ranks)
    mesh = Mesh((Axis("pp", 2), Axis("inside", inner_world)))
    pairs = zip(blocks, (*blocks[1:], blocks[0]), strict=True)
    return tuple(link_of(used, mesh, 0, RankOrder((*one, *other))) for one, other in pairs)


def pipelines_fit(cluster: Cluster, inner_world: int, ranks: int) -> bool:
    """Whether every pipeline rank is in one group of a cluster, or is made of full groups."""
    used = cluster.used_by(ranks * inner_world)
    if not used.groups:
        return True
    starts = {*used.starts, used.devices}
    blocks = [(k * inner_world, (k + 1) * inner_world) for k in range(ranks)]
    inside = all(start % inner_world == 0 for start in used.starts)
    return inside or all(end in starts for block in blocks for end in block)


def inner_candidates(cluster: Cluster, inner_world: int, ranks: int) -> list[Mesh]:
    """Every mesh of a pipeline rank that fits the wiring, of whichever group of a cluster the rank is.

    Ranks that do not fill nodes may lie across two, which `bounding_machine` counts.
    """
    used = cluster.used_by(ranks * inner_world)
    if not used.groups:
        return mesh_candidates(cluster, inner_world)
    if not pipelines_fit(cluster, inner_world, ranks):
        return []
    parts = {tuple(dict.fromkeys(_groups_of(used, b))): b for b in _blocks(used, inner_world, ranks)}
    candidates: list[Mesh] | None = None
    for inside in parts:
        groups = [used.groups[k] for k in inside]
        part = groups[0] if len(groups) == 1 else Cluster.joined(used.name, groups, used.levels[-1:])
        fine = mesh_candidates(part, inner_world)
        candidates = fine if candidates is None else [m for m in candidates if m in fine]
    return candidates or []


def across_nodes(cluster: Cluster, inner: Mesh, ranks: int) -> tuple[AxisLink, ...]:
    """Links of the axes inside layers, where a pipeline rank somewhere has slower ones than the
    first ranks of the cluster would have; () where none has."""
    alone, bound = bounding_machine(cluster, inner, 1), bounding_machine(cluster, inner, ranks)
    inside = [k for k, axis in enumerate(inner.axes) if not axis.meaning.splits_batch]
    links = tuple(bound.links[k] for k in inside)
    return () if links == tuple(alone.links[k] for k in inside) else links


def limits(bound: StageMachine, machines: Sequence[StageMachine], inner: Mesh) -> tuple[float, ...]:
    """How many times as fast as what bounds all each machine computes and sends activations at most, () if
    none is faster. inner: the mesh of a pipeline rank, whose data ranks send no activations."""
    cache: dict[StageMachine, float] = {}
    for machine in machines:
        if machine not in cache:
            links = zip(inner.axes, bound.links, machine.links, strict=True)
            inside = [_sooner(a, b) for axis, a, b in links if not axis.meaning.splits_batch]
            cache[machine] = max([_faster(bound.device, machine.device), *inside])
    limits_ = tuple(cache[machine] for machine in machines)
    return () if set(limits_) == {1.0} else limits_


def rooms(cluster: Cluster, machines: Sequence[StageMachine], budget: float) -> tuple[float, ...]:
    """Bytes that may be held on every pipeline rank: where the budget is all that the smallest device has to
    offer, others have more. () where all may hold as much."""
    if budget != usable_memory(cluster.device):
        return ()
    capacities = tuple(float(usable_memory(machine.device)) for machine in machines)
    return () if set(capacities) == {budget} else capacities


def _blocks(cluster: Cluster, inner_world: int, ranks: int) -> list[tuple[int, ...]]:
    """The devices of every pipeline rank."""
    devices = range(ranks * inner_world) if cluster.order is None else cluster.order.devices
    return [tuple(devices[k * inner_world : (k + 1) * inner_world]) for k in range(ranks)]


def kinds_of(cluster: Cluster) -> tuple[int, ...]:
    """The group of every device; () without groups."""
    return tuple(_groups_of(cluster, range(cluster.devices or 0))) if cluster.groups else ()


def _groups_of(cluster: Cluster, devices: Sequence[int]) -> list[int]:
    """The group of every device."""
    if not cluster.groups:
        return [0] * len(devices)
    return [int(k) for k in np.searchsorted(np.array(cluster.starts), np.array(devices), side="right") - 1]


def _is_aligned(cluster: Cluster, inside: Sequence[int], inner_world: int) -> bool:
    """Whether a rank in this group lies as all others of the group do."""
    if cluster.order is not None or len(inside) != 1 or not cluster.groups:
        return False
    size = cluster.groups[inside[0]].devices or 0
    return cluster.starts[inside[0]] % inner_world == 0 and size % inner_world == 0


def _links(
    cluster: Cluster, inside: Sequence[int], inner: Mesh, block: tuple[int, ...], aligned: bool
) -> tuple[AxisLink, ...]:
    axes = range(len(inner.axes))
    if not aligned:
        return tuple(link_of(cluster, inner, k, RankOrder(block)) for k in axes)
    group = cluster.groups[inside[0]]
    ranks = (group.devices or 0) // inner.world_size
    full = full_mesh(inner, ranks)
    return tuple(link_of(group, full, k + (ranks > 1)) for k in axes)


def _faster(bound: Device, device: Device) -> float:
    """How many times as fast a device is at most."""
    pairs = [(bound.traffic, device.traffic)]
    for dtype in {*bound.peak_flops, *device.peak_flops}:
        a, b = (d.peak_flops.get(dtype, d.peak_flops["f32"]) for d in (bound, device))
        pairs += [(a * bound.matmul_efficiency, b * device.matmul_efficiency)]
        pairs += [
            (
                attention_rate(dtype, way, bound, native=False),
                attention_rate(dtype, way, device, native=False),
            )
            for way in (False, True)
        ]
    vector = (bound.peak_flops["f32"], device.peak_flops["f32"])
    # a short sum takes as long as a longer one to begin and to end
    depth = (device.kernels.depth, bound.kernels.depth)
    starts = [
        (device.launch_overhead, bound.launch_overhead),
        (device.kernels.attention_start, bound.kernels.attention_start),
    ]
    filling = max(1.0, _ratio(*depth))
    return max(
        1.0, _ratio(*vector), *(_ratio(*pair) for pair in starts), *(filling * _ratio(*p) for p in pairs)
    )


def _ratio(less: float, more: float) -> float:
    if less == more:
        return 1.0
    return more / less if less else inf


def _sooner(bound: AxisLink, link: AxisLink) -> float:
    """How many times as soon a collective is done at most."""
    if link == bound:
        return 1.0
    ratios = [
        _ratio(link.latency, bound.latency),
        _ratio(bound.bandwidth, link.bandwidth),
        _ratio(bound.alone, link.alone),
    ]
    return max(1.0, *ratios) if not (bound.measured or link.measured) else inf
