"""Which configurations are solved, and which of their solutions becomes a program next."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import inf, isfinite

from autoshard.search.bound.estimate import Estimated
from autoshard.search.select.request import CandidateSolution
from autoshard.search.solve.configuration import Configuration, alike

#: configurations solved exactly, and those among them that only divide the data ranks otherwise
_MOST, _ALIKE = 3, 2
#: the same of those with a pipeline, each of which is cut as well: before and after one of them is a program
_PIPED, _PIPED_LATER, _PIPED_ALIKE = 3, 2, 1
#: a program that takes so many times as long as it was evaluated to says that evaluations tell little between
#: those like it: so many more of them are solved
_WRONG, _DOUBTED = 1.25, 2
#: so do estimates if all that were solved are evaluated to take so many times as long
_MISJUDGED = 1.1
#: states of solved configurations together after which no other is solved but those with so many times fewer
_WORK, _CHEAP = 8_000, 3
#: configurations whose estimate is this much over that of one that was solved are not solved: by the formula
#: for pipelines, and by placements, which says more
_MARGIN, _CLOSE = 1.03, 1.015
#: an estimate may be wrong by so much, and then what is expected of it is as good as what was solved; by no
#: more than that do estimates err otherwise where there are data ranks alone, divided otherwise
_SAME = 1.001
#: see `_errs`
_PIPELINES = (True, False)
#: the first with a pipeline, and the first without, is solved if its estimate is not more over the best
_FAR = 1.2


@dataclass(frozen=True)
class _Known:
    """A configuration that was solved, or that is proven to be slower than the best.

    estimated, seconds, judged: of a step, by the estimate, by the search and with its stages cut; at least,
    where that is all that is known. choices: states of all variables that were solved.
    """

    configuration: Configuration
    estimated: float
    seconds: float
    evaluated: float
    choices: int = 0

    @property
    def limit(self) -> float:
        """Estimates beyond this are not worth a solution.

        Estimates err alike, so they are compared with each other, unless this one was far off.
        """
        if not isfinite(self.estimated):
            return inf
        margin = _MARGIN if _piped(self.configuration) else _CLOSE
        far = _MARGIN * self.estimated < self.seconds
        return self.seconds / _MARGIN if far else margin * self.estimated


@dataclass(frozen=True)
class _Waiting:
    """A solution that is no program yet."""

    solution: CandidateSolution
    evaluated: float


class BranchAndBound:
    """The state of a branch and bound over configurations.

    incumbent: the fastest that fits;
    reached: its seconds, simulated where there is a program. seconds: as evaluated, of every solved
    configuration, inf where nothing fits.
    """

    def __init__(self) -> None:
        self.incumbent: CandidateSolution | None = None
        self.reached = inf
        self.seconds: dict[Configuration, float] = {}
        self._alike: Counter[object] = Counter()
        self._standing: dict[Configuration, _Known] = {}
        self._waiting: list[_Waiting] = []
        #: those that err alike -> simulated seconds of a program over what it was evaluated to take
        self._off: dict[tuple[bool, bool], float] = {}

    @property
    def begun(self) -> bool:
        """Whether anything was solved that fits, or may."""
        return self.incumbent is not None or bool(self._waiting)

    def needed(self, config: Configuration) -> float:
        """Seconds that a configuration has to be evaluated to take less than to be the best, by what was
        measured of those whose evaluations err alike. What was measured of others says little: these may be
        evaluated right."""
        least = min((1.0, *self._off.values()))
        return self.reached / self._off.get(_errs(config), least)

    def promising(self, config: Configuration) -> float:
        """Seconds that a solution has to be evaluated to take less than to become a program: what nothing was
        measured of may be evaluated to take a little too long."""
        return self.needed(config) * (1.0 if _errs(config) in self._off else _MARGIN)

    def ahead(self, config: Configuration) -> float:
        """Seconds of what a configuration has to be faster than, if what waits to be a program fits."""
        return min(self.needed(config), *(s.evaluated for s in self._waiting), inf)

    def worth(self, config: Configuration) -> float:
        """Seconds of the search that a configuration has to be able to get below for its solution to be worth
        all work: what is evaluated otherwise, with its stages cut, may be a little over the best."""
        return self.ahead(config) * (_MARGIN if _piped(config) else 1.0)

    def leaves_out(self, estimated: Estimated) -> bool:
        """Whether a configuration is ruled out, far behind, or much like others that were solved."""
        config = estimated.configuration
        most_alike = _PIPED_ALIKE if _piped(config) else _ALIKE
        reached = self.needed(config)
        slow = _piped(config) or estimated.hopeless or estimated.floor >= reached
        if self.incumbent is not None and not isfinite(estimated.seconds) and slow:
            return True  # seems not to fit: looked at only where that takes a moment
        if estimated.bound >= reached or self._alike[alike(config)] >= most_alike:
            return True
        if any(_piped(s.solution.configuration) == _piped(config) for s in self._waiting):
            return True  # one like it has to be made a program first
        if self._would_be_far_behind(estimated):
            return True
        # estimates with and without pipelines do not err alike: one of each is solved
        kinds = {_errs(c) for c in self._standing}
        if _piped(config) not in {piped for piped, _ in kinds} and estimated.seconds <= _FAR * reached:
            return False
        limit = min((self._limit(s, config) for s in self._standing.values()), default=inf)
        work = sum(s.choices for s in self._standing.values())
        costly = _WORK < work < _CHEAP * estimated.choices and not self._far_ahead(estimated)
        # nor do those that split tensors and those that do not: one is solved that may be the best
        if _errs(config) not in kinds and estimated.seconds <= _MARGIN * reached:
            return costly
        return (
            costly
            or (isfinite(estimated.seconds) and estimated.seconds > limit)
            or self._like(config) >= self._most(config)
        )

    def wants(self, estimated: Estimated) -> bool:
        """Whether a configuration will be solved however the one that waits to be a program turns out: the
        first of its kind, expected to be about as fast."""
        config = estimated.configuration
        if len(self._waiting) != 1 or any(_piped(c) == _piped(config) for c in self.seconds):
            return False
        reached = self.ahead(config)
        return estimated.seconds <= _FAR * reached and estimated.bound < reached

    def _most(self, config: Configuration) -> int:
        """How many are solved that have a pipeline, or none, as this one."""
        if not _piped(config):
            return _MOST
        if _PIPELINES not in self._off:
            return _PIPED
        return _PIPED_LATER + (_DOUBTED if self._doubted else 0)

    @property
    def _doubted(self) -> bool:
        """Whether a program of a pipeline took far longer than it was evaluated to, or all of them were
        evaluated to take longer than was estimated, as where links are so unlike that cuts are uneven."""
        solved = [s for s in self._standing.values() if _piped(s.configuration) and s.choices]
        off = min((s.evaluated / s.estimated for s in solved), default=1.0)
        return off > _MISJUDGED or self._off.get(_PIPELINES, 1.0) > _WRONG

    def _limit(self, other: _Known, config: Configuration) -> float:
        """Estimates of a configuration beyond this are not worth a solution, for what is known of another."""
        doubt = _WRONG if self._doubted and _piped(config) else 1.0
        return doubt * other.limit if self._err_alike(other, config) else _MARGIN * self.needed(config)

    def _far_ahead(self, estimated: Estimated) -> bool:
        """Whether one is expected to be so much faster than what was reached that it is worth any work, given
        by how much the estimates of those like it were wrong."""
        config = estimated.configuration
        off = [s.evaluated / s.estimated for s in self._standing.values() if self._err_alike(s, config)]
        return _FAR * estimated.seconds * max(off, default=1.0) < self.needed(config)

    def _err_alike(self, other: _Known, config: Configuration) -> bool:
        """Whether what an estimate missed of one says anything of the other."""
        return _errs(other.configuration) == _errs(config)

    def _would_be_far_behind(self, estimated: Estimated) -> bool:
        """Whether those whose estimates err as this one's were all so much slower than estimated: those much
        like it if there are any, or else estimates with a pipeline err alike, and those without, as long as
        both split tensors or neither does."""
        config = estimated.configuration
        comparable = [s for s in self._standing.values() if self._err_alike(s, config)]
        near = [s for s in comparable if alike(s.configuration) == alike(config)]
        if not comparable or not isfinite(estimated.seconds):
            return False
        slower = min(s.evaluated / s.estimated for s in near or comparable)
        far = (_MARGIN if _splits(config) or _piped(config) else _SAME) if near else _FAR
        return slower * estimated.seconds > far * self.needed(config)

    def _like(self, config: Configuration) -> int:
        """How many were solved that have a pipeline, or none, as this one; two failures are free."""
        fit = [isfinite(s) for c, s in self.seconds.items() if _piped(c) == _piped(config)]
        return max(sum(fit), len(fit) - 2)

    def enter(self, config: Configuration) -> None:
        """One is about to be solved."""
        self._alike[alike(config)] += 1

    def solve(self, estimated: Estimated, solution: CandidateSolution, evaluated: float) -> None:
        """One was solved; judged: seconds of its step if it fits."""
        config, choices = solution.configuration, solution.formulated.problem.choices
        seconds, self.seconds[config] = solution.placements.seconds, evaluated
        self._standing[config] = _Known(config, estimated.seconds, seconds, evaluated, choices)
        self._waiting.append(_Waiting(solution, evaluated))

    def rule_out(self, estimated: Estimated) -> None:
        """One is proven not to be the best, by its bound. It is as good as solved for what it says of others
        like it, whose estimates err alike."""
        config, bound = estimated.configuration, estimated.bound
        self._standing[config] = _Known(config, estimated.seconds, bound, bound)

    def next(self, expected: float) -> tuple[CandidateSolution, float] | None:
        """The fastest solution not known to fit, with its seconds, if it takes no more than is expected of
        what is not solved yet.

        One without a pipeline goes before one with that is about as fast: it is a program sooner, and what a
        schedule piles up, which may not fit, is not in the evaluation.
        """
        first = min(self._waiting, key=_turn, default=None)
        if first is None or _turn(first) > _SAME * expected:
            return None
        self._waiting.remove(first)
        return first.solution, first.evaluated

    def fail(self, config: Configuration) -> None:
        """Nothing of it fits."""
        self.seconds[config] = inf
        self._standing.pop(config, None)

    def finish(
        self,
        solution: CandidateSolution,
        evaluated: float,
        measured: float | None = None,
        waits: float = 0.0,
    ) -> None:
        """A solution that fits, or that is slower than the best one. measured: seconds of its simulated step,
        if it was made a program. waits: of them for its host, which evaluations and estimates leave out."""
        config = solution.configuration
        self.seconds[config] = evaluated
        standing = self._standing.get(config)
        if standing is not None:  # what had to hold less may have become far slower than its estimate
            more = evaluated / standing.evaluated
            estimated = standing.estimated * (more if _piped(config) and more > _MARGIN else 1.0)
            self._standing[config] = replace(
                standing, estimated=estimated, seconds=solution.placements.seconds, evaluated=evaluated
            )
        self.begin(solution, evaluated + waits, measured)

    def begin(self, solution: CandidateSolution, evaluated: float, measured: float | None) -> None:
        """The same of one that is known before anything is solved."""
        config = solution.configuration
        if measured is not None:
            self._off[_errs(config)] = measured / evaluated
        if self.incumbent is None or evaluated < self.needed(config):
            self.incumbent = solution
            self.reached = evaluated * self._off.get(_errs(config), 1.0)


def _turn(waiting: _Waiting) -> float:
    return waiting.evaluated * (_CLOSE if _piped(waiting.solution.configuration) else 1.0)


def _piped(config: Configuration) -> bool:
    return config.pipe.ranks > 1


def _errs(config: Configuration) -> tuple[bool, bool]:
    """How estimates and evaluations err: with a pipeline, or without one by whether tensors are split."""
    return _piped(config), not _piped(config) and _splits(config)


def _splits(config: Configuration) -> bool:
    """Whether an axis splits anything but the batch and what is stored."""
    return any(not axis.meaning.splits_batch for axis in config.mesh.axes)
