"""The request to the search, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoshard.cluster.cluster import Cluster
from autoshard.cost.recipe import ADAMW, Recipe
from autoshard.ir.placement import Layout
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
    """A request to the search.

    budget: bytes per rank, None for no limit. batch: sequences per step; None: as captured, in one
    microbatch. recompute: whether it is allowed. overlap: share of compute that overlaps parameter
    collectives (None: that of the cluster). recipe: optimizer state per parameter. baselines: whether to
    price them. pins: fixed placements. tactics: of a given mesh, axis by axis. work: limit of the work for
    its problems (see `solver.solution_cache`), then the incumbent is the plan: counted, not timed, so that
    plans are the same on every machine. replicate_small_batch: on a mesh that is given, axes that would
    divide the batch into more parts than it has rows replicate it. stored: layouts that parameters have;
    stages: pipeline stages that have them.
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
    replicate_small_batch: bool = False
    stored: tuple[tuple[str, Layout], ...] = ()
    stages: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def within(self) -> SearchRequest:
        """What problems and shapes depend on: all but the memory and what is reported."""
        return replace(self, budget=None, baselines=False)


@dataclass(frozen=True)
class Rejected:
    """A rejected configuration.

    name: its mesh, with microbatches. seconds: of a step. solved: whether they are exact, not an estimate.
    """

    name: str
    seconds: float
    solved: bool


@dataclass(frozen=True)
class CandidateSolution:
    """The incumbent at the end of a search.

    bound: dual bound of all candidates, in seconds. configuration_bound: of the chosen configuration.
    rejected: other configurations, solved ones first, best first. interrupted: whether the user stopped the
    search. spent: whether it reached the work limit.
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


@dataclass(frozen=True)
class Incumbent:
    """A solution that fits, known before a search. seconds: of its step, as the search evaluates it.
    measured: of its simulated step, None of one that was not made a program."""

    solution: CandidateSolution
    seconds: float
    measured: float | None = None
