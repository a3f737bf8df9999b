"""Which meshes and pipelines are looked at for a model on a machine."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Axis, Mesh, divisors, expert_candidates, mesh_candidates
from autoshard.errors import UsageError
from autoshard.schedules.registry import check_slices, default_slices, lookup
from autoshard.search.configuration import Staged, data_ways
from autoshard.search.pipe import Pipe, pipes_of
from autoshard.stage_link import pipe_link


@dataclass(frozen=True)
class PipeAsk:
    """What is decided about a pipeline already.

    schedule: by name, "" for the best. chunks, microbatches: None for the best. slices: of the sequence, None
    for what is usual with the schedule.
    """

    schedule: str = ""
    chunks: int | None = None
    microbatches: int | None = None
    slices: int | None = None

    def __post_init__(self) -> None:
        if self.schedule:
            lookup(self.schedule)
        for name in ("chunks", "microbatches", "slices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}", hint="give 1 or more")
        if self.slices is not None and not self.schedule:
            raise UsageError(
                f"slices={self.slices} was asked for and no schedule", hint='give schedule="seq1f1b" as well'
            )
        if self.slices is not None:
            check_slices(self.schedule, self.slices)

    def sliced(self) -> int:
        """Slices of the sequence of a microbatch."""
        return (self.slices or default_slices(self.schedule)) if self.schedule else 1


def inner_mesh(mesh: Mesh) -> tuple[Mesh, int, int]:
    """(the mesh of one stage's ranks, size of pp, its place among the axes); pp is 1 where there is none."""
    found = [k for k, axis in enumerate(mesh.axes) if axis.name == "pp"]
    if not found:
        return mesh, 1, 0
    at = found[0]
    rest = tuple(axis for axis in mesh.axes if axis.name != "pp")
    return Mesh(rest or (Axis("dp", 1),)), mesh.axes[at].size, at


def given(mesh: Mesh, machine: Cluster, layers: int, total: int, ask: PipeAsk) -> Staged:
    """The one mesh that was asked for. total: sequences per step."""
    inner, ranks, at = inner_mesh(mesh)
    if ranks > 1 and at != 0:
        raise UsageError(
            "pp is not the first axis of the mesh",
            where=f"mesh {mesh}",
            why="neighbouring ranks then belong to different stages, and the inner axes are priced as if "
            "they did not",
            hint=f"write pp={ranks},{inner}",
        )
    link = pipe_link(machine, inner, ranks) if ranks > 1 else None
    return Staged(inner, _pipes(ranks, layers, ask), _batches(inner, total, ask), link)


def searched(
    machine: Cluster, world: int, layers: int, total: int, ask: PipeAsk, experts: int = 0
) -> list[Staged]:
    """Every mesh that fits the wiring of a cluster, alone and as one of several pipeline ranks.

    experts: that a model has, over which an axis of its own may divide ranks; not within pipelines.

    Clusters of unlike groups or with measured links are searched without pipelines.
    """
    meshes = mesh_candidates(machine, world) + expert_candidates(machine, world, experts)
    plain = [Staged(m, batches=_batches(m, total, ask)) for m in meshes]
    if machine.groups or machine.links is not None or total < 2:
        return plain
    found = [] if ask.schedule else plain
    for ranks in divisors(world)[1:]:
        if ranks > max(1, layers):
            continue
        pipes = _pipes(ranks, layers, ask)
        for mesh in mesh_candidates(machine, world // ranks):
            if total % data_ways(mesh) == 0:
                batches = _batches(mesh, total, ask)
                found.append(Staged(mesh, pipes, batches, pipe_link(machine, mesh, ranks)))
    return found


def _pipes(ranks: int, layers: int, ask: PipeAsk) -> tuple[Pipe, ...]:
    if ranks == 1 and (ask.slices or 1) > 1:
        raise UsageError(
            f"slices={ask.slices} was asked for, and the mesh has no pipeline",
            hint="give the mesh a pp axis, as in pp=4,dp=2",
        )
    return tuple(pipes_of(ranks, layers, ask.schedule, ask.chunks, ask.sliced()))


def _batches(mesh: Mesh, total: int, ask: PipeAsk) -> tuple[int, ...]:
    """The microbatch that is asked for, in sequences over the mesh."""
    if ask.microbatches is None:
        return ()
    if total % (ask.microbatches * data_ways(mesh)):
        raise UsageError(
            f"{total} sequences do not divide into {ask.microbatches} microbatches",
            where=f"mesh {mesh}",
            why=f"each is split over {data_ways(mesh)} data ranks",
            hint="choose another number of microbatches, or another batch",
        )
    return (total // ask.microbatches,)
