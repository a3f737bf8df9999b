"""The device mesh: named axes over ranks, row-major (neighbours along the LAST axis are ranks r, r + 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from os import PathLike
from typing import Any

from autoshard.cluster.axes import AxisMeaning, meaning_of
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.load import load_cluster
from autoshard.errors import UsageError, nearest

_FORM = "write axis=size, separated by commas, for instance dp=2,tp=2"
#: devices of the largest machines that count as one node, for tp: two boards of eight
_LARGEST_NODE = 16
#: of devices that are all equally close: so many, at most
_LARGEST_FLAT = 64


@dataclass(frozen=True)
class Axis:
    """One axis: its name and how many ranks lie along it."""

    name: str
    size: int

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise UsageError(f"{self.name!r} is not a name for a mesh axis", hint=_FORM)
        meaning_of(self.name)
        if not isinstance(self.size, int) or isinstance(self.size, bool):
            raise UsageError(f"the size of axis {self.name!r} is not an integer: {self.size!r}", hint=_FORM)
        if self.size < 1:
            raise UsageError(f"the size of axis {self.name!r} is {self.size}", hint="give it 1 or more")

    @property
    def meaning(self) -> AxisMeaning:
        return meaning_of(self.name)

    def __str__(self) -> str:
        return f"{self.name}={self.size}"


@dataclass(frozen=True)
class Mesh:
    """Ranks 0 .. world_size - 1, laid out row-major over the axes."""

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        if not self.axes:
            raise UsageError("the mesh has no axes", hint=f"{_FORM}; one device is dp=1")
        for name in self.names:
            if self.names.count(name) > 1:
                raise UsageError(f"axis {name!r} appears twice", where=str(self), hint="use two names")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """The mesh that a text such as ``dp=2,tp=2`` describes, outermost axis first."""
        if not text.strip():
            raise UsageError("the mesh is empty", hint=_FORM)
        return cls(tuple(_axis(part.strip(), text) for part in text.split(",")))

    @classmethod
    def from_any(cls, obj: object, cluster: Cluster | None = None) -> Mesh:
        """The mesh that ``obj`` is or describes: a Mesh, a text, or a torch DeviceMesh with named dims.

        With a cluster, UsageError if it has too few devices.
        """
        if isinstance(obj, Mesh):
            mesh = obj
        elif isinstance(obj, str):
            mesh = cls.parse(obj)
        elif hasattr(obj, "mesh_dim_names") and hasattr(obj, "mesh"):
            mesh = _from_device_mesh(obj)
        else:
            hint = f"{_FORM}; or pass a torch DeviceMesh"
            raise UsageError(f"{type(obj).__name__} is not a mesh", hint=hint)
        if cluster is not None:
            cluster.check_world_size(mesh.world_size)
        return mesh

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def world_size(self) -> int:
        return prod(self.sizes)

    def index(self, axis: str | int) -> int:
        """Position of an axis, which may be given by name."""
        if isinstance(axis, str):
            if axis not in self.names:
                hint = nearest(axis, self.names)
                raise UsageError(f"the mesh has no axis {axis!r}", where=str(self), hint=hint)
            return self.names.index(axis)
        if not 0 <= axis < len(self.axes):
            raise UsageError(f"the mesh has no axis {axis}", where=str(self), why=f"it has {len(self.axes)}")
        return axis

    def stride(self, axis: str | int) -> int:
        """Distance in ranks between neighbours along an axis."""
        return prod(self.sizes[self.index(axis) + 1 :])

    def coords(self, rank: int) -> tuple[int, ...]:
        """Coordinates of a rank, one per axis."""
        if not 0 <= rank < self.world_size:
            why = f"ranks are 0 to {self.world_size - 1}"
            raise UsageError(f"there is no rank {rank}", where=str(self), why=why)
        coords: list[int] = []
        for size in reversed(self.sizes):
            rank, coordinate = divmod(rank, size)
            coords.append(coordinate)
        return tuple(reversed(coords))

    def rank(self, coords: Sequence[int]) -> int:
        """The rank at these coordinates, one per axis."""
        inside = all(0 <= coordinate < size for coordinate, size in zip(coords, self.sizes, strict=False))
        if len(coords) != len(self.axes) or not inside:
            raise UsageError(f"there are no coordinates {tuple(coords)}", where=str(self))
        rank = 0
        for coordinate, size in zip(coords, self.sizes, strict=True):
            rank = rank * size + coordinate
        return rank

    def groups(self, axis: str | int) -> tuple[tuple[int, ...], ...]:
        """Ranks that differ only along ``axis``, each group in order of that coordinate."""
        size, stride = self.sizes[self.index(axis)], self.stride(axis)
        block = size * stride
        return tuple(
            tuple(range(first, first + block, stride))
            for start in range(0, self.world_size, block)
            for first in range(start, start + stride)
        )

    def with_sequence_axis(self, name: str, ways: int) -> Mesh:
        """The mesh in which the data axis, of which there is one, leaves so many of its ranks to another."""
        (data,) = (axis for axis in self.axes if axis.meaning.splits_batch)
        rest = (axis for axis in self.axes if axis is not data)
        kept = (Axis(data.name, data.size // ways),) if data.size > ways else ()
        return Mesh((*kept, Axis(name, ways), *rest))

    def __str__(self) -> str:
        return ",".join(map(str, self.axes))


def parse_target(target: object) -> Mesh | Cluster:
    """What to compile for: a Mesh if its shape is given, a Cluster if the shape is to be searched.

    A text with ``=`` is a mesh; any other text or path names a cluster of the catalog or a ``.toml`` file.
    """
    if isinstance(target, Cluster):
        return target
    if isinstance(target, PathLike):
        return load_cluster(target)
    if not isinstance(target, str):
        return Mesh.from_any(target)
    if not target.strip():
        raise UsageError("the target is empty", hint=f"{_FORM}; or name a cluster")
    if "=" in target and not target.endswith(".toml"):
        return Mesh.parse(target)
    return load_cluster(target)


def expert_candidates(cluster: Cluster, world_size: int, experts: int) -> list[Mesh]:
    """Every fsdp x ep mesh of ``world_size`` ranks whose ep divides so many experts, and fits the wiring.

    What is not a mesh of `mesh_candidates` by another name: fsdp has two ranks or more.
    """
    used = cluster.used_by(world_size)
    return [
        Mesh((Axis("fsdp", world_size // ep), Axis("ep", ep)))
        for ep in divisors(experts)[1:]
        if world_size % ep == 0 and ep < world_size and _aligned((1, world_size // ep, ep), used, world_size)
    ]


def mesh_candidates(cluster: Cluster, world_size: int, widest_tp: int | None = None) -> list[Mesh]:
    """Every dp x fsdp x tp mesh of ``world_size`` ranks that fits the wiring of the cluster.

    Axes of size 1 are left out (dp=1 if all are). tp is innermost and at most ``widest_tp`` ranks wide; by
    default it stays inside a node: the largest level of at most 16 devices, or the innermost level of more
    than one device if all are larger, or 64 devices that are all equally close. An axis either stays within a
    group of a level or covers full groups; levels that hold the full mesh do not matter. Raises UsageError
    if the cluster has fewer devices.
    """
    if world_size < 1:
        raise UsageError(f"the world size is {world_size}", hint="it must be 1 or more")
    if widest_tp is not None and widest_tp < 1:
        raise UsageError(f"the widest tp is {widest_tp}", hint="it must be 1 or more")
    used = cluster.used_by(world_size)
    widest = widest_tp or min(_node(part, world_size) for part in used.groups or (used,))
    shapes = (
        (world_size // (fsdp * tp), fsdp, tp)
        for tp in divisors(world_size)
        if tp <= widest
        for fsdp in divisors(world_size // tp)
    )
    meshes = (_mesh_of(*shape) for shape in shapes if _aligned(shape, used, world_size))
    return list(meshes)


def divisors(number: int) -> list[int]:
    """All divisors of a positive integer, ascending; by its prime factors."""
    divisors_, prime = [1], 2
    while number > 1:
        if prime * prime > number:
            prime = number
        powers = [1]
        while number % prime == 0:
            number //= prime
            powers.append(powers[-1] * prime)
        divisors_ = [divisor * power for divisor in divisors_ for power in powers]
        prime += 1
    return sorted(divisors_)


def _node(cluster: Cluster, world_size: int) -> int:
    """Devices that are close enough to each other for tp."""
    sizes = [size for size in cluster.group_sizes if size > 1]
    everything = min(world_size, cluster.devices or world_size, _LARGEST_FLAT)
    return max((size for size in sizes if size <= _LARGEST_NODE), default=min(sizes, default=everything))


def _mesh_of(dp: int, fsdp: int, tp: int) -> Mesh:
    axes = tuple(Axis(name, size) for name, size in (("dp", dp), ("fsdp", fsdp), ("tp", tp)) if size > 1)
    return Mesh(axes or (Axis("dp", 1),))


def _aligned(shape: tuple[int, ...], cluster: Cluster, world_size: int) -> bool:
    """Whether every axis of this dp x fsdp x tp mesh stays within groups of levels or covers whole ones."""
    # the outermost axis ends where the mesh ends, whatever its shape: that excludes nothing
    extents = [extent for extent in (shape[2], shape[1] * shape[2]) if extent < world_size]
    inner = {size for group in cluster.groups for size in group.group_sizes}
    own = {level.size for level in cluster.levels if level.size is not None}
    sizes = [size for size in inner | own if size < world_size]
    if not all(size % extent == 0 or extent % size == 0 for extent in extents for size in sizes):
        return False
    starts = cluster.starts
    return all(
        all(start % extent == 0 for start in starts)
        or all(edge in starts for edge in range(0, world_size, extent))
        for extent in extents
    )


def _axis(part: str, text: str) -> Axis:
    name, equals, size = part.partition("=")
    if not equals:
        raise UsageError(f"{part!r} is not an axis", where=f"mesh {text!r}", hint=_FORM)
    try:
        return Axis(name.strip(), int(size))
    except ValueError:
        what = f"the size of axis {name.strip()!r} is not an integer: {size.strip()!r}"
        raise UsageError(what, where=f"mesh {text!r}", hint=_FORM) from None


def _from_device_mesh(device_mesh: Any) -> Mesh:
    if device_mesh.mesh_dim_names is None:
        hint = 'pass mesh_dim_names, for instance init_device_mesh(..., mesh_dim_names=("dp", "tp"))'
        raise UsageError("the DeviceMesh has no names for its dims", hint=hint)
    sizes = tuple(int(size) for size in device_mesh.mesh.shape)
    mesh = Mesh(tuple(Axis(name, size) for name, size in zip(device_mesh.mesh_dim_names, sizes, strict=True)))
    if device_mesh.mesh.flatten().tolist() != list(range(mesh.world_size)):
        why = f"the program numbers its ranks 0 to {mesh.world_size - 1}, row-major over the mesh"
        raise UsageError("the DeviceMesh orders its ranks differently", where=str(mesh), why=why)
    return mesh
