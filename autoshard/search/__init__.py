"""Search over pairwise cost networks. Knows no torch and no graph."""

from autoshard.solver.brute_force import brute_force
from autoshard.solver.min_marginals import min_marginals
from autoshard.solver.network import (
    CostNetwork,
    InfeasibleNetwork,
    Limits,
    Marginals,
    NoFiniteAssignment,
    SearchStats,
    Solution,
)
from autoshard.solver.solve import solve

__all__ = [
    "CostNetwork",
    "InfeasibleNetwork",
    "Limits",
    "Marginals",
    "NoFiniteAssignment",
    "SearchStats",
    "Solution",
    "brute_force",
    "min_marginals",
    "solve",
]
