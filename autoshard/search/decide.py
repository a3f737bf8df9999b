"""From a model and a mesh to a plan: build the problem, solve it, say why."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from autoshard.cluster.cluster import Cluster, usable_memory
from autoshard.cluster.mesh import Mesh
from autoshard.cost.collective import AxisLink, link_of
from autoshard.cost.model import CostModel
from autoshard.cost.reshard import ReshardCost
from autoshard.errors import InfeasibleError
from autoshard.placement import Layout
from autoshard.search.marginals import min_marginals
from autoshard.search.network import InfeasibleNetwork, Marginals, NoFiniteAssignment, Solution
from autoshard.search.plan import Plan, Proof, Why, why_key
from autoshard.search.problem import BUCKET_SHARE, Model, Problem, build_problem
from autoshard.search.solve import solve
from autoshard.search.variables import NodeVar, ParamVar, PortVar, ResultVar, ValueVar, Variable


def cost_model(cluster: Cluster, mesh: Mesh) -> CostModel:
    """Prices on a mesh whose rank r is the r-th device of the cluster."""
    links = tuple(link_of(cluster, mesh, axis) for axis in range(len(mesh.axes)))
    shared = tuple(
        AxisLink(x.latency * BUCKET_SHARE, x.bandwidth, x.size, x.device_bandwidth, x.local) for x in links
    )
    bandwidth = cluster.device.memory_bandwidth
    return CostModel(
        cluster.device,
        ReshardCost(mesh.sizes, links, bandwidth),
        ReshardCost(mesh.sizes, shared, bandwidth),
    )


def decide(
    model: Model,
    mesh: Mesh,
    cluster: Cluster,
    fingerprint: str,
    *,
    budget: int | None = None,
    replicated: Sequence[str] = (),
    target: str = "",
) -> Plan:
    """The best plan for the cost model under a memory budget (bytes per rank; None: no limit).

    Raises InfeasibleError with the smallest feasible budget and what fills it.
    """
    warnings = tuple(f"{op} has no rule and runs replicated" for op in replicated)
    meanings = [axis.meaning for axis in mesh.axes]
    prices = cost_model(cluster, mesh)
    problem = build_problem(model, mesh.sizes, meanings, prices)
    try:
        try:
            solution = solve(problem.network, None if budget is None else float(budget))
        except NoFiniteAssignment:
            # some op can follow the axes' meanings only alone, not together with its neighbours
            problem = build_problem(model, mesh.sizes, meanings, prices, strict=False)
            solution = solve(problem.network, None if budget is None else float(budget))
            warnings = (*warnings, f"not all work could be divided as the axes of {mesh} mean")
    except InfeasibleNetwork as error:
        assert budget is not None
        raise _infeasible(problem, error, budget, mesh) from None
    if budget is None and solution.bytes > usable_memory(cluster.device):
        held, room = _gib(solution.bytes), _gib(usable_memory(cluster.device))
        warnings = (*warnings, f"about {held} per rank are held, a {cluster.device.name} has {room}")
    marginals = min_marginals(problem.network)
    return _plan(
        problem, solution, marginals, mesh, cluster, budget, fingerprint, warnings, target, tuple(replicated)
    )


def _infeasible(problem: Problem, error: InfeasibleNetwork, limit: int, mesh: Mesh) -> InfeasibleError:
    held = {"parameters, gradients and optimizer state": 0.0, "activations kept for backward": 0.0}
    for variable, memory, state in zip(problem.variables, problem.network.memory, error.states, strict=True):
        key = list(held)[0 if isinstance(variable, ParamVar) else 1]
        held[key] += float(memory[state])
    binding = max(held, key=lambda k: held[k])
    parts = ", ".join(f"{k} {_gib(v)}" for k, v in held.items())
    return InfeasibleError(
        f"no plan for mesh {mesh} fits {_gib(limit)} per rank; the smallest feasible is "
        f"{_gib(error.smallest_bytes)}",
        why=f"the binding term is {binding} ({parts})",
        hint="use more ranks on fsdp or tp, a smaller batch, or a larger --memory",
    )


def _gib(n: float) -> str:
    """Rounded up, so that a figure that is printed as enough is enough."""
    unit, name = (2**30, "GiB") if n >= 2**27 else (2**20, "MiB") if n >= 2**17 else (2**10, "KiB")
    return f"{ceil(n / unit * 100) / 100:.2f} {name}"


def _plan(
    problem: Problem,
    solution: Solution,
    marginals: Marginals,
    mesh: Mesh,
    cluster: Cluster,
    budget: int | None,
    fingerprint: str,
    warnings: tuple[str, ...],
    target: str,
    replicated: tuple[str, ...],
) -> Plan:
    plan = Plan(
        str(mesh),
        cluster.name,
        budget,
        fingerprint,
        {},
        {},
        {},
        {},
        {},
        {},
        warnings,
        Proof(
            solution.seconds,
            solution.lower_bound,
            solution.gap,
            solution.method,
            len(problem.variables),
            sum(len(v.states) for v in problem.variables),
        ),
        target,
        replicated,
    )
    for number, (variable, state) in enumerate(zip(problem.variables, solution.states, strict=True)):
        key = _record(plan, variable, state)
        plan.why[key] = _why(variable, state, marginals.costs[number], mesh)
    return plan


def _record(plan: Plan, variable: Variable, state: int) -> str:
    """Put one decision into the plan's tables; the key of its reason."""
    match variable:
        case NodeVar():
            plan.nodes[variable.segment, variable.number] = variable.states[state]
            return why_key("node", variable.segment, variable.number)
        case ValueVar():
            plan.values[variable.place] = variable.states[state]
            return why_key("value", *variable.place)
        case ParamVar():
            plan.params[variable.place] = variable.states[state]
            return why_key("param", variable.place[1])
        case PortVar():
            plan.ports[variable.place] = variable.states[state]
            return why_key("port", variable.place[1])
        case ResultVar():
            plan.results[variable.number] = variable.states[state]
            return why_key("result", variable.number)


def _why(variable: Variable, state: int, costs: np.ndarray, mesh: Mesh) -> Why:
    """The reason of a choice: forced, free, or what the next best different choice would cost."""
    own = _face(variable, state, mesh)
    others = [
        (float(costs[k]), k)
        for k in range(len(variable.states))
        if k != state and np.isfinite(costs[k]) and _face(variable, k, mesh) != own
    ]
    if not others:
        return Why("the only way")
    best, index = min(others)
    margin = max(0.0, best - float(costs[state]))
    reason = "solver" if margin > 0 else "solver (a tie)"
    return Why(reason, _face(variable, index, mesh), margin)


def _face(variable: Variable, state: int, mesh: Mesh) -> str:
    """What a reader sees of a state: the layout of the result, or the life of a parameter."""
    match variable:
        case NodeVar():
            chosen = variable.states[state]
            layout = next((lay for lay in chosen.outputs if lay is not None), ())
            return _layout(layout, mesh)
        case ParamVar():
            life = variable.states[state]
            kept = " kept" if life.keep else ""
            if life.stored == life.use:
                return _layout(life.stored, mesh)
            return f"{_layout(life.stored, mesh)} used as {_layout(life.use, mesh)}{kept}"
        case _:
            return _layout(variable.states[state], mesh)


def _layout(layout: Layout, mesh: Mesh) -> str:
    return " ".join(f"{n}:{p}" for n, p in zip(mesh.names, layout, strict=False))
