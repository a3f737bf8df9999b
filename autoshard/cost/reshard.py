"""From one layout to another: which collectives, at what cost.

A step changes one axis by one collective (or a free local slice). All cheapest sequences between the
layouts of one value are found together: a shortest-path closure over the layouts as nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autoshard.cost.collective import AxisLink, seconds
from autoshard.ir import TensorType
from autoshard.ir.collectives import TransferKind, transfer_between
from autoshard.ir.local_bytes import held_numel
from autoshard.ir.placement import Layout, Placement, R, Replicate, Shard, is_part_in_one_piece, layout_ok

#: placements that every axis may have
PerAxis: TypeAlias = tuple[tuple[Placement, ...], ...]

#: a local slice is a copy that the next op reads anyway; a nanosecond keeps shorter paths preferred, and
#: messages of rows, which products can take in chunks, to those along a later dim that cost as much
SLICE_SECONDS = 1e-9


@dataclass(frozen=True, slots=True)
class AxisChange:
    """One change of one axis."""

    kind: TransferKind
    axis: int
    source: Placement
    target: Placement


def _alone(layout: Layout, axis: int) -> bool:
    """Whether no later axis splits the same part of the same dim further (then this axis is innermost)."""
    mine = layout[axis]
    assert isinstance(mine, Shard)
    return not any(
        isinstance(p, Shard) and p.dim == mine.dim and p.blocks == mine.blocks for p in layout[axis + 1 :]
    )


def _middle(shape: Sequence[int], layout: Layout, axis: int, sizes: Sequence[int]) -> int:
    """Elements of the part that this axis splits, on a rank, before the split."""
    mine = layout[axis]
    assert isinstance(mine, Shard)
    middle = shape[mine.dim] // (mine.blocks * mine.inner)
    for p, ways in zip(layout[:axis], sizes, strict=False):
        if isinstance(p, Shard) and p.dim == mine.dim and p.blocks == mine.blocks:
            middle = -(-middle // ways)
    return middle


def step_between(
    shape: Sequence[int], source: Layout, target: Layout, sizes: Sequence[int]
) -> AxisChange | None:
    """The step that leads from one layout to another, or None if no single step does."""
    changed = [a for a, (p, q) in enumerate(zip(source, target, strict=True)) if p != q]
    if len(changed) != 1:
        return None
    axis = changed[0]
    p, q = source[axis], target[axis]
    if isinstance(p, Shard) and not _alone(source, axis):
        return None
    if isinstance(q, Shard) and not _alone(target, axis):
        return None
    kind = transfer_between(p, q)
    if kind == "all_to_all" and not all(_even(shape, layout, axis, sizes) for layout in (source, target)):
        return None
    return None if kind is None else AxisChange(kind, axis, p, q)


def _even(shape: Sequence[int], layout: Layout, axis: int, sizes: Sequence[int]) -> bool:
    """Whether all ranks of an axis hold as much as each other."""
    return not isinstance(layout[axis], Shard) or _middle(shape, layout, axis, sizes) % sizes[axis] == 0


@dataclass(frozen=True)
class ReshardTable:
    """Cheapest ways between all layouts of one type of value.

    seconds: [from, to]; inf where there is no way. hop: [from, to] index of the next layout.
    """

    layouts: tuple[Layout, ...]
    index: dict[Layout, int]
    seconds: NDArray[np.float64]
    hop: NDArray[np.int64]
    shape: tuple[int, ...]
    sizes: tuple[int, ...]

    def steps(self, source: Layout, target: Layout) -> list[tuple[AxisChange, Layout]]:
        """The steps from one layout to another, each with the layout it arrives at."""
        at, goal = self.index[source], self.index[target]
        path: list[tuple[AxisChange, Layout]] = []
        while at != goal:
            following = int(self.hop[at, goal])
            step = step_between(self.shape, self.layouts[at], self.layouts[following], self.sizes)
            assert step is not None
            path.append((step, self.layouts[following]))
            at = following
        return path


@dataclass(frozen=True)
class Share:
    """Shares in (0, 1] that a value has in the messages it travels in; it pays as much of what these cost.

    all_reduce: of those, which parameters of all layers may share. other: of all other messages.
    """

    all_reduce: float = 1.0
    other: float = 1.0

    def of(self, kind: TransferKind) -> float:
        return self.all_reduce if kind == "all_reduce" else self.other


#: of a value that travels alone
ALONE = Share()


@dataclass(frozen=True)
class ReshardCost:
    """Prices of steps on one mesh.

    links: per axis. memory_bandwidth: bytes/s, for the copies around a collective. known: closures
    already made, by everything they depend on; priced: collectives, likewise.
    """

    sizes: tuple[int, ...]
    links: tuple[AxisLink, ...]
    memory_bandwidth: float
    known: dict[object, ReshardTable] = field(default_factory=dict, compare=False, repr=False)
    priced: dict[object, float] = field(default_factory=dict, compare=False, repr=False)

    def step_seconds(self, type_: TensorType, source: Layout, step: AxisChange) -> float:
        """Seconds of one step taken from ``source``."""
        full = tuple(Replicate() if a == step.axis else p for a, p in enumerate(source))
        width = type_.nbytes / max(1, type_.numel)
        nbytes = type_.existing(held_numel(type_.shape, full, self.sizes)) * width
        time, copy = self._prices(step.kind, step.axis, nbytes)
        for end in (step.source, step.target):
            layout = tuple(end if a == step.axis else p for a, p in enumerate(source))
            copied, later = self._copies(type_, layout, step.axis)
            time += (copy if copied else 0.0) + later
        return time

    def table(
        self, type_: TensorType, layouts: Iterable[Layout], share: Share = ALONE, scale: float = 1.0
    ) -> ReshardTable:
        """The closure over all layouts that mix the axis placements of ``layouts`` and Replicate.

        share: of messages with other values. The ways are those that are cheapest for the value alone.
        scale: the value is as many times as large.
        """
        per_axis = tuple(
            tuple(dict.fromkeys([R, *placements])) for placements in zip(*layouts, strict=True)
        ) or ((R,),) * len(self.sizes)
        return self._known(type_, per_axis, share, scale)

    def _known(self, type_: TensorType, per_axis: PerAxis, share: Share, scale: float) -> ReshardTable:
        key = (type_, per_axis, share, scale)
        if key not in self.known:
            make = self._closure if share == ALONE else self._shared
            self.known[key] = make(type_, per_axis, share, scale)
        return self.known[key]

    def _shared(self, type_: TensorType, per_axis: PerAxis, share: Share, scale: float) -> ReshardTable:
        """The ways of a value that travels alone, at the prices of a share."""
        alone = self._known(type_, per_axis, ALONE, scale)
        edges = self._edges(type_, per_axis, share, scale, alone.layouts)
        goals = np.arange(len(alone.layouts))[None, :]
        at = np.tile(goals.T, (1, len(alone.layouts)))
        total = np.zeros(alone.seconds.shape)
        while (at != goals).any():
            following = alone.hop[at, goals]
            total += edges[at, following]  # nothing from a layout to itself
            at = following
        return replace(alone, seconds=total)

    def _closure(self, type_: TensorType, per_axis: PerAxis, share: Share, scale: float) -> ReshardTable:
        """Floyd-Warshall over single steps."""
        nodes = tuple(c for c in product(*per_axis) if layout_ok(type_.shape, c, self.sizes))
        cost = self._edges(type_, per_axis, share, scale, nodes)
        hop = np.empty(cost.shape, dtype=np.int64)
        hop[:] = np.arange(len(nodes))
        for k in range(len(nodes)):
            # never better from or to k itself, so that nothing is read that was written
            via = cost[:, k : k + 1] + cost[k]
            better = via < cost
            np.copyto(cost, via, where=better)
            np.copyto(hop, hop[:, k : k + 1], where=better)
        index = {layout: i for i, layout in enumerate(nodes)}
        return ReshardTable(nodes, index, cost, hop, type_.shape, self.sizes)

    def _edges(
        self, type_: TensorType, per_axis: PerAxis, share: Share, scale: float, nodes: Sequence[Layout]
    ) -> NDArray[np.float64]:
        """[from, to]: seconds of single steps; inf where no single step leads, 0 to itself."""
        width = scale * type_.nbytes / max(1, type_.numel)
        held = [type_.existing(held_numel(type_.shape, layout, self.sizes)) * width for layout in nodes]
        cost = np.full((len(nodes), len(nodes)), np.inf)
        np.fill_diagonal(cost, 0.0)
        for axis in range(len(per_axis)):
            # a step changes one axis, of layouts that are the same on all others
            alike: dict[tuple[Layout, Layout], list[int]] = {}
            for i, layout in enumerate(nodes):
                if not isinstance(layout[axis], Shard) or _alone(layout, axis):
                    alike.setdefault((layout[:axis], layout[axis + 1 :]), []).append(i)
            for group in alike.values():
                if len(group) > 1:
                    # whoever splits nothing on this axis holds the whole
                    full = next(held[i] for i in group if isinstance(nodes[i][axis], Replicate))
                    prices: dict[TransferKind, tuple[float, float]] = {}
                    ends = [
                        (
                            *(i, nodes[i][axis]),
                            self._copies(type_, nodes[i], axis, scale),
                            _even(type_.shape, nodes[i], axis, self.sizes),
                        )
                        for i in group
                    ]
                    for i, p, (copied_from, later_from), even_from in ends:
                        for j, q, (copied_to, later_to), even_to in ends:
                            kind = transfer_between(p, q)
                            if (
                                kind is None
                                or type_.stays(_dim(p), _dim(q))
                                or (kind == "all_to_all" and not (even_from and even_to))
                            ):
                                continue
                            if kind not in prices:
                                prices[kind] = self._prices(kind, axis, full, share.of(kind))
                            time, copy = prices[kind]
                            if copied_from:
                                time += copy
                            time += later_from + later_to
                            cost[i, j] = time + copy if copied_to else time
        return cost

    def _copies(self, type_: TensorType, layout: Layout, axis: int, scale: float = 1.0) -> tuple[bool, float]:
        """(whether a message of a part is copied, seconds that prefer rows where it is not)."""
        placed = layout[axis]
        copied = not is_part_in_one_piece(type_.shape, layout, self.sizes, axis, scale)
        return copied, SLICE_SECONDS if isinstance(placed, Shard) and placed.dim > 0 else 0.0

    def _prices(self, kind: TransferKind, axis: int, whole: float, share: float = 1.0) -> tuple[float, float]:
        """(seconds of the message of a step, of each copy that its ends need)."""
        if kind == "slice":
            return SLICE_SECONDS, 0.0
        nbytes = whole / self.sizes[axis] if kind == "all_to_all" else whole
        key = (kind, axis, nbytes, share)
        time = self.priced.get(key)
        if time is None:
            time = seconds(kind, nbytes / share, self.links[axis])
            if kind == "reduce_scatter":
                # half of an all-reduce, whatever was measured: else sums would be made whole to be cut again
                time = min(time, seconds("all_reduce", nbytes / share, self.links[axis]))
            time = self.priced[key] = share * float(time)
        return time, 2 * nbytes / self.memory_bandwidth


def _dim(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, Shard) else None
