"""The best solution over meshes, under a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cost.on_mesh import cost_model
from autoshard.errors import AutoshardError, InfeasibleError, UsageError
from autoshard.search.amounts import bytes_up
from autoshard.search.network import InfeasibleNetwork, NoFiniteAssignment, Solution
from autoshard.search.problem import Model, Problem, build_problem
from autoshard.search.solve import solve
from autoshard.search.variables import ParamVar


@dataclass(frozen=True)
class Candidate:
    """One mesh with its problem, solved as if memory had no limit: no plan on it is faster than that.

    strict: whether all work is divided as the axes mean.
    """

    mesh: Mesh
    problem: Problem
    relaxed: Solution
    strict: bool


@dataclass(frozen=True)
class Settled:
    """The best solution on the best mesh.

    rejected: (mesh, seconds or their lower bound) of the others, best first.
    """

    candidate: Candidate
    solution: Solution
    rejected: tuple[tuple[str, float], ...] = ()


def consider(model: Model, mesh: Mesh, cluster: Cluster) -> Candidate:
    """The problem on one mesh and its solution without a memory limit.

    Raises UsageError if the mesh cannot be used for the model at all.
    """
    meanings = [axis.meaning for axis in mesh.axes]
    prices = cost_model(cluster, mesh)
    problem = build_problem(model, mesh.sizes, meanings, prices)
    try:
        return Candidate(mesh, problem, solve(problem.network), True)
    except NoFiniteAssignment:
        # some op can follow the axes' meanings only alone, not together with its neighbours
        problem = build_problem(model, mesh.sizes, meanings, prices, strict=False)
        return Candidate(mesh, problem, solve(problem.network), False)


def settle(candidate: Candidate, budget: int | None) -> Solution:
    """The best solution on a mesh under a memory budget in bytes per rank.

    Raises InfeasibleError with the smallest feasible budget and what fills it.
    """
    if budget is None or candidate.relaxed.bytes <= budget:
        return candidate.relaxed
    try:
        return solve(candidate.problem.network, float(budget))
    except InfeasibleNetwork as error:
        raise _infeasible(candidate.problem, error, budget, candidate.mesh) from None


def choose(
    model: Model,
    meshes: Sequence[Mesh],
    cluster: Cluster,
    budget: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Settled:
    """The best solution over all meshes.

    Meshes are tried in the order of what they could reach without a memory limit; once that is no
    better than the best solution found, the rest is ruled out by it. If nothing fits, the error is
    that of the mesh that needs least.
    """
    candidates, failures = _candidates(model, meshes, cluster, progress)
    best: Settled | None = None
    others: list[tuple[str, float]] = []
    for candidate in sorted(candidates, key=lambda c: c.relaxed.seconds):
        if best is not None and candidate.relaxed.seconds >= best.solution.seconds:
            others.append((str(candidate.mesh), candidate.relaxed.seconds))
            continue
        progress(f"meeting memory on {candidate.mesh}")
        try:
            solution = settle(candidate, budget)
        except InfeasibleError as error:
            failures.append(error)
            continue
        if best is None or solution.seconds < best.solution.seconds:
            if best is not None:
                others.append((str(best.candidate.mesh), best.solution.seconds))
            best = Settled(candidate, solution)
        else:
            others.append((str(candidate.mesh), solution.seconds))
    if best is None:
        raise min(failures, key=lambda e: getattr(e, "smallest_bytes", float("inf")))
    return replace(best, rejected=tuple(sorted(others, key=lambda pair: pair[1])))


def _candidates(
    model: Model, meshes: Sequence[Mesh], cluster: Cluster, progress: Callable[[str], None]
) -> tuple[list[Candidate], list[AutoshardError]]:
    found: list[Candidate] = []
    failures: list[AutoshardError] = []
    for mesh in meshes:
        progress(f"searching {mesh}")
        try:
            found.append(consider(model, mesh, cluster))
        except UsageError as error:
            failures.append(error)
    if not meshes:
        failures.append(UsageError("no mesh shape fits the cluster", hint="use another number of devices"))
    return found, failures


def _infeasible(problem: Problem, error: InfeasibleNetwork, limit: int, mesh: Mesh) -> InfeasibleError:
    held = {"parameters, gradients and optimizer state": 0.0, "activations kept for backward": 0.0}
    for variable, memory, state in zip(problem.variables, problem.network.memory, error.states, strict=True):
        key = list(held)[0 if isinstance(variable, ParamVar) else 1]
        held[key] += float(memory[state])
    binding = max(held, key=lambda k: held[k])
    parts = ", ".join(f"{k} {bytes_up(v)}" for k, v in held.items())
    failure = InfeasibleError(
        f"no plan for mesh {mesh} fits {bytes_up(limit)} per rank; the smallest feasible is "
        f"{bytes_up(error.smallest_bytes)}",
        why=f"the binding term is {binding} ({parts})",
        hint="use more ranks on fsdp or tp, a smaller batch, or a larger --memory",
    )
    failure.smallest_bytes = error.smallest_bytes
    return failure
