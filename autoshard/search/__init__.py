"""Search over pairwise cost networks. Knows no torch and no graph."""

from autoshard.search.networks.brute import brute_force
from autoshard.search.networks.marginals import min_marginals
from autoshard.search.networks.network import (
    CostNetwork,
    InfeasibleNetwork,
    Limits,
    Marginals,
    NoFiniteAssignment,
    SearchStats,
    Solution,
)
from autoshard.search.networks.solve import solve

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
