"""What is thought of a configuration before it is solved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Protocol

from autoshard.search.solve.configuration import Configuration
from autoshard.search.solve.formulate import ShardingProblem
from autoshard.search.solve.step_config import StepConfig


@dataclass(frozen=True)
class Estimated:
    """A configuration with an estimated setting and seconds, and a lower bound in seconds.

    seconds: inf where it seems not to fit; for a rough one no more than a closer look says. bound: ranks of a
    pipeline wait as the formula of the shortest schedule says; nothing else is in the way. hopeless: whether
    what parameters take leaves no room for anything else in any placements that were looked at. choices:
    states of all variables of a problem of its shape, which say how long a solution takes. proof: of what a
    better bound is made. view: what a closer look is taken at; None once there is nothing more to see.
    floor: of the seconds, with room for everything but parameters that do not fit. beyond: bytes that its
    program is thought to hold beyond what the search counts.
    """

    configuration: Configuration
    setting: StepConfig
    seconds: float
    bound: float
    hopeless: bool = False
    choices: int = 0
    proof: BoundInputs | None = field(default=None, compare=False, repr=False)
    view: EstimateInputs | None = field(default=None, compare=False, repr=False)
    floor: float = 0.0
    beyond: float = 0.0

    @property
    def rough(self) -> bool:
        """Whether a closer look says more."""
        return self.view is not None

    def closer(self) -> Estimated | None:
        """What a closer look says; None if it cannot fit."""
        return self if self.view is None else self.view.closer(self)

    def bounds(self) -> Iterator[float]:
        """Bounds in seconds, each better than the one before, or as good; each takes longer to find."""
        return self._better(() if self.proof is None else self.proof.bounds())

    def bounds_of(self, formulated: ShardingProblem) -> Iterator[float]:
        """The same by the problem that is solved, as good as they get."""
        return self._better(() if self.proof is None else self.proof.of(formulated))

    def _better(self, bounds: Iterable[float]) -> Iterator[float]:
        best = self.bound
        for bound in bounds:
            best = max(best, bound)
            yield best

    def holding(self, beyond: float) -> Estimated:
        """The same if its program holds so many bytes more than the search counts; inf: too many, anyway."""
        if beyond <= self.beyond or self.proof is None:
            return self
        if beyond == inf:
            return replace(self, seconds=inf, beyond=inf, hopeless=True)
        seconds, setting = self.proof.leaving(beyond)
        slower = max(self.seconds, seconds)
        return replace(self, setting=setting, seconds=slower, beyond=beyond, hopeless=not isfinite(slower))

    def may_fit(self) -> bool:
        """Whether it is not known to need more memory than there is."""
        return self.view is None or self.view.may_fit()


class BoundInputs(Protocol):
    """What better bounds are made of."""

    def bounds(self) -> Iterator[float]:
        """Seconds that no step which fits goes below; what takes longer to find comes later."""
        ...

    def of(self, formulated: ShardingProblem) -> Iterator[float]:
        """The same by its own problem."""
        ...

    def leaving(self, bytes_: float) -> tuple[float, StepConfig]:
        """(seconds, setting) of the fastest that leaves so many bytes of the memory; inf if none seems to."""
        ...

    def leanest(self) -> StepConfig:
        """The setting of the pipeline that holds least."""
        ...


class EstimateInputs(Protocol):
    """What estimates are made of, each closer look at more of it."""

    def closer(self, seen: Estimated) -> Estimated | None:
        """The next closer estimate than ``seen``; None if it cannot fit."""
        ...

    def may_fit(self) -> bool:
        """Whether the least bytes that are held fit the memory."""
        ...
