"""What is asked of the search, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.cluster.cluster import Cluster
from autoshard.cost.recipe import ADAMW, Recipe
from autoshard.search.problem.pins import Pin
from autoshard.search.select.baselines import Baseline
from autoshard.search.select.tactics import Stage, Tactic
from autoshard.search.solve.configuration import Configuration
from autoshard.search.solve.formulate import ShardingProblem
from autoshard.search.solve.solve_placements import PlacementSolution

#: a little more than an encoder-decoder of 11B parameters takes on 96 devices
WORK = 5_400_000


@dataclass(frozen=True)
class SearchRequest:
    """What is asked of the search.

    budget: bytes per rank, None for no limit. batch: sequences per step; None: those the model was captured
    with, in one microbatch. recompute: whether activations may be computed again. overlap: share of
    computing that hides parameter collectives (None: what the cluster says). recipe: what training keeps
    per parameter. baselines: whether to price what a user would have picked by hand. pins: placements that
    are decided already. tactics: what to decide axis by axis, on a mesh that is given. work: that may be done
    for its problems (see `solver.solution_cache`) before the best plan that fits is taken: counted, not
    timed, so that plans are the same on every machine.
    """

    budget: int | None = None
    batch: int | None = None
    recompute: bool = True
    overlap: float | None = None
    recipe: Recipe = ADAMW
    baselines: bool = False
    pins: tuple[Pin, ...] = ()
    tactics: tuple[Tactic, ...] = ()
    work: int = WORK


@dataclass(frozen=True)
class Rejected:
    """A configuration that was not taken.

    name: its mesh, with microbatches. seconds: of a step. solved: whether these are of its best plan, or else
    an estimate.
    """

    name: str
    seconds: float
    solved: bool


@dataclass(frozen=True)
class CandidateSolution:
    """The best found.

    bound: seconds; no plan that was considered is faster. configuration_bound: seconds; no placements and no
    recomputation make the chosen configuration faster. rejected: other configurations, those that were
    solved first, best first. interrupted: whether the search was stopped before its end. spent: whether it
    ended because all work was done that was asked of it.
    """

    formulated: ShardingProblem
    placements: PlacementSolution
    configuration: Configuration
    cluster: Cluster
    bound: float
    rejected: tuple[Rejected, ...] = ()
    interrupted: bool = False
    spent: bool = False
    baselines: tuple[Baseline, ...] = ()
    stages: tuple[Stage, ...] = ()

    @property
    def configuration_bound(self) -> float:
        return self.placements.lower_bound
