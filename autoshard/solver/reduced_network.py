"""What pruning leaves of a network, with its order of elimination: the same under every budget and limit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autoshard.solver.budgeted import Begun, Priced
from autoshard.solver.elimination_order import Order, find_order
from autoshard.solver.network import InfeasibleNetwork
from autoshard.solver.prune import Residual


@dataclass(frozen=True, eq=False)
class Reduced:
    """A pruned network. small: its undecided variables; numbers: theirs in the whole. order: of those.

    chosen: state of every variable that is decided, in the network's own numbering. left: states of all.
    seconds, bytes: of what is decided.
    """

    small: Residual
    numbers: tuple[int, ...]
    order: Order
    chosen: tuple[int, ...]
    left: int
    seconds: float
    bytes: float

    @staticmethod
    def of(net: Residual) -> Reduced:
        """Of a network that was pruned already."""
        small, numbers = net.undecided()
        decided = [i for i, size in enumerate(net.sizes) if size == 1]
        return Reduced(
            small,
            tuple(numbers),
            find_order(small.sizes, small.rows),
            tuple(k.item(0) for k in net.kept),
            sum(net.sizes),
            sum([net.unary[i].item() for i in decided]),
            sum([net.memory[i].item() for i in decided]),
        )

    def whole(self, states: Iterable[int]) -> tuple[int, ...]:
        """States of all variables, given those of the undecided ones."""
        chosen = list(self.chosen)
        for i, state in zip(self.numbers, states, strict=True):
            chosen[i] = state
        return tuple(chosen)


@dataclass
class Reduction:
    """A place for it. made: None before the network was pruned. begun: searches in it, by their budget.
    priced: least costs at prices of a byte. least: the assignment of least memory, None before a budget was
    too small."""

    made: Reduced | None = None
    begun: dict[float, Begun] = field(default_factory=dict)
    priced: Priced = field(default_factory=Priced)
    least: InfeasibleNetwork | None = None
