"""Pairwise cost networks: what is decided, what each choice costs, and what a search answers.

A network has one variable per decision. A variable's states cost time and bytes on their own; an
edge prices the combination of two neighbouring states in time. Infinite time means forbidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class CostNetwork:
    """A pairwise cost network over n variables, variable i having k_i states.

    unary: seconds of each state, n arrays [k_i]; inf = forbidden. memory: bytes of each state, n arrays
    [k_i], finite. edges: seconds of each pair of states, (u, v) with u < v -> [k_u, k_v]; inf = forbidden.
    fits: whether it is made of what is known to fit together, and not looked at again.
    """

    unary: tuple[Array, ...]
    memory: tuple[Array, ...]
    edges: dict[tuple[int, int], Array]
    fits: InitVar[bool] = False

    def __post_init__(self, fits: bool) -> None:
        if fits:
            return
        if len(self.unary) != len(self.memory):
            raise ValueError(f"{len(self.unary)} variables with seconds, {len(self.memory)} with bytes")
        shapes = [seconds.shape for seconds in self.unary]
        for i, (shape, held) in enumerate(zip(shapes, self.memory, strict=True)):
            if len(shape) != 1 or shape != held.shape:
                raise ValueError(f"variable {i}: seconds {shape} and bytes {held.shape} must be [states]")
        count = len(shapes)
        for (u, v), table in self.edges.items():
            if not 0 <= u < v < count:
                raise ValueError(f"edge ({u}, {v}): wants 0 <= u < v < {count}")
            if table.shape != shapes[u] + shapes[v]:
                raise ValueError(f"edge ({u}, {v}): {table.shape} does not fit its variables")

    def at_price(self, price: float) -> CostNetwork:
        """The network in which every byte also costs ``price`` seconds."""
        if not self.unary:
            return self
        # in one go, as most variables have few states
        both = np.concatenate(self.unary) + price * np.concatenate(self.memory)
        ends = [*accumulate(map(len, self.unary))]
        unary = tuple([both[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)])
        return CostNetwork(unary, self.memory, self.edges, fits=True)

    def seconds_of(self, states: Sequence[int]) -> float:
        """Total seconds of an assignment; always summed in the same order."""
        alone = sum([u.item(s) for u, s in zip(self.unary, states, strict=True)], 0.0)
        return alone + sum([table.item(states[u], states[v]) for (u, v), table in self.edges.items()])

    def bytes_of(self, states: Sequence[int]) -> float:
        """Total bytes of an assignment; always summed in the same order."""
        return sum([m.item(s) for m, s in zip(self.memory, states, strict=True)], 0.0)


@dataclass(frozen=True)
class Limits:
    """How much work a search may do before it settles for a bound. Counts, so answers never depend on speed.

    table: entries of the largest elimination table. total: entries of all tables of one elimination.
    down: of all tables of one that also passes down, for min-marginals, and keeps its tables whole.
    pareto: of all tables of a Pareto elimination. labels: Pareto labels at one variable.
    mini: entries of a mini-bucket. nodes: branch and bound nodes. milp: edge entries given to HiGHS.
    steps: multipliers tried.
    """

    table: int = 100_000_000
    total: int = 1_000_000_000
    down: int = 100_000_000
    pareto: int = 4_000_000
    labels: int = 20_000
    mini: int = 300_000
    nodes: int = 20_000
    milp: int = 100_000
    steps: int = 60


@dataclass(frozen=True)
class SearchStats:
    """How the search went.

    states_before, states_after: over all variables, before and after pruning. width: induced width of
    the elimination order. largest_table: entries. wall_seconds never takes part in comparisons.
    """

    variables: int
    states_before: int
    states_after: int
    width: int
    largest_table: int
    multiplier_steps: int
    wall_seconds: float = field(compare=False)


@dataclass(frozen=True)
class Solution:
    """An assignment and what is proven about it.

    states: per variable, in the network's own numbering. lower_bound: no assignment within the budget is
    faster. gap: (seconds - lower_bound) / seconds, 0.0 when proven optimal. multiplier: seconds that a byte
    more would save, about; 0.0 where the budget does not bind.
    """

    states: tuple[int, ...]
    seconds: float
    bytes: float
    lower_bound: float
    gap: float
    method: str
    stats: SearchStats
    multiplier: float = 0.0


@dataclass(frozen=True, eq=False)
class Marginals:
    """costs: per variable, [k_i] of the original states; inf where no assignment has the state.

    exact: the least cost of any assignment with the state; else that of changing this one variable of a
    good assignment, which is at least as much.
    """

    costs: list[Array]
    exact: bool


class InfeasibleNetwork(Exception):
    """No assignment meets the memory budget.

    smallest_bytes: the least memory of any assignment with finite time. states: that assignment.
    """

    def __init__(self, smallest_bytes: float, states: tuple[int, ...], budget_bytes: float) -> None:
        self.smallest_bytes, self.states, self.budget_bytes = smallest_bytes, states, budget_bytes
        super().__init__(
            f"the smallest assignment holds {smallest_bytes:.0f} bytes, the budget is {budget_bytes:.0f}"
        )


class NoFiniteAssignment(Exception):
    """Every assignment is forbidden. variables: a small set of variables that contradict each other."""

    def __init__(self, variables: tuple[int, ...]) -> None:
        self.variables = variables
        named = ", ".join(map(str, variables))
        super().__init__(f"no assignment has finite cost: the variables {named} allow no common choice")
