"""Problems of meshes: their axes, prices, and whether all work can be divided as the axes mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cluster.order import RankOrder
from autoshard.cost.on_mesh import CostModels
from autoshard.cost.recipe import ADAMW, Recipe
from autoshard.errors import UsageError
from autoshard.ir import Folded
from autoshard.ir.placement import Layout
from autoshard.search.problem.build import build_problem
from autoshard.search.problem.feasible_states import possible
from autoshard.search.problem.pins import Pin, check_pins, combined, pin_masks, pinned_keys
from autoshard.search.problem.problem import Model, Problem
from autoshard.search.problem.problem_prices import Prices
from autoshard.search.problem.search_axes import SearchAxes, merged_axes, merged_mesh, plain_axes
from autoshard.search.solve.solve_placements import PlacementSolution, place
from autoshard.search.solve.step_config import StepConfig
from autoshard.search.solve.tune import FINAL
from autoshard.solver.network import Array, NoFiniteAssignment


@dataclass(frozen=True)
class ShardingProblem:
    """A problem on a mesh that has a solution. strict: all work is divided as the axes mean.

    setting: of a step of a single microbatch. allowed: what pins leave of each variable's states.
    """

    model: Model
    mesh: Mesh
    prices: Prices
    problem: Problem
    strict: bool
    setting: StepConfig
    order: RankOrder | None = None
    allowed: tuple[Array | None, ...] = ()

    @cached_property
    def free(self) -> PlacementSolution:
        """The best placements without recomputation or a memory limit, found with as much work as in the end,
        when the same network may be asked for again."""
        return place(self.problem, self.setting, None, allowed=self.allowed, limits=FINAL)

    @cached_property
    def with_waves(self) -> ShardingProblem:
        """The same where waves of tiles count (see `Problem.with_waves`)."""
        return replace(self, problem=self.problem.with_waves())

    @cached_property
    def _grown(self) -> dict[int, ShardingProblem]:
        return {}

    def grown(self, batch: int) -> ShardingProblem:
        """The same with microbatches of ``batch`` sequences, good for costs alone (see `Problem.grown`)."""
        if batch not in self._grown:
            self._grown[batch] = replace(self, problem=self.problem.grown(batch))
        return self._grown[batch]


def formulate(
    model: Model,
    mesh: Mesh,
    cluster: Cluster | CostModels,
    setting: StepConfig,
    *,
    recipe: Recipe = ADAMW,
    merge: bool = False,
    pins: Sequence[Pin] = (),
    axes: SearchAxes | None = None,
    order: RankOrder | None = None,
    stored: Mapping[str, Layout] | None = None,
    larger: int = 0,
    waves: bool = True,
) -> ShardingProblem:
    """The problem of a model on a mesh.

    cluster: or the prices of its meshes, if some are known already. merge: see neighbouring batch axes as one
    (`SearchAxes`). axes: in their place. order: of ranks on devices. pins: what is decided already. stored:
    layouts that parameters have already. larger: sequences of the microbatch that it is wanted for, if that
    leaves the same to decide: whether there is a solution shows there. waves: see `build_problem`.
    Raises UsageError if the mesh cannot be used for the model at all, or with these pins.
    """
    axes = axes or (merged_axes(mesh) if merge else plain_axes(mesh))
    machine = cluster if isinstance(cluster, CostModels) else CostModels(cluster)
    params = machine.of(mesh, order)
    ops = machine.of(merged_mesh(axes, mesh.names), order) if axes.merged else params
    prices = Prices(ops, params, recipe)
    reasons: list[UsageError] = []
    nothing: frozenset[object] = frozenset()
    pinned = pinned_keys(pins, model)
    # what is pinned may not do as the axes mean; the rest of the model still can
    for strict, loose in dict.fromkeys(((True, nothing), (True, pinned), (False, nothing))):
        # some op may follow the axes' meanings only alone, not together with its neighbours
        problem = build_problem(model, axes, prices, strict=strict, loose=loose, stored=stored, waves=waves)
        try:
            masks = pin_masks(pins, model, mesh, problem)
            few, allowed = possible(problem, combined(masks, len(problem.variables)))
            formulated = ShardingProblem(model, mesh, prices, few, strict, setting, order, allowed)
            wanted = formulated.grown(larger) if larger and few.grows_to(larger) else formulated
            _ = wanted.free  # what is wrong shows here
        except NoFiniteAssignment:
            if not strict:
                check_pins(pins, masks, problem)
                raise
            continue
        except UsageError as error:
            reasons.append(error)
            continue
        return formulated
    raise reasons[-1]


def layer_calls(folded: Folded) -> Mapping[str, int]:
    """How often each forward segment of a layer is called."""
    counts = folded.counts()
    return {c.segment: counts[c.segment] for c in folded.calls if c.label and not c.backward}
