"""The best configuration of a tool: best-first by lower bounds.

All configurations with the same tensor degree, microbatch and recomputation compute for as long, whatever
their pipeline and data ranks: one of them that was simulated bounds the others, and those that divide
products further or compute more. Before, the bound is the FLOP of the model at the peak of the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from autoshard.advise.judge import Judge, Judged
from autoshard.advise.space import choices
from autoshard.advise.tool_config import ToolConfig
from autoshard.advise.tools import Tool
from autoshard.advise.work import Work
from autoshard.errors import InfeasibleError

#: bytes that every parameter has at least, in the precision that tools train in: itself, gradient, state
_PARAMETER, _STATE = 2, 12
#: what backward recomputes, in the order in which less is kept for it
_LESS_KEPT = ("none", "ops", "full")
#: configurations simulated at most
MOST = 200


@dataclass(frozen=True)
class Advice:
    """The best configuration that fits, those after it, and what is known of all others.

    size: configurations in the space; simulated: of these. bound: seconds that none of the space can beat.
    """

    best: Judged
    others: tuple[Judged, ...]
    size: int
    simulated: int
    bound: float


def advise(
    tool: Tool, work: Work, say: Callable[[str], None] = lambda _: None, known: Sequence[ToolConfig] = ()
) -> Advice:
    """Search the space of a tool; known: configurations to begin with, which need not be of the space.

    Raises InfeasibleError if no configuration fits or runs.
    """
    return _Search(tool, work, say).run(known)


class _Search:
    def __init__(self, tool: Tool, work: Work, say: Callable[[str], None]) -> None:
        self.work, self.say, self.judge = work, say, Judge(tool, work)
        self.tool = tool
        self.least = work.flop * work.batch / work.cluster.peak("bf16", work.gpus)
        self.computes: dict[tuple[int, int, str], float] = {}
        self.space = list(choices(tool, work))
        self.judged: list[Judged] = []
        self.refused: list[str] = []

    def run(self, known: Sequence[ToolConfig]) -> Advice:
        for choice in known:
            self._simulate(choice)
        left = [c for c in self.space if c not in known and self._state(c) <= self.work.memory]
        while left and len(self.judged) + len(self.refused) < MOST:
            # of equal bounds the simplest: fewest stages, then fewest ranks that divide anything
            choice = min(left, key=lambda c: (self.bound(c), c.pipeline, c.tensor, c.chunks, c.shards))
            if self.bound(choice) >= self.best:
                break
            left.remove(choice)
            if not any(_holds_more(choice, j.choice) for j in self.judged if not j.fits):
                self._simulate(choice)
        return self._advice(left)

    @property
    def best(self) -> float:
        """Seconds of the fastest that fits."""
        return min((j.seconds for j in self.judged if j.fits), default=inf)

    def _simulate(self, choice: ToolConfig) -> None:
        result, before = self.judge.of(choice), self.best
        if isinstance(result, str):
            if result not in self.refused:
                self.refused.append(result)
            return
        self.judged.append(result)
        self._learn(result)
        if self.best < before:
            self.say(f"{choice}: {self.best:.4g} s")

    def _advice(self, left: list[ToolConfig]) -> Advice:
        judged = self.judged
        fitting = sorted((j for j in judged if j.fits), key=lambda j: j.seconds)
        if not fitting:
            least = min(judged, key=lambda j: j.peak, default=None)
            nothing = "the state of training alone is larger, or no degrees divide the work"
            raise InfeasibleError(
                f"no configuration of {self.tool.title} fits",
                where=f"{self.work.target} on {self.work.gpus} devices of {self.work.memory / 2**30:.0f} GiB",
                why=f"{least.choice} holds {least.peak / 2**30:.1f} GiB"
                if least
                else next(iter(self.refused), nothing),
                hint="more devices, or another global batch",
            )
        bound = min((self.bound(c) for c in left), default=inf)
        return Advice(
            fitting[0], tuple(fitting[1:]), len(self.space), len(judged), min(bound, fitting[0].seconds)
        )

    def bound(self, choice: ToolConfig) -> float:
        """Seconds that a configuration takes at least."""
        compute = self._compute(choice)
        # the last stage begins after a forward of every stage before it
        forwards = (choice.pipeline - 1) / choice.chunks
        # forward is a third of forward and backward, and no less with recomputation than a fourth
        part = 0.25 if choice.recompute != "none" else 1 / 3
        return compute * (1 + part * forwards / choice.microbatches(self.work.batch))

    def _compute(self, choice: ToolConfig) -> float:
        tensor, micro, recompute = _key(choice)
        known = self.computes.get((tensor, micro, recompute))
        if known is not None:
            return known
        less = [
            seconds
            for (t, m, r), seconds in self.computes.items()
            if t <= tensor and m == micro and r in ("none", recompute)
        ]
        return max(less, default=self.least)

    def _learn(self, judged: Judged) -> None:
        """Computing of a rank, on average over stages: the same for all with this key."""
        key = _key(judged.choice)
        seconds = judged.step.spent.compute
        self.computes[key] = min(seconds, self.computes.get(key, inf))

    def _state(self, choice: ToolConfig) -> float:
        """Bytes of parameters and optimizer on the average rank."""
        mine = self.work.parameters / (choice.tensor * choice.pipeline)
        state = _STATE / (choice.shards if choice.zero else 1)
        return mine * ((_PARAMETER / choice.shards if choice.zero == 3 else _PARAMETER) + state)


def _holds_more(choice: ToolConfig, other: ToolConfig) -> bool:
    """Whether a configuration holds at least what another does: it differs in what adds bytes alone."""
    degrees = ("tensor", "pipeline", "chunks", "schedule")
    return (
        all(getattr(choice, name) == getattr(other, name) for name in degrees)
        and choice.micro >= other.micro
        and choice.zero <= other.zero
        and (choice.shards <= other.shards or choice.zero == 0)
        and _LESS_KEPT.index(choice.recompute) <= _LESS_KEPT.index(other.recompute)
    )


def _key(choice: ToolConfig) -> tuple[int, int, str]:
    return choice.tensor, choice.micro, choice.recompute
