"""Shapes of the mesh, each solved at its smallest and its largest microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd

from autoshard.cluster.mesh import Axis, Mesh
from autoshard.errors import UsageError
from autoshard.search.ask import Ask
from autoshard.search.poses import Poses
from autoshard.search.problems import Posed
from autoshard.search.rank import (
    End,
    Estimated,
    Shape,
    Way,
    data_ways,
    microbatch_sizes,
    rank,
    way_of,
)
from autoshard.search.setting import Setting
from autoshard.search.settle import priced
from autoshard.search.solve import solve
from autoshard.search.terms import compose
from autoshard.search.tune import QUICK


class Shapes:
    """Solves and ranks shapes. total: sequences per step."""

    def __init__(
        self, poses: Poses, ask: Ask, setting: Setting, total: int, progress: Callable[[str], None]
    ) -> None:
        self.poses, self.ask, self.setting, self.total, self.progress = poses, ask, setting, total, progress

    def reachable(self, meshes: Sequence[Mesh]) -> list[Mesh]:
        """Meshes whose data ranks divide the batch; of the others, with the rest as a free axis ``seq``.

        More ranks than sequences only help if something other than the batch is divided, too.
        """
        if self.ask.batch is None or len(meshes) == 1:
            return list(meshes)
        found = [m for m in meshes if self.total % data_ways(m) == 0]
        if len(found) == len(meshes):
            return found
        for mesh in meshes:
            data = [a for a in mesh.axes if a.meaning.splits_batch]
            ways = gcd(self.total, data_ways(mesh))
            if len(data) == 1 and 1 < ways < data[0].size:
                rest = [a for a in mesh.axes if not a.meaning.splits_batch]
                axes = (Axis(data[0].name, ways), Axis("seq", data[0].size // ways), *rest)
                found.append(Mesh(axes))
        return found or list(meshes)

    def solved(self, meshes: tuple[Mesh, ...]) -> Shape:
        """The shape at both ends; raises UsageError if the batch does not divide over its data ranks."""
        mesh = meshes[0]
        sizes = [b for b in self.sizes(mesh) if b > 1] or self.sizes(mesh)
        if not sizes:
            raise UsageError(
                f"a batch of {self.total} does not divide over {data_ways(mesh)} batch shards",
                where=f"mesh {mesh}",
                hint="choose a global batch that is a multiple of the data-parallel ranks",
            )
        self.progress(f"searching {mesh} at {sizes[0]} to {sizes[-1]} sequences")
        low = self._end(mesh, sizes[0])
        return Shape(meshes, low, low if len(sizes) == 1 else self._end(mesh, sizes[-1]))

    def ranked(self, shape: Shape) -> list[Estimated]:
        """Configurations of a shape that may fit."""
        ask = self.ask
        return rank(shape, self.total, self.poses.cluster, self.setting, ask.budget, ask.recipe)

    def sizes(self, mesh: Mesh) -> list[int]:
        """Possible microbatches, in sequences over the whole mesh."""
        if self.ask.batch is None:
            return [self.poses.captured]
        return microbatch_sizes(mesh, self.total)

    def _end(self, mesh: Mesh, batch: int) -> End:
        posed = self.poses.of(mesh, batch, self.ask.pins)
        free = posed.free

        def lean() -> Way:
            """Placements to which half the bytes are worth half the time."""
            price = free.seconds / free.bytes if free.bytes else 0.0
            placed = priced(posed.problem, self.setting, price, allowed=posed.allowed)
            return way_of(posed, placed)

        def least_bytes() -> float:
            return self._least_bytes(posed)

        return End(batch, way_of(posed, free), _least_seconds(posed), lean, least_bytes)

    def _least_bytes(self, posed: Posed) -> float:
        """Bytes that no placements go below, with everything computed again."""
        setting = replace(self.setting, optimistic=self.ask.recompute)
        network = compose(posed.problem.terms, lambda key: 0.0, setting.bytes_weight, posed.allowed)
        return solve(network.at_price(1.0), limits=QUICK).lower_bound


def _least_seconds(posed: Posed) -> float:
    """Seconds of computing and talking that no placements go below, for one microbatch."""
    network = compose(
        posed.problem.terms,
        lambda key: float(key.kind in ("work", "talk")),
        lambda key: 0.0,
        posed.allowed,
    )
    return solve(network, limits=QUICK).lower_bound
