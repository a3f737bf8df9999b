"""Random plans: any that the rules allow, not the best one."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from autoshard.cluster import Cluster, Mesh
from autoshard.cost.on_mesh import cost_model
from autoshard.errors import UsageError
from autoshard.planner.analysis import Analysis
from autoshard.planner.candidates import inner_mesh
from autoshard.planner.planned import Planned
from autoshard.search.plan.plan import Cut, Pipeline, Recompute
from autoshard.search.problem.build import build_problem
from autoshard.search.problem.feasible_states import possible
from autoshard.search.problem.problem import Problem, batch_of
from autoshard.search.problem.problem_prices import Prices
from autoshard.search.problem.search_axes import merged_axes, merged_mesh, plain_axes
from autoshard.search.reasons.explain import explain
from autoshard.search.select.request import CandidateSolution
from autoshard.search.solve.configuration import Configuration
from autoshard.search.solve.formulate import ShardingProblem, layer_calls
from autoshard.search.solve.solve_placements import placed_at
from autoshard.search.solve.step_config import StepConfig
from autoshard.solver.network import CostNetwork, Limits, NoFiniteAssignment
from autoshard.solver.solve import solve

#: the search only has to find a plan, not the best one for prices that mean nothing
_LIMITS = Limits(table=200_000, total=2_000_000, mini=20_000, nodes=50, milp=0)
_SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v", "searched")


def random_plan(analysis: Analysis, mesh: Mesh, cluster: Cluster, rng: random.Random) -> Planned:
    """A plan of random states: of ops, of values, and of how parameters are stored, gathered and reduced.

    A mesh with ``pp`` gets random cuts and a schedule. Raises UsageError if the mesh cannot be used for the
    model, NoFiniteAssignment if no plan at all exists.
    """
    inner, ranks, _ = inner_mesh(mesh)
    microbatches = rng.choice((2, 3, 4)) if ranks > 1 else rng.choice((1, 1, 1, 2))
    axes = merged_axes(inner) if rng.random() < 0.3 else plain_axes(inner)
    params = cost_model(cluster, inner)
    ops = cost_model(cluster, merged_mesh(axes, inner.names)) if axes.merged else params
    prices = Prices(ops, params)
    failure: Exception | None = None
    for strict in (True, False) if rng.random() < 0.3 else (False,):
        problem, _ = possible(build_problem(analysis.model, axes, prices, strict=strict))
        network = _network(problem, rng)
        try:
            states = solve(network, limits=_LIMITS).states
        except NoFiniteAssignment as error:
            failure = error
            continue
        again = _recomputed(analysis, rng)
        setting = StepConfig(microbatches, layer_calls(analysis.folded), again)
        placed = placed_at(problem, setting, network, states)
        formulated = ShardingProblem(
            analysis.model, inner, prices, problem, strict, replace(setting, microbatches=1)
        )
        where = Configuration(inner, batch_of(analysis.folded), microbatches)
        settled = CandidateSolution(formulated, placed, where, cluster, 0.0)
        plan = explain(settled, cluster, analysis.fingerprint, reasons=False)
        if ranks > 1:
            plan = replace(plan, pipeline=_pipeline(analysis, ranks, microbatches, rng))
        return Planned(plan, analysis, cluster)
    assert failure is not None
    raise failure


def _network(problem: Problem, rng: random.Random) -> CostNetwork:
    """What is possible, at random prices; the same for the same generator."""
    dice = np.random.default_rng(rng.getrandbits(32))
    sizes = problem.terms.states
    zeros = tuple(np.zeros(n) for n in sizes)
    return CostNetwork(tuple(dice.random(n) for n in sizes), zeros, problem.terms.hard)


def _recomputed(analysis: Analysis, rng: random.Random) -> dict[str, Recompute]:
    found: dict[str, Recompute] = {}
    for name, calls in layer_calls(analysis.folded).items():
        if rng.random() < 0.6:
            found[name] = Recompute(rng.choice(("full", "selective")), rng.randrange(1, calls + 1))
    return found


def _pipeline(analysis: Analysis, ranks: int, microbatches: int, rng: random.Random) -> Pipeline:
    name = rng.choice(_SCHEDULES)
    chunks = 2 if name in ("interleaved", "zb-v") else 1
    calls = [c for c in analysis.folded.calls if not c.backward]
    places = [
        Cut(number, node.name, call.label)
        for number, call in enumerate(calls)
        for node in analysis.folded.segments[call.segment].nodes
        if node.types[0] is not None and node.types[0].is_float
    ]
    if len(places) < ranks * chunks:
        name, chunks = "1f1b", 1
    if len(places) < ranks:
        raise UsageError(f"{len(places)} ops are too few for {ranks} stages")
    chosen = sorted(rng.sample(range(len(places)), ranks * chunks - 1))
    return Pipeline(ranks, 0, name, chunks, tuple(places[k] for k in chosen))
