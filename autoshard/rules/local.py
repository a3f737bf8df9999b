"""What a localizer sees: one call, its placements, and the mesh.

Everything that depends on the rank is given as symbols (`LocalSize`, `LocalOffset`), so that one
text serves all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoshard.ir import Arg, LocalOffset, LocalSize, Node, ShardOf, TensorType
from autoshard.ir.placement import Layout, Shard, local_extent, shards_of_dim


@dataclass(frozen=True)
class MeshShape:
    """Names and sizes of the mesh axes: all that lowering needs to know of a mesh.

    uneven: whether who runs a call may have several of equal parts, so that every local extent is a symbol.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    uneven: bool = False

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


def symbolic_extent(size: int, layout: Layout, dim: int, mesh: MeshShape) -> int | LocalSize:
    """Local elements of a dim: an int if all ranks hold the same number, else a symbol."""
    shards = [
        (n, p) for n, p in zip(mesh.names, layout, strict=True) if isinstance(p, Shard) and p.dim == dim
    ]
    if not shards:
        return size
    zero = (0,) * len(mesh.sizes)
    last = tuple(t - 1 for t in mesh.sizes)
    first = local_extent(size, shards_of_dim(layout, dim, mesh.sizes, zero))[1]
    if not mesh.uneven and first == local_extent(size, shards_of_dim(layout, dim, mesh.sizes, last))[1]:
        return first
    return LocalSize(size, tuple(ShardOf(n, p.outer, p.inner) for n, p in shards))


def symbolic_shape(shape: Sequence[int], layout: Layout, mesh: MeshShape) -> tuple[int | LocalSize, ...]:
    return tuple(symbolic_extent(n, layout, d, mesh) for d, n in enumerate(shape))


def symbolic_offset(size: int, layout: Layout, dim: int, mesh: MeshShape) -> int | LocalOffset:
    """Global index of the first local element of a dim that is split in contiguous pieces."""
    shards = [
        (n, p) for n, p in zip(mesh.names, layout, strict=True) if isinstance(p, Shard) and p.dim == dim
    ]
    if not shards:
        return 0
    return LocalOffset(size, tuple(ShardOf(n, p.outer, p.inner) for n, p in shards))


@dataclass(frozen=True)
class LocalCall:
    """One call with the placements it was given.

    node: the call, with global types. ins, outs: global types of tensor inputs and outputs.
    in_layouts, out_layouts: their placements on the mesh.
    """

    node: Node
    ins: tuple[TensorType, ...]
    in_layouts: tuple[Layout, ...]
    out_layouts: tuple[Layout | None, ...]
    mesh: MeshShape

    def out_shape(self, index: int = 0) -> tuple[int | LocalSize, ...]:
        """-1 for the slots of experts, of which the data say how many there are."""
        type_, layout = self.node.types[index], self.out_layouts[index]
        assert type_ is not None and layout is not None
        shape = symbolic_shape(type_.shape, layout, self.mesh)
        return shape if type_.filled is None else (-1, *shape[1:])

    def in_shape(self, index: int) -> tuple[int | LocalSize, ...]:
        return symbolic_shape(self.ins[index].shape, self.in_layouts[index], self.mesh)

    def in_offset(self, index: int, dim: int) -> int | LocalOffset:
        return symbolic_offset(self.ins[index].shape[dim], self.in_layouts[index], dim, self.mesh)

    def out_offset(self, index: int, dim: int) -> int | LocalOffset:
        type_, layout = self.node.types[index], self.out_layouts[index]
        assert type_ is not None and layout is not None
        return symbolic_offset(type_.shape[dim], layout, dim, self.mesh)

    def in_split(self, index: int, dim: int) -> bool:
        return any(isinstance(p, Shard) and p.dim == dim for p in self.in_layouts[index])

    def with_args(self, changes: dict[int, Arg], op: str | None = None) -> Node:
        """The call with some positional arguments (and perhaps the op) exchanged."""
        args = tuple(changes.get(k, a) for k, a in enumerate(self.node.args))
        return replace(self.node, args=args, op=op or self.node.op)


def shape_arg(index: int) -> Callable[[LocalCall], Node]:
    """A localizer that puts the local shape of the first output at positional argument ``index``."""

    def localize(call: LocalCall) -> Node:
        return call.with_args({index: call.out_shape(0)})

    return localize
