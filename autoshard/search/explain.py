"""From a solution to a plan: every decision with its reason."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.cluster.cluster import Cluster, usable_memory
from autoshard.cluster.mesh import Mesh
from autoshard.placement import Layout
from autoshard.search.amounts import bytes_up
from autoshard.search.choose import Settled
from autoshard.search.marginals import min_marginals
from autoshard.search.network import Marginals, Solution
from autoshard.search.plan import Plan, Proof, Why, why_key
from autoshard.search.problem import Problem
from autoshard.search.variables import NodeVar, ParamVar, PortVar, ResultVar, ValueVar, Variable


def explain(
    settled: Settled,
    cluster: Cluster,
    fingerprint: str,
    *,
    budget: int | None = None,
    replicated: Sequence[str] = (),
    target: str = "",
) -> Plan:
    """The plan of a solution: every decision with its reason and the price of the next best."""
    warnings = [f"{op} has no rule and runs replicated" for op in replicated]
    mesh, solution = settled.candidate.mesh, settled.solution
    if not settled.candidate.strict:
        warnings.append(f"not all work could be divided as the axes of {mesh} mean")
    if budget is None and solution.bytes > usable_memory(cluster.device):
        held, room = bytes_up(solution.bytes), bytes_up(usable_memory(cluster.device))
        warnings.append(f"about {held} per rank are held, a {cluster.device.name} has {room}")
    problem = settled.candidate.problem
    plan = _plan(
        problem,
        solution,
        min_marginals(problem.network),
        mesh,
        cluster,
        budget,
        fingerprint,
        tuple(warnings),
        target,
        tuple(replicated),
    )
    if settled.rejected:
        other, seconds = settled.rejected[0]
        reason = f"the best of {len(settled.rejected) + 1} mesh shapes"
        plan.why["mesh"] = Why(reason, other, max(0.0, seconds - solution.seconds))
    return plan


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
