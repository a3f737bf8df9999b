"""Meshes, pipelines and microbatches that a plan may have, and which of them are alike."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from autoshard.cluster.cluster import Device
from autoshard.cluster.mesh import Mesh
from autoshard.cost.collective import AxisLink, seconds
from autoshard.search.solve.pipeline_model import Pipe


@dataclass(frozen=True)
class Configuration:
    """A mesh and a number of microbatches. batch: sequences of one microbatch over the full mesh.

    pipe: the pipeline, each of whose ranks is such a mesh.
    """

    mesh: Mesh
    batch: int
    microbatches: int
    pipe: Pipe = field(default_factory=Pipe)

    @property
    def name(self) -> str:
        """``pp=4,dp=8,tp=8``"""
        return str(self.mesh) if self.pipe.ranks == 1 else f"pp={self.pipe.ranks},{self.mesh}"


@dataclass(frozen=True)
class Staged:
    """A mesh for every one of ``ranks`` pipeline ranks, with the pipelines to try.

    batches: sequences of a microbatch over the mesh that are allowed, () for all that divide. link: between
    pipeline ranks, the slowest; None where there is one rank. links: behind every rank, () if all are alike.
    devices: of every pipeline rank, () if all are alike. limits: how many times as fast as what is priced
    computing and talking is at most on each of them, () if on none. across: see
    `cost.stage_machines.across_nodes`.
    """

    mesh: Mesh
    pipes: tuple[Pipe, ...] = (Pipe(),)
    batches: tuple[int, ...] = ()
    link: AxisLink | None = None
    links: tuple[AxisLink, ...] = ()
    devices: tuple[Device, ...] = ()
    limits: tuple[float, ...] = ()
    across: tuple[AxisLink, ...] = ()

    def hop_seconds(self, nbytes: float) -> float:
        """Seconds to send so many bytes per data rank to the next stage; each tensor rank sends its part."""
        if self.link is None:
            return 0.0
        inner = self.mesh.world_size // data_ways(self.mesh)
        return seconds("send", nbytes / inner, self.link)

    def sending(self, pipe: Pipe, nbytes: float, shared: float = 0.0) -> Pipe:
        """A pipeline that hands on so many bytes per data rank; shared: of parameters that the first and the
        last stage have in common, which every rank of theirs has its part of."""
        slowest = self.hop_seconds(nbytes)
        if not self.links:
            return replace(pipe, hop=slowest)
        inner = self.mesh.world_size // data_ways(self.mesh)
        *between, around = (seconds("send", nbytes / inner, link) for link in self.links)
        back = around if not pipe.spec.v_shaped else 0.0
        mean = (pipe.chunks * sum(between) + (pipe.chunks - 1) * back) / (pipe.ranks * pipe.chunks - 1)
        sends = [*between, back * (pipe.chunks > 1)]
        slowest, at = max(sends), between.index(max(between))
        ends = 0.0
        if not pipe.spec.v_shaped:
            assert self.link is not None
            parts = [a.size for a in self.mesh.axes if a.meaning.may_store_sharded or a.meaning.splits_layers]
            ends = seconds("all_reduce", shared / prod(parts), replace(self.link, size=2))
        return replace(pipe, hop=mean, slowest=slowest, ahead=pipe.ranks - at, ends=ends)

    def runs(self, microbatches: int) -> float:
        """How many microbatches a rank could compute in a step, at least, of the shortest of the pipelines.

        Where some ranks are faster, one microbatch takes no less than if the fastest did all of it.
        """
        filling = min(p.filling(microbatches) for p in self.pipes)
        if not self.limits:
            return microbatches + filling
        total, fastest = sum(self.limits), max(self.limits)
        waits = (self.ranks / fastest - self.ranks / total) * filling / (self.ranks - 1)
        return self.ranks / total * microbatches + waits

    @property
    def ranks(self) -> int:
        return self.pipes[0].ranks

    @property
    def world_size(self) -> int:
        return self.ranks * self.mesh.world_size


def microbatch_sizes(mesh: Mesh, total: int) -> list[int]:
    """Sequences per microbatch over the full mesh that divide the global batch evenly."""
    ways = data_ways(mesh)
    if total % ways:
        return []
    each = total // ways
    return [ways * b for b in range(1, each + 1) if each % b == 0]


def alike(config: Configuration) -> Hashable:
    """What configurations share that only divide the data ranks otherwise."""
    return inside(config.mesh), config.batch // data_ways(config.mesh), config.pipe.ranks


def inside(mesh: Mesh) -> tuple[tuple[str, int], ...]:
    """Names and sizes of the axes that do more than split the batch and store parameters."""
    return tuple(
        (a.name, a.size) for a in mesh.axes if not a.meaning.splits_batch or a.meaning.divides_experts
    )


def stored_ways(mesh: Mesh) -> int:
    """Over how many ranks a parameter may be stored."""
    return prod(axis.size for axis in mesh.axes if axis.meaning.may_store_sharded)


def data_ways(mesh: Mesh) -> int:
    """How many ranks split the batch."""
    return prod(axis.size for axis in mesh.axes if axis.meaning.splits_batch)


def shapes_of(meshes: Sequence[Staged], owners: int = 0) -> list[tuple[Staged, ...]]:
    """Meshes that differ only in their data axes and pipelines, and talk as fast inside layers, together;
    fewest data ranks and then most sharded ones first.

    owners: how many experts there are that an axis of stored parameters may divide, 0 for none. Then data
    axes of different sizes stay apart, and only the mesh that divides experts furthest is kept, beside the
    one that stores everything whole, since gathering experts costs far more.
    """
    groups: dict[object, list[Staged]] = {}
    for staged in meshes:
        ways = data_ways(staged.mesh)
        key = (ways if owners else 0, inside(staged.mesh), staged.across)
        groups.setdefault(key, []).append(staged)
    shapes: list[tuple[Staged, ...]] = []
    for group in groups.values():
        # a single data rank has no batch axis to place, so it comes last
        ordered = sorted(
            group, key=lambda s: (data_ways(s.mesh) == 1, data_ways(s.mesh), -_sharded(s.mesh), s.ranks)
        )
        if not owners:
            shapes.append(tuple(ordered))
            continue
        alone = next((s.mesh for s in ordered if owners % _sharded(s.mesh) == 0), None)
        kept = [s for s in ordered if s.mesh == alone or _sharded(s.mesh) == 1] if alone else ordered
        shapes.append(tuple(sorted(kept, key=lambda s: s.mesh != alone)))
    return shapes


def staged_as(meshes: Iterable[Staged], config: Configuration) -> Staged:
    """Of some meshes that of a configuration, with its microbatch alone."""
    same = (s for s in meshes if s.mesh == config.mesh and s.ranks == config.pipe.ranks)
    # with an axis in place of data ranks that a batch does not divide over, it is none of the candidates
    return replace(next(same, Staged(config.mesh)), batches=(config.batch,))


def _sharded(mesh: Mesh) -> int:
    return prod(axis.size for axis in mesh.axes if axis.meaning.stores_sharded)
