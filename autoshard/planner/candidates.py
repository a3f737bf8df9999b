"""Which meshes and pipelines are looked at for a model on a machine."""

from __future__ import annotations

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Axis, Mesh, divisors, expert_candidates, mesh_candidates
from autoshard.cost.collective import AxisLink, seconds
from autoshard.cost.on_mesh import laid_roughly
from autoshard.cost.stage_machines import (
    across_nodes,
    boundary_links,
    bounding_machine,
    full_mesh,
    inner_candidates,
    limits,
    stage_machines,
)
from autoshard.errors import UsageError
from autoshard.ir.scaled import FORMATS, rate_of
from autoshard.options import PlanOptions, allowed
from autoshard.planner.stage_link import pipe_link
from autoshard.schedules.registry import check_slices, default_slices, lookup
from autoshard.search.solve.configuration import Staged, data_ways
from autoshard.search.solve.pipeline_model import Pipe, pipes_of

#: bytes of a message by which links are compared
_MESSAGE = 2.0**20


def check_pipeline(options: PlanOptions) -> None:
    """UsageError for a schedule that there is not, or slices that it cannot have."""
    if options.schedule:
        lookup(options.schedule)
    if options.slices is not None and not options.schedule:
        raise UsageError(
            f"slices={options.slices} was asked for and no schedule",
            hint='give schedule="seq1f1b" as well',
        )
    if options.slices is not None:
        check_slices(options.schedule, options.slices)


def check_products(options: PlanOptions, machine: Cluster) -> None:
    """UsageError for products of 8-bit operands that the GPUs of a cluster have no units for."""
    name, device = options.products.partition(":")[0], machine.device
    if name and device.kernels.multiprocessors and rate_of(FORMATS[name].scale) not in device.peak_flops:
        raise UsageError(
            f"the devices of {machine.name} multiply no 8-bit floats",
            why="its peak_flops has no rate for f8",
            hint="leave --products out, or say the rate in a cluster file",
        )


def check_allowed(options: PlanOptions) -> None:
    """UsageError for words of ``allow`` that say nothing to a plan, or go with none of its other options."""
    groups, others = allowed(options.allow)
    if others:
        raise UsageError(
            f"a plan is the same whether {', '.join(others)} is allowed",
            hint="allow it where the program is compiled",
        )
    if groups and ((options.expert_chunks or 1) > 1 or options.replicate_experts):
        raise UsageError(
            f"{groups[0]} goes with neither chunks nor replicas of experts",
            hint="leave out --expert-chunks and --replicate-experts",
        )


def _sliced(options: PlanOptions) -> int:
    """Slices of the sequence of a microbatch."""
    return (options.slices or default_slices(options.schedule)) if options.schedule else 1


def inner_mesh(mesh: Mesh) -> tuple[Mesh, int, int]:
    """(the mesh of one stage's ranks, size of pp, its place among the axes); pp is 1 where there is none."""
    positions = [k for k, axis in enumerate(mesh.axes) if axis.name == "pp"]
    if not positions:
        return mesh, 1, 0
    at = positions[0]
    rest = tuple(axis for axis in mesh.axes if axis.name != "pp")
    return Mesh(rest or (Axis("dp", 1),)), mesh.axes[at].size, at


def given_mesh(mesh: Mesh, machine: Cluster, layers: int, total: int, options: PlanOptions) -> Staged:
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
    if options.schedule and "pp" not in mesh.names:
        raise UsageError(
            f"the schedule {options.schedule} was asked for, and the mesh has no pipeline",
            where=f"mesh {mesh}",
            hint="give the mesh a pp axis, as in pp=4,dp=2",
        )
    pipes, batches = _pipes(ranks, layers, options), _batches(inner, total, options)
    if not pipes:
        raise UsageError(
            f"no schedule has {options.chunks} stages per rank on {ranks} pipeline ranks and {layers} layers",
            hint="leave out --chunks, or name a schedule",
        )
    return _Machines(machine).staged(inner, ranks, pipes, batches)


def candidate_meshes(
    machine: Cluster, world: int, layers: int, total: int, options: PlanOptions, experts: int = 0
) -> list[Staged]:
    """Every mesh that fits the wiring of a cluster, alone and as one of several pipeline ranks.

    experts: that a model has, over which an axis of its own may divide ranks; within pipelines on machines of
    one kind.

    Of pipelines on a cluster of unlike groups, those whose ranks are each in one group, or full groups.
    """
    meshes = mesh_candidates(machine, world) + expert_candidates(machine, world, experts)
    # over how many data ranks each divides is for the search to see: other axes may take the rest
    given = () if options.microbatches is None else (_microbatch(total, options.microbatches),)
    plain = [Staged(m, batches=given or _batches(m, total, options)) for m in meshes]
    candidates = [] if options.schedule else plain
    machines = _Machines(machine)
    for ranks in divisors(world)[1:] if total > 1 else ():
        if ranks > max(1, layers):
            continue
        pipes = _pipes(ranks, layers, options)
        inner = inner_candidates(machine, world // ranks, ranks) if pipes else []
        if pipes and not machine.groups:
            inner = [*inner, *expert_candidates(machine, world // ranks, experts)]
        for mesh in (m for each in inner for m in (each, *_with_context(each, ranks, total, options))):
            if (*given, total)[0] % data_ways(mesh) == 0:
                candidates.append(machines.staged(mesh, ranks, pipes, _batches(mesh, total, options)))
    if options.schedule and not candidates:
        raise _no_pipeline(world, layers, (*given, total)[0], options)
    return candidates


def _with_context(mesh: Mesh, ranks: int, total: int, options: PlanOptions) -> list[Mesh]:
    """The mesh with a part of its data ranks as ``cp``, where the pipeline would have fewer microbatches than
    ranks: then as many. Not beside slices, which divide the sequence as well."""
    if _sliced(options) > 1:
        return []
    data = [axis.size for axis in mesh.axes if axis.meaning.splits_batch]
    ways = -(-data_ways(mesh) * ranks // total)
    if len(data) != 1 or ways == 1 or data[0] % ways:
        return []
    return [mesh.with_sequence_axis("cp", ways)]


def _no_pipeline(world: int, layers: int, rows: int, options: PlanOptions) -> UsageError:
    """rows: sequences that run at once, at most."""
    stages = f"2 to {max(2, layers)} stages of as many ranks each"
    why = f"it needs {stages}, whose data axes divide {rows} sequences"
    return UsageError(
        f"{world} ranks have no pipeline for the schedule {options.schedule}",
        why=why if (options.global_batch or 1) > 1 else "a step has one sequence or no --global-batch",
        hint="leave out --schedule, or choose another --global-batch or number of ranks",
    )


class _Machines:
    """What the ranks of pipelines run on and are joined by."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        #: ranks -> their links, which depend on how many they are alone
        self._links: dict[int, tuple[AxisLink, ...]] = {}

    def staged(self, mesh: Mesh, ranks: int, pipes: tuple[Pipe, ...], batches: tuple[int, ...]) -> Staged:
        """A mesh for every one of so many ranks."""
        if ranks == 1:
            return Staged(mesh, pipes, batches)
        used = self._cluster.used_by(ranks * mesh.world_size)
        if used.alike:  # as far as it is used: one group of several may be enough
            across = across_nodes(used, mesh, ranks)
            return Staged(mesh, pipes, batches, pipe_link(used, mesh, ranks), across=across)
        laid = laid_roughly(self._cluster, full_mesh(mesh, ranks))
        links = self._between(laid, mesh, ranks)
        slowest = max(links[:-1], key=lambda link: seconds("send", _MESSAGE, link))
        machines = stage_machines(laid, mesh, ranks)
        bound, devices = bounding_machine(laid, mesh, ranks), tuple(m.device for m in machines)
        devices = () if all(device == bound.device for device in devices) else devices
        return Staged(mesh, pipes, batches, slowest, links, devices, limits(bound, machines, mesh))

    def _between(self, laid: Cluster, mesh: Mesh, ranks: int) -> tuple[AxisLink, ...]:
        if laid.links is not None:
            return boundary_links(laid, mesh.world_size, ranks)
        if ranks not in self._links:
            self._links[ranks] = boundary_links(laid, mesh.world_size, ranks)
        return self._links[ranks]


def _pipes(ranks: int, layers: int, options: PlanOptions) -> tuple[Pipe, ...]:
    if ranks == 1 and (options.slices or 1) > 1:
        raise UsageError(
            f"slices={options.slices} was asked for, and the mesh has no pipeline",
            hint="give the mesh a pp axis, as in pp=4,dp=2",
        )
    return tuple(pipes_of(ranks, layers, options.schedule, options.chunks, _sliced(options)))


def _batches(mesh: Mesh, total: int, options: PlanOptions) -> tuple[int, ...]:
    """The microbatch that is asked for, in sequences over the mesh."""
    if options.microbatch_size is not None:
        size, least = min(options.microbatch_size, total), min(data_ways(mesh), total)
        near = (*range(size, least - 1, -1), *range(size + 1, total + 1))
        return (next(n for n in near if total % n == 0),)
    if options.microbatches is None:
        return ()
    size, ways = _microbatch(total, options.microbatches), data_ways(mesh)
    if size % ways:
        raise UsageError(
            f"microbatches of {size} sequences do not divide over {ways} data ranks",
            where=f"mesh {mesh}",
            why=f"{total} sequences in {options.microbatches} microbatches were asked for",
            hint="choose fewer microbatches, a larger batch, or a mesh that shards the batch less",
        )
    return (size,)


def _microbatch(total: int, count: int) -> int:
    """Sequences of each of so many microbatches."""
    if total % count:
        raise UsageError(
            f"{total} sequences do not divide into {count} microbatches",
            hint="choose another number of microbatches, or another --global-batch",
        )
    return total // count
