"""The axes that the search sees, which may each stand for several axes of the mesh.

dp and fsdp both split the batch and nothing else; they differ only in how parameters are stored. So one
axis of the search serves for both, which saves most of the states; parameters alone are seen on the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from autoshard.cluster.axes import DP, AxisMeaning
from autoshard.cluster.mesh import Axis, Mesh
from autoshard.ir.placement import Layout, Placement, R, Shard, layout_ok


@dataclass(frozen=True)
class SearchAxes:
    """sizes, meanings: of the axes that ops are searched on. spread: for each, the mesh axes it stands for.

    mesh_sizes, mesh_meanings: of the mesh itself.
    """

    sizes: tuple[int, ...]
    meanings: tuple[AxisMeaning, ...]
    spread: tuple[tuple[int, ...], ...]
    mesh_sizes: tuple[int, ...]
    mesh_meanings: tuple[AxisMeaning, ...]

    @property
    def merged(self) -> bool:
        return len(self.sizes) != len(self.mesh_sizes)

    def to_mesh(self, layout: Layout) -> Layout:
        """A layout over the search's axes as one over the mesh."""
        if not self.merged:
            return layout
        placements: dict[int, Placement] = {}
        for one, axes in zip(layout, self.spread, strict=True):
            placements.update((axis, one) for axis in axes)
        return tuple(placements[axis] for axis in range(len(self.mesh_sizes)))


def plain_axes(mesh: Mesh, meanings: tuple[AxisMeaning, ...] = ()) -> SearchAxes:
    """Every axis of the mesh on its own; meanings: other than those of the axes' names."""
    meanings = meanings or tuple(axis.meaning for axis in mesh.axes)
    alone = tuple((axis,) for axis in range(len(mesh.axes)))
    return SearchAxes(mesh.sizes, meanings, alone, mesh.sizes, meanings)


def merged_axes(mesh: Mesh) -> SearchAxes:
    """Neighbouring axes that do nothing but split the batch as one."""
    spread: list[list[int]] = []
    for axis, one in enumerate(mesh.axes):
        if spread and _only_batch(one.meaning) and _only_batch(mesh.axes[spread[-1][-1]].meaning):
            spread[-1].append(axis)
        else:
            spread.append([axis])
    meanings = [axis.meaning for axis in mesh.axes]
    return SearchAxes(
        tuple(prod(mesh.sizes[a] for a in axes) for axes in spread),
        tuple(DP if len(axes) > 1 else meanings[axes[0]] for axes in spread),
        tuple(map(tuple, spread)),
        mesh.sizes,
        tuple(meanings),
    )


def merged_mesh(axes: SearchAxes, names: Sequence[str]) -> Mesh:
    """A mesh with the search's axes, for the prices of their collectives."""
    named = ("_".join(names[a] for a in spread) for spread in axes.spread)
    return Mesh(tuple(Axis(name, size) for name, size in zip(named, axes.sizes, strict=True)))


def _only_batch(meaning: AxisMeaning) -> bool:
    return meaning.splits_batch and meaning.splits_batch_inside and not meaning.splits_layers


def axes_of_batch(mesh: Mesh, batch: int) -> SearchAxes:
    """Every axis of the mesh on its own; those that would divide a batch into more parts than it has rows
    replicate it."""
    meanings: list[AxisMeaning] = []
    layout: tuple[Placement, ...] = ()
    for axis in mesh.axes:
        placed: Placement = Shard(0) if axis.meaning.splits_batch and axis.size > 1 else R
        small = not layout_ok((batch,), (*layout, placed), mesh.sizes[: len(layout) + 1])
        meanings.append(_replicating(axis.meaning) if small else axis.meaning)
        layout += (R if small else placed,)
    return plain_axes(mesh, tuple(meanings))


def _replicating(meaning: AxisMeaning) -> AxisMeaning:
    return replace(meaning, splits_batch=False, splits_batch_inside=False)
