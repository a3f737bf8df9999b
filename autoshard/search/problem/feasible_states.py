"""A problem without the states that no assignment can have, found once for all networks made of it.

What is forbidden does not depend on weights, so every network of a problem forbids the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoshard.search.problem.decisions import with_states
from autoshard.search.problem.problem import Problem
from autoshard.solver.network import Array, CostNetwork
from autoshard.solver.prune import Contradiction, Residual, make_consistent
from autoshard.solver.solution_cache import SolutionCache


def possible(
    problem: Problem, allowed: Sequence[Array | None] = ()
) -> tuple[Problem, tuple[Array | None, ...]]:
    """(problem, allowed) without states that have no partner on some edge (arc consistency).

    allowed: per variable 0 or inf for each state, None for all; not looked at, but made to fit. A problem
    whose edges contradict each other comes back as it was: whoever solves it says which.
    """
    sizes = problem.terms.states
    zeros = tuple(np.zeros(n) for n in sizes)
    net = Residual.of(CostNetwork(problem.terms.walls_of(), zeros, problem.terms.hard))
    try:
        make_consistent(net)
    except Contradiction:
        return problem, tuple(allowed)
    kept = {v: keep for v, keep in enumerate(net.kept) if len(keep) < sizes[v]}
    if not kept:
        return problem, tuple(allowed)
    variables = tuple(
        with_states(variable, tuple(variable.states[k] for k in kept[v])) if v in kept else variable
        for v, variable in enumerate(problem.variables)
    )
    masks = (m if m is None or v not in kept else m[kept[v]] for v, m in enumerate(allowed))
    fewer = replace(
        problem,
        terms=problem.terms.only(kept),
        variables=variables,
        known=SolutionCache(problem.known.orders),
        kept=kept,
    )
    return fewer, tuple(masks)
