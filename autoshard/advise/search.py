"""The best configuration of a tool: best-first by lower bounds.

All configurations with the same tensor degree, microbatch and recomputation compute for as long, and wait
as long for messages of tensor ranks, whatever their pipeline and data ranks: one of them that was simulated
bounds the others, and those that divide products further or compute more. Before, the bound is the FLOP of
the model at the rate of the largest products.

They also keep as much of a layer for backward. The fullest rank of any schedule holds that of as many
layers as the model has at least: a first stage of 1F1B has a p-th of the layers for p microbatches
(Narayanan et al., SC'21, section 2.2). So what cannot fit is not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from autoshard.advise.judge import Judge, Judged, axes_of
from autoshard.advise.space import choices
from autoshard.advise.tool_config import ToolConfig
from autoshard.advise.tools import Tool
from autoshard.advise.work import Work
from autoshard.errors import InfeasibleError
from autoshard.ir.units import bytes_text
from autoshard.validate.counted import fits

#: bytes that every parameter has at least, in the precision that tools train in: itself, gradient, state
_PARAMETER, _STATE = 2, 12
#: what backward recomputes, in the order in which less is kept for it
_LESS_KEPT = ("none", "ops", "full")
#: configurations simulated at most
MOST = 200
#: of what is kept for backward without a pipeline, what is certain to be that of layers
_OF_LAYERS = 0.9
#: how many times as long as without it computing takes at least where all of a layer runs again: forward is a
#: third of the FLOP, and its kernels are no less good than those of backward
_AGAIN = 1.2


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


class _Layers(NamedTuple):
    """compute: seconds of a step, a mean over stages; exposed: of messages of tensor ranks. kept: bytes of a
    microbatch for backward, of all stages; alone: the same without a pipeline, with what the loss keeps."""

    compute: float
    exposed: float
    kept: float
    alone: float


class _Search:
    def __init__(self, tool: Tool, work: Work, say: Callable[[str], None]) -> None:
        self.work, self.say, self.judge = work, say, Judge(tool, work)
        self.tool = tool
        reached = work.cluster.device.matmul_efficiency * work.cluster.peak("bf16", work.gpus)
        self.least = work.flop * work.batch / reached
        how = tool.framework_of(ToolConfig()).behaviour
        self.gradient = how.recipe.gradient_bytes(_PARAMETER) if how.gradient_buffers else 0
        self.layers: dict[tuple[int, int, str], _Layers] = {}
        self.space = list(choices(tool, work))
        self.judged: list[Judged] = []
        self.refused: list[str] = []

    def run(self, known: Sequence[ToolConfig]) -> Advice:
        for choice in known:
            self._simulate(choice)
        left = [c for c in self.space if c not in known]
        while left and len(self.judged) + len(self.refused) < MOST:
            left = [c for c in left if fits(self.least_bytes(c), self.work.memory, axes_of(c))]
            if not left:
                break
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
                where=f"{self.work.target} on {self.work.gpus} devices of {bytes_text(self.work.memory)}",
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
        known = self.layers.get((tensor, micro, recompute))
        if known is not None:
            return known.compute + known.exposed
        less = [
            layers.compute * (_AGAIN if (r, recompute) == ("none", "full") else 1.0)
            for (t, m, r), layers in self.layers.items()
            if t <= tensor and m == micro and r in ("none", recompute)
        ]
        # with all of a layer recomputed, its forward runs twice
        return max([*less, self.least * (4 / 3 if recompute == "full" else 1.0)])

    def _learn(self, judged: Judged) -> None:
        """What is the same for all with this key."""
        key, spent = _key(judged.choice), judged.step.spent
        stages = judged.step.stages
        # some stage has neither embedding nor loss, or the lesser of the two
        kept = min(row.kept for row in stages) * len(stages)
        before = self.layers.get(key, _Layers(inf, inf, 0.0, 0.0))
        self.layers[key] = _Layers(
            min(spent.compute, before.compute),
            min(spent.axes.get("tp", 0.0), before.exposed),
            max(kept if len(stages) > 1 else 0.0, before.kept),
            max(_OF_LAYERS * kept, before.alone),
        )

    def least_bytes(self, choice: ToolConfig) -> float:
        """Bytes that the fullest rank holds at least: what grows with the microbatch, and shrinks with tensor
        ranks no more than in proportion."""
        tensor, micro, recompute = _key(choice)
        kept = [
            (layers.kept if choice.pipeline > 1 else layers.alone) * micro / m * min(1.0, t / tensor)
            for (t, m, r), layers in self.layers.items()
            if r == recompute
        ]
        return self._state(choice) + max(kept, default=0.0)

    def _state(self, choice: ToolConfig) -> float:
        """Bytes of parameters, optimizer and buffers of gradients on the average rank, at least: with one
        microbatch, any stage of ZeRO lets a rank hold its parts alone."""
        mine = self.work.parameters / (choice.tensor * choice.pipeline)
        shards = choice.shards if choice.zero else 1
        alone = choice.zero == 3 or choice.microbatches(self.work.batch) == 1
        return mine * (_STATE / shards + (_PARAMETER + self.gradient) / (shards if alone else 1))


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
