"""The same configuration with less memory."""

from __future__ import annotations

from dataclasses import replace

from autoshard.search.select.request import CandidateSolution, SearchRequest
from autoshard.search.solve.tune import FINAL, QUICK, tune
from autoshard.solver.network import InfeasibleNetwork


def retuned(
    solution: CandidateSolution, request: SearchRequest, memory_share: float, *, quick: bool = False
) -> CandidateSolution | None:
    """The same configuration with a share ``memory_share`` of the memory, None if nothing fits that.

    quick: with little work.
    """
    if request.budget is None:
        return None
    formulated = solution.formulated
    try:
        placements = tune(
            formulated.problem,
            solution.placements.setting,
            int(memory_share * request.budget),
            recompute=request.recompute,
            allowed=formulated.allowed,
            limits=QUICK if quick else FINAL,
        )
    except InfeasibleNetwork:
        return None
    return replace(solution, placements=replace(placements, lower_bound=solution.placements.lower_bound))
