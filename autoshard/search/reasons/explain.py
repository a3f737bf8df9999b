"""From a solution to a plan: every decision with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoshard.cluster.cluster import Cluster, usable_memory
from autoshard.cluster.mesh import Mesh
from autoshard.ir.placement import Layout
from autoshard.rules.states import OpState
from autoshard.search.plan.plan import OptimalityGap, Pipeline, Plan, Why, why_key
from autoshard.search.problem.decisions import (
    NodeVar,
    ParamState,
    ParamVar,
    PortVar,
    ResultVar,
    ValueVar,
    Variable,
)
from autoshard.search.problem.search_axes import SearchAxes
from autoshard.search.select.request import CandidateSolution
from autoshard.search.solve.memory_text import bytes_up
from autoshard.search.solve.pipeline_model import Pipe
from autoshard.solver.min_marginals import min_marginals


def explain(
    solution: CandidateSolution,
    cluster: Cluster,
    fingerprint: str,
    *,
    budget: int | None = None,
    replicated: Sequence[str] = (),
    target: str = "",
    reasons: bool = True,
) -> Plan:
    """The plan of a solution: every decision with its reason and the price of the next best.

    reasons: False for the decisions alone.
    """
    placements, problem = solution.placements, solution.formulated.problem
    mesh, config = solution.configuration.mesh, solution.configuration
    optimality = OptimalityGap(
        placements.seconds,
        solution.bound,
        max(0.0, (placements.seconds - solution.bound) / placements.seconds) if placements.seconds else 0.0,
        placements.solution.method,
        len(problem.variables),
        problem.choices,
        solution.configuration_bound,
    )
    plan = Plan(
        mesh=str(mesh),
        cluster=cluster.name,
        budget=budget,
        fingerprint=fingerprint,
        nodes={},
        values={},
        params={},
        ports={},
        results={},
        why={},
        warnings=_warnings(solution, cluster, budget, replicated),
        optimality=optimality,
        target=target,
        replicated=tuple(replicated),
        microbatches=config.microbatches,
        batch=config.batch,
        order=() if solution.formulated.order is None else solution.formulated.order.devices,
        recompute=dict(placements.setting.recompute),
        pipeline=_pipeline(config.pipe),
    )
    marginals = min_marginals(placements.network, chosen=placements.states) if reasons else None
    for number, state in enumerate(placements.states):
        for variable in problem.together(number):
            key = _record(plan, variable, state, problem.axes)
            if marginals is not None:
                costs = marginals.costs[number]
                plan.why[key] = _why(variable, state, costs, mesh, problem.axes, marginals.exact)
    if reasons and solution.rejected:
        plan.why["mesh"] = _why_mesh(solution)
    return plan


def _pipeline(pipe: Pipe) -> Pipeline | None:
    """The pipeline, as yet uncut."""
    return None if pipe.ranks == 1 else Pipeline(pipe.ranks, 0, pipe.schedule, pipe.chunks, (), pipe.slices)


def _why_mesh(solution: CandidateSolution) -> Why:
    """Against the next best configuration that was solved; against an estimate only where none was."""
    reason = f"the best of {len(solution.rejected) + 1} configurations"
    other, seconds = solution.rejected[0], solution.placements.seconds
    if other.solved:
        return Why(reason, other.name, max(0.0, other.seconds - seconds))
    # an estimate below what was found says that the two are close, not by how much
    said = "estimated, not solved" if other.seconds > seconds else "estimated no slower, but not solved"
    return Why(reason, f"{other.name} ({said})", max(0.0, other.seconds - seconds))


def _warnings(
    solution: CandidateSolution, cluster: Cluster, budget: int | None, replicated: Sequence[str]
) -> tuple[str, ...]:
    warnings = [f"{op} has no rule and runs replicated" for op in replicated]
    if solution.interrupted:
        warnings.append("the search was interrupted: this is the best plan found until then")
    if solution.spent:
        warnings.append("the search reached its work limit: this is the best plan found until then")
    if not solution.formulated.strict:
        warnings.append(f"not all work could be sharded as the axes of {solution.formulated.mesh} mean")
    capacity = usable_memory(cluster.device)
    if budget is None and solution.placements.bytes > capacity:
        needed = bytes_up(solution.placements.bytes)
        warnings.append(f"a rank needs about {needed}, a {cluster.device.name} has {bytes_up(capacity)}")
    return tuple(warnings)


def _record(plan: Plan, variable: Variable, state: int, axes: SearchAxes) -> str:
    """Put one decision into the plan's tables, over the axes of the mesh; the key of its reason."""
    match variable:
        case NodeVar():
            plan.nodes[variable.segment, variable.number] = _op_on_mesh(variable.states[state], axes)
            return why_key("node", variable.segment, variable.number)
        case ValueVar():
            plan.values[variable.place] = axes.to_mesh(variable.states[state])
            return why_key("value", *variable.place)
        case ParamVar():
            strategy = variable.states[state]
            plan.params[variable.place] = replace(strategy, use=axes.to_mesh(strategy.use))
            return why_key("param", variable.place[1])
        case PortVar():
            plan.ports[variable.place] = axes.to_mesh(variable.states[state])
            return why_key("port", variable.place[1])
        case ResultVar():
            plan.results[variable.number] = axes.to_mesh(variable.states[state])
            return why_key("result", variable.number)


def _op_on_mesh(state: OpState, axes: SearchAxes) -> OpState:
    return replace(
        state,
        inputs=tuple(map(axes.to_mesh, state.inputs)),
        outputs=tuple(None if x is None else axes.to_mesh(x) for x in state.outputs),
    )


def _why(variable: Variable, state: int, costs: np.ndarray, mesh: Mesh, axes: SearchAxes, exact: bool) -> Why:
    """The reason of a choice: forced, free, or what the next best different choice would cost.

    exact: whether costs are those of the best plan with each choice; else everything else stays as it is.
    """
    shown = _face(variable, state, mesh, axes)
    others = [
        (float(costs[k]), k)
        for k in range(len(variable.states))
        if k != state and np.isfinite(costs[k]) and _face(variable, k, mesh, axes) != shown
    ]
    if not others:
        return Why("no alternative")
    best, index = min(others)
    margin = max(0.0, best - float(costs[state]))
    reason = "solver" if margin > 0 else "solver (tie)"
    if not exact:
        reason = f"{reason}, all else fixed"
    return Why(reason, _face(variable, index, mesh, axes), margin)


def _face(variable: Variable, state: int, mesh: Mesh, axes: SearchAxes) -> str:
    """What a reader sees of a state: the layout of the result, or the strategy of a parameter."""
    match variable:
        case NodeVar():
            chosen = variable.states[state]
            layout = next((lay for lay in chosen.outputs if lay is not None), None)
            return "" if layout is None else _layout(axes.to_mesh(layout), mesh)
        case ParamVar():
            strategy = variable.states[state]
            return strategy_text(replace(strategy, use=axes.to_mesh(strategy.use)), mesh)
        case _:
            return _layout(axes.to_mesh(variable.states[state]), mesh)


def strategy_text(strategy: ParamState, mesh: Mesh) -> str:
    """``fsdp:S(0) used as fsdp:R, ZeRO-3``; strategy: with layouts over the mesh."""
    if strategy.stored == strategy.use:
        return _layout(strategy.stored, mesh)
    return f"{_layout(strategy.stored, mesh)} used as {_layout(strategy.use, mesh)}, {zero_stage(strategy)}"


def zero_stage(strategy: ParamState) -> str:
    """The stage of Rajbhandari et al., ZeRO, SC'20, that a strategy with something to gather is."""
    return ("ZeRO-1" if strategy.late else "ZeRO-2") if strategy.keep else "ZeRO-3"


def _layout(layout: Layout, mesh: Mesh) -> str:
    return " ".join(f"{n}:{p}" for n, p in zip(mesh.names, layout, strict=True))
