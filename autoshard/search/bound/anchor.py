"""One microbatch on one mesh, solved exactly, and what else is asked of that problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from autoshard.cluster.mesh import Mesh
from autoshard.search.bound.dual_function import DualRegime, dual_values, least_weight
from autoshard.search.bound.stage_imbalance import chain_of
from autoshard.search.problem.cost_terms import AssignmentCosts, Bytes, compose
from autoshard.search.solve.formulate import ShardingProblem
from autoshard.search.solve.param_costs import Parameters, least_parameters, parameters_of
from autoshard.search.solve.shared_collectives import shared_seconds
from autoshard.search.solve.solve_placements import PlacementSolution, priced
from autoshard.search.solve.step_config import OF_STATE, StepConfig
from autoshard.search.solve.tune import ROUGH
from autoshard.solver.network import Array
from autoshard.solver.solve import least_cost


@dataclass(frozen=True)
class PlacementOption:
    """Placements of everything: what they take, and how they use the parameters."""

    usage: AssignmentCosts
    parameters: Parameters


@dataclass(frozen=True, eq=False)
class AnchorProblem:
    """A microbatch.

    batch: sequences per data rank. formulated: its problem. setting: of a step of one microbatch. recompute:
    whether anything may be recomputed. find_smallest: the smallest microbatch of more than one.
    """

    batch: int
    formulated: ShardingProblem
    setting: StepConfig
    recompute: bool
    find_smallest: Callable[[], ShardingProblem]

    @cached_property
    def free(self) -> PlacementOption:
        """The fastest placements."""
        return placement_option(self.formulated, self.formulated.free)

    @cached_property
    def seconds(self) -> float:
        """That computing and talking take at least."""
        return _least_seconds(self.formulated, self.setting)

    @property
    def mesh(self) -> Mesh:
        return self.formulated.mesh

    @property
    def proven(self) -> float:
        """Seconds that no step of a single microbatch on it goes below."""
        return self.formulated.free.lower_bound

    @cached_property
    def shared(self) -> float:
        """Seconds that data ranks take at most to share what holds no batch, which one alone does not."""
        return shared_seconds(self.find_smallest())

    @cached_property
    def least(self) -> Parameters:
        """What parameters take at least, however they are used."""
        return least_parameters(self.formulated)

    @cached_property
    def lean(self) -> PlacementOption:
        """Placements to which half the activations are worth half the time, as without a pipeline.

        What parameters hold depends on the data ranks, which the mesh that is solved need not have.
        """
        formulated, free = self.formulated, self.formulated.free
        setting = replace(self.setting, sending=True)
        held = replace(free.setting, sending=True).held(free.usage).activations
        price = free.seconds / held if held else 0.0
        return placement_option(
            formulated, priced(formulated.problem, setting, price, allowed=formulated.allowed, limits=ROUGH)
        )

    @cached_property
    def bytes(self) -> float:
        """Bytes that no placements go below, with everything recomputed, but for what belongs to
        parameters, which depends on the data ranks."""
        setting = replace(self.setting, optimistic=self.recompute)

        def weight(key: Bytes) -> float:
            return 0.0 if key.kind in OF_STATE else setting.bytes_weight(key)

        problem = self.formulated.problem
        network = compose(problem.terms, lambda key: 0.0, weight, self.formulated.allowed)
        return least_cost(network.at_price(1.0), ROUGH, problem.known.orders)

    @cached_property
    def chain(self) -> tuple[float, ...]:
        """Seconds of the ops of forward, in order."""
        return chain_of(self.formulated, self.formulated.free)

    def floors(self, prices: Sequence[float], regimes: Sequence[DualRegime]) -> Array | None:
        """See `search.bound.dual_function.dual_values`."""
        return dual_values(self.formulated, self.setting, prices, regimes, recompute=self.recompute)


def placement_option(formulated: ShardingProblem, placements: PlacementSolution) -> PlacementOption:
    """What is worth knowing of placements."""
    return PlacementOption(placements.usage, parameters_of(formulated, placements))


def _least_seconds(formulated: ShardingProblem, setting: StepConfig) -> float:
    """Seconds of computing and talking that no placements go below, for one microbatch."""
    network = compose(
        formulated.problem.terms,
        partial(least_weight, replace(setting, recompute={})),
        lambda key: 0.0,
        formulated.allowed,
    )
    return least_cost(network, ROUGH, formulated.problem.known.orders)
