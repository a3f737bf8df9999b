"""Meshes that differ only in their data ranks, solved exactly at a few microbatches.

Between two of them the least seconds over all placements are bounded from both sides: more sequences take no
less, and less per sequence, as all that is fixed is shared by more of them. Bytes are proportional to the
sequences but for what is fixed, so that their least is concave, and the chord between two solutions bounds
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from typing import TypeVar

import numpy as np

from autoshard.cluster.mesh import Mesh
from autoshard.search.bound.anchor import AnchorProblem, PlacementOption
from autoshard.search.bound.dual_function import DualRegime, dual_regimes
from autoshard.search.problem.cost_terms import OF_ACTIVATIONS, AssignmentCosts
from autoshard.search.solve.configuration import Staged, data_ways
from autoshard.search.solve.formulate import ShardingProblem
from autoshard.search.solve.recompute import RecomputePlanner
from autoshard.search.solve.step_config import OF_STATE
from autoshard.solver.network import Array

K = TypeVar("K")
#: times the dearest price at which layers are recomputed, for what does not fit even then
_BEYOND = 2.0
#: number of the price that is looked at alone where all of them take long
_ALONE = 1


@dataclass(frozen=True)
class MeshFamily:
    """Meshes that differ only in their data axes (and pipelines), solved at a few microbatches.

    What computes and talks in one microbatch depends on the sequences of one data rank, not on how many data
    ranks there are, but for scalars that all of them share: the mesh with the fewest, at least two, was
    solved. ends: by sequences, ascending. calls: see `Setting`. between: bytes that one sequence hands from
    layer to layer. choices: states of all variables of one problem. state: bytes of trained parameters with
    their gradients and optimizer, whole. common: bytes of parameters that first and last layers share.
    find_end: solves so many sequences per data rank on a mesh; None where that cannot be, or was done often.
    """

    meshes: tuple[Staged, ...]
    ends: tuple[AnchorProblem, ...]
    calls: Mapping[str, int]
    between: float = 0.0
    choices: int = 0
    state: float = 0.0
    common: float = 0.0
    find_end: Callable[[Mesh, int], AnchorProblem | None] = lambda mesh, each: None

    def free(self, batch: int) -> AssignmentCosts:
        """The fastest placements, interpolated between two ends, without what belongs to parameters."""
        low, high, t = self.place(batch)
        return _off_parameters(low.free, high.free, t)

    def lean(self, batch: int) -> AssignmentCosts:
        """The same for those that hold less."""
        low, high, t = self.place(batch)
        return _off_parameters(low.lean, high.lean, t)

    def seconds(self, batch: int) -> float:
        """Seconds that one microbatch takes at least."""
        return max(share * self.ends[k].seconds for k, share in self._below(batch))

    def shared(self, batch: int) -> float:
        """Seconds of a microbatch that a mesh with a single data rank takes less at most."""
        if all(data_ways(end.mesh) == 1 for end in self.ends):
            return 0.0
        return max(end.shared for end in self.place(batch)[:2])

    def bytes(self, batch: int) -> float:
        """Bytes that are held at least, but for what belongs to parameters."""
        low, high, t = self.place(batch)
        return low.bytes + t * (high.bytes - low.bytes)

    @cached_property
    def prices(self) -> tuple[float, ...]:
        """Seconds per byte of activations at which bounds are looked for: none, and those at which computing
        layers again is worth its while, and what is beyond that."""
        options = [
            o.price
            for e in self.ends
            for chosen in RecomputePlanner(e.free.usage, self.calls).choices
            for o in chosen
        ]
        worth = [price for price in options if 0 < price < inf]
        if not worth:
            return (0.0,)
        return (0.0, *dict.fromkeys((min(worth), max(worth), _BEYOND * max(worth))))

    @cached_property
    def _floors(self) -> dict[tuple[AnchorProblem, DualRegime], Array]:
        """Seconds by price, of ends; regimes are added as they are asked for."""
        return {}

    @cached_property
    def _ties(self) -> dict[float, None]:
        """Of regimes that were asked for: what was wanted of one end is likely to be wanted of others."""
        return {}

    def looks(self, batch: int) -> int:
        """How many ends say something of a number of sequences."""
        return len(self._below(batch))

    def floors(self, batch: int, regime: DualRegime, rounds: int) -> Array:
        """Seconds that one microbatch takes at least, with what it holds at each of the prices, [prices].

        rounds: at how many ends, those first that are likely to say most.
        """
        below = self._below(batch)[:rounds]
        return np.maximum.reduce([share * self._floor(self.ends[k], regime) for k, share in below])

    def _floor(self, end: AnchorProblem, requested: DualRegime) -> Array:
        """Of one end; of other regimes, too, or at fewer prices, as far as that is quick."""
        if (end, requested) in self._floors:
            return self._floors[end, requested]
        prices = self.prices[1:]
        self._ties.setdefault(requested.tied)
        alike = (replace(requested, tied=tied) if tied else DualRegime() for tied in self._ties)
        likely = dict.fromkeys(r for one in alike for r in dual_regimes(one) if (end, r) not in self._floors)
        for regimes, remaining in (
            (tuple(likely), prices),
            (dual_regimes(requested), prices),
            ((requested,), prices),
            ((requested,), prices[_ALONE : _ALONE + 1]),
        ):
            solved = end.floors(remaining, regimes) if remaining else None
            if solved is not None:
                break
        floors = np.zeros((len(regimes), len(prices)))
        if solved is not None:
            floors[:, [prices.index(price) for price in remaining]] = solved
        for regime, row in zip(regimes, floors, strict=True):
            self._floors[end, regime] = np.concatenate(([end.seconds], row))
        return self._floors[end, requested]

    def formulated_on(self, mesh: Mesh, batch: int, look: int) -> tuple[ShardingProblem, float] | None:
        """(the problem of a step on it, the share of what that takes which counts), of one end; None for
        another mesh than the one that was solved.

        look: number of the end among those that `floors` looks at.
        """
        k, share = self._below(batch)[look]
        return (self.ends[k].formulated, share) if self.ends[k].mesh == mesh else None

    def floors_of(self, mesh: Mesh, batch: int) -> Callable[[DualRegime], Array] | None:
        """The same of exactly so many sequences, with as many data ranks as were solved, or with a single one
        if the mesh has no more; None if that cannot be."""
        end = self.find_end(mesh if data_ways(mesh) == 1 else self.ends[0].mesh, batch)
        if end is None:
            return None
        return partial(self._floor, end)

    def is_end(self, batch: int) -> bool:
        """Whether so many sequences were solved."""
        return any(end.batch == batch for end in self.ends)

    def _below(self, batch: int) -> list[tuple[int, float]]:
        """(number of an end, share of what it takes): each is less than what a number of sequences takes.

        The larger end, which is likely to say more, goes first.
        """
        low, high, _ = self.place(batch)
        below = [(self.ends.index(high), batch / high.batch)]
        # a single sequence may not be split as evenly as several together
        if low.batch < batch < high.batch and low.batch > 1:
            below.append((self.ends.index(low), 1.0))
        return below

    def proven(self, mesh: Mesh, batch: int) -> float:
        """Seconds that no step on a mesh without a pipeline goes below, 0 if another mesh was solved.

        batch: sequences per data rank of the full step. Several microbatches take no less than a single one
        of all their sequences.
        """
        largest = self.ends[-1]
        return largest.proven * batch / largest.batch if largest.mesh == mesh else 0.0

    def covers(self, batch: int) -> bool:
        return self.ends[0].batch <= batch <= self.ends[-1].batch

    def place(self, batch: int) -> tuple[AnchorProblem, AnchorProblem, float]:
        """The ends around a number of sequences per data rank, and how far it is from one to the other."""
        above = next(k for k, end in enumerate(self.ends) if end.batch >= batch)
        low, high = self.ends[max(0, above - 1)], self.ends[above]
        width = high.batch - low.batch
        return low, high, (batch - low.batch) / width if width else 0.0


def _off_parameters(low: PlacementOption, high: PlacementOption, t: float) -> AssignmentCosts:
    usage = between(low.usage, high.usage, t)
    return AssignmentCosts(
        {k: v for k, v in usage.seconds.items() if k.kind in OF_ACTIVATIONS},
        {k: v for k, v in usage.bytes.items() if k.kind not in OF_STATE},
    )


def between(low: AssignmentCosts, high: AssignmentCosts, t: float) -> AssignmentCosts:
    """The profile at a share ``t`` of the way from one to the other."""
    return AssignmentCosts(_mixed(low.seconds, high.seconds, t), _mixed(low.bytes, high.bytes, t))


def _mixed(a: Mapping[K, float], b: Mapping[K, float], t: float) -> dict[K, float]:
    return {k: (1 - t) * a.get(k, 0.0) + t * b.get(k, 0.0) for k in dict.fromkeys((*a, *b))}
