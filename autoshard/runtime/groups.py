"""Process groups for a mesh."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from autoshard.cluster.mesh import Mesh
from autoshard.errors import UsageError
from autoshard.program.program import Program
from autoshard.runtime.checks.collective_watchdog import ranks_text
from autoshard.torch_adapters.groups import copy_timeout


def world_size() -> int:
    """Ranks of the job, also before there is a process group."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def device_mesh_for(mesh: str, given: DeviceMesh | None = None) -> DeviceMesh:
    """The DeviceMesh of a program, made from torchrun's environment unless one is given.

    Raises UsageError if the world does not have as many ranks as the mesh.
    """
    wanted = Mesh.parse(mesh)
    if given is not None:
        names = tuple(given.mesh_dim_names or ())
        if any(bool((given.mesh.diff(dim=k) <= 0).any()) for k in range(given.mesh.dim())):
            raise UsageError(
                "the ranks of the DeviceMesh given do not ascend along its axes",
                where=str(given),
                why="torch numbers the ranks of a process group in ascending order, whatever the mesh says",
                hint="order the ranks of the mesh",
            )
        if tuple(given.mesh.shape) == wanted.sizes and names == wanted.names:
            return given
        # a pipeline of single ranks has a mesh of one rank per stage, which a user need not name
        sizes = dict(zip(names, given.mesh.shape, strict=False))
        if {n: s for n, s in sizes.items() if s > 1} != {a.name: a.size for a in wanted.axes if a.size > 1}:
            raise UsageError(f"the DeviceMesh given is not the mesh {mesh}", where=str(given))
        return _reordered(given, names, wanted)
    if not dist.is_initialized() and "RANK" not in os.environ:
        raise UsageError(
            "no process group, and none can be made",
            why="the environment has no RANK: this process was not started by torchrun",
            hint=f"torchrun --nproc-per-node {wanted.world_size} ...",
        )
    init_world(wanted)
    new = init_device_mesh(world_device_type(), wanted.sizes, mesh_dim_names=wanted.names)
    # torch gives the groups of a mesh half an hour, whatever init_process_group was told
    for axis in range(new.ndim):
        copy_timeout(dist.group.WORLD, new.get_group(axis))
    return new


def init_world(wanted: Mesh | None) -> None:
    """Make the process group that torchrun's environment is for, if there is one and no group yet.

    wanted: the mesh that the ranks are for, where it is known. Raises UsageError if it is of another size.
    """
    if not dist.is_initialized() and "RANK" not in os.environ:
        return
    if wanted is not None:
        _check_world(world_size(), wanted)
    if not dist.is_initialized():
        init_process_group()


def init_process_group(backend: str | None = None, *, timeout: timedelta | None = None) -> None:
    """torch's, from torchrun's environment, of ranks that meet anew after each restart.

    torchrun keeps its store when it restarts ranks (``--max-restarts``), and over gloo they would look for
    the ports of those that are gone.

    Args:
        backend: nccl where there are GPUs, gloo otherwise.
        timeout: of collectives; torch's own if it is not given.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    wait = timeout or default_pg_timeout
    store, rank, size = next(iter(rendezvous("env://", timeout=wait)))
    store = PrefixStore(f"autoshard/{_token(store, rank, size, wait)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _token(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """A name that the ranks that are there agree on, in a store that may have keys of ranks that are gone.

    Every rank says its own number, which is new. The first rank answers each number with the name until all
    ranks have it: numbers of ranks that are gone are never heard of again.
    """
    number = uuid.uuid4().hex
    store.set(f"autoshard/number/{rank}", number)
    if rank:
        store.wait([f"autoshard/name/{number}"], timeout)
        name = store.get(f"autoshard/name/{number}").decode()
        store.set(f"autoshard/heard/{name}/{rank}", "")
        return name
    left, answered = set(range(1, size)), set[str]()
    end = time.monotonic() + timeout.total_seconds()
    while left:
        if time.monotonic() > end:
            raise UsageError(
                f"{ranks_text(sorted(left))} did not start",
                why=f"the others waited for {timeout.total_seconds():.0f} s",
                hint="look at what they printed",
            )
        for other in sorted(left):
            if store.check([f"autoshard/heard/{number}/{other}"]):
                left.discard(other)
            elif store.check([f"autoshard/number/{other}"]):
                theirs = store.get(f"autoshard/number/{other}").decode()
                if theirs not in answered:
                    answered.add(theirs)
                    store.set(f"autoshard/name/{theirs}", number)
        time.sleep(0.01)
    return number


def world_device_type() -> str:
    """Of the tensors that the ranks of the world send each other."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def device_here(kind: str) -> torch.device:
    """The device of this rank. kind: of device."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def reduced(
    groups: Sequence[dist.ProcessGroup], x: torch.Tensor, op: Literal["min", "max", "sum"]
) -> torch.Tensor:
    """A tensor reduced over all ranks of a mesh, in place: along its axes in turn. groups: one per axis."""
    ops = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}
    for group in groups:
        dist.all_reduce(x, ops[op], group=group)
    return x


def all_equal(groups: Sequence[dist.ProcessGroup], number: int, device: torch.device) -> bool:
    """Whether all ranks of a mesh give the same number, of 63 bits; collective."""
    ends = reduced(groups, torch.tensor([number, -number], dtype=torch.int64, device=device), "min")
    return int(ends[0]) == -int(ends[1])


def _reordered(given: DeviceMesh, names: tuple[str, ...], wanted: Mesh) -> DeviceMesh:
    """The same ranks at the same coordinates, with the axes in the program's order."""
    known = [n for n in wanted.names if n in names]
    others = [n for n in names if n not in known]
    places = given.mesh.permute([names.index(n) for n in [*known, *others]]).reshape(wanted.sizes)
    return DeviceMesh(given.device_type, places, mesh_dim_names=wanted.names)


@dataclass(frozen=True)
class RankPlace:
    """Where this rank stands.

    mesh: of the ranks that run the same stages; inner_rank: its place in there. stages: those it runs.
    pipe_rank: its place along pp. peers: the ranks of the world that differ from it only along pp. order: the
    rank of the world at every place of the full mesh.
    """

    mesh: DeviceMesh
    inner_rank: int
    device: torch.device
    stages: frozenset[int]
    pipe_rank: int
    peers: tuple[int, ...]
    order: tuple[int, ...]


def place_of(program: Program, mesh: DeviceMesh) -> RankPlace:
    """The place of this rank in a program. mesh: of all ranks, with the pp axis if there is one.

    Raises UsageError if the world is not of the program's size.
    """
    full = Mesh.parse(program.full_mesh)
    if full.world_size != mesh.size():
        raise UsageError(
            f"the program is for {full.world_size} ranks, the world has {mesh.size()}",
            where=f"mesh {full}",
            hint=f"start {full.world_size} processes, or compile for another mesh",
        )
    device = device_here(mesh.device_type)
    # a mesh given by the user may put the ranks of the world anywhere
    order = tuple(int(r) for r in mesh.mesh.flatten())
    rank = order.index(dist.get_rank())
    if program.stages is None:
        return RankPlace(mesh, rank, device, frozenset((0,)), 0, (dist.get_rank(),), order)
    coords = list(full.coords(rank))
    at = program.stages.position
    peers = []
    for k in range(full.sizes[at]):
        coords[at] = k
        peers.append(order[full.rank(coords)])
    pipe_rank = peers.index(dist.get_rank())
    inner = Mesh.parse(program.mesh)
    inner_rank = inner.rank([c for k, c in enumerate(full.coords(rank)) if k != at])
    stages = frozenset(s for s, r in enumerate(program.stages.schedule.owner) if r == pipe_rank)
    return RankPlace(mesh[inner.names], inner_rank, device, stages, pipe_rank, tuple(peers), order)


def _check_world(size: int, mesh: Mesh) -> None:
    if size != mesh.world_size:
        raise UsageError(
            f"the world has {size} ranks, the mesh {mesh} has {mesh.world_size}",
            hint=f"torchrun --nproc-per-node {mesh.world_size} ..., or plan for another mesh",
        )
