"""Plans for a distribution of sequence lengths, on one set of parameter placements.

Every length has its own program, and all programs share the parameters. The placements of the parameters are
those of the best plan of one of the lengths: with each of them all other lengths are planned, and the least
expected step is taken. The dual bound is that of plans that need not share anything; of a length that fits on
shared placements only in tiles or with activations in host memory, that of its plan, if that is less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoshard.cluster.mesh import Mesh
from autoshard.errors import InfeasibleError, UsageError
from autoshard.planner.analysis import Analysis
from autoshard.planner.compiling import compile_analysed, options_on, stored_parameters
from autoshard.planner.planned import Planned
from autoshard.planner.planning import PlanningRequest
from autoshard.planner.source import Source
from autoshard.program.program import Program
from autoshard.runtime.local_batch import batch_leaves


@dataclass(frozen=True)
class LengthShare:
    """A length of sequences, in tokens, and the share of all steps that has it."""

    length: int
    share: float


@dataclass(frozen=True)
class LengthPlan:
    """The plan of one length. alone: seconds of its best step if it shared no parameters with others."""

    length: int
    share: float
    planned: Planned
    alone: float

    @property
    def seconds(self) -> float:
        return self.planned.plan.optimality.seconds

    @property
    def bytes(self) -> float:
        """On the fullest rank: simulated where memory is limited, as the search counts them otherwise."""
        peak, solution = self.planned.peak, self.planned.solution
        return peak.bytes if peak is not None else solution.placements.bytes if solution is not None else 0.0


@dataclass(frozen=True)
class LengthPlans:
    """plans: by length. dual_bound: seconds that the expected step takes at least, by the cost model."""

    plans: tuple[LengthPlan, ...]
    dual_bound: float

    @property
    def seconds(self) -> float:
        """Of the expected step."""
        return sum(p.share * p.seconds for p in self.plans)

    @property
    def gap(self) -> float:
        """Share of the expected step that other placements may save at most."""
        return max(0.0, 1 - self.dual_bound / self.seconds)

    @property
    def most_frequent(self) -> LengthPlan:
        return max(self.plans, key=lambda each: each.share)


def parse_lengths(text: str) -> tuple[LengthShare, ...]:
    """``512:0.7,4096:0.3``, ascending, with shares that add up to one. Raises UsageError."""
    shares: dict[int, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        length, _, share = part.partition(":")
        try:
            result = int(length), float(share or 1)
        except ValueError:
            result = 0, 0.0
        if result[0] < 1 or not 0 < result[1] < float("inf") or result[0] in shares:
            what = f"{part!r}, a length that is there before" if result[0] in shares else repr(part)
            raise UsageError(f"lengths have {what}", hint="write LENGTH:SHARE, as in 512:0.7,4096:0.3")
        shares[result[0]] = result[1]
    total = sum(shares.values())
    if not shares:
        raise UsageError("there are no lengths", hint="write LENGTH:SHARE, as in 512:0.7,4096:0.3")
    if len(shares) == 1 and total > max(shares):
        raise UsageError(
            f"lengths {text.strip()!r} are a range, not a distribution",
            why="programs are made for lengths with the shares of steps that have them",
            hint="`autoshard plan --lengths` takes a range; write LENGTH:SHARE, as in 512:0.7,4096:0.3, here",
        )
    return tuple(LengthShare(n, shares[n] / total) for n in sorted(shares))


def most_frequent(shares: Sequence[LengthShare]) -> LengthShare:
    return max(shares, key=lambda each: each.share)


def resized_inputs(inputs: Any, length: int) -> Any:
    """Arguments of another length, without their data: every dim of as many tokens as the first batched
    argument has that is a sequence [batch, tokens] or [batch, tokens, channels]. Raises UsageError if none
    is."""
    leaves, spec = pytree.tree_flatten(inputs)
    batched = batch_leaves(leaves)
    example = next((leaves[k] for k in batched if 1 < leaves[k].dim() < 4), None)
    if example is None:
        shapes = ", ".join(str(list(leaves[k].shape)) for k in batched)
        raise UsageError(
            "no example input has a sequence",
            why=f"the batched inputs are {shapes or 'none'}",
            hint="lengths are of dim 1 of an input [batch, tokens] or [batch, tokens, channels]",
        )
    tokens = example.shape[1]
    for k, x in enumerate(leaves):
        if isinstance(x, torch.Tensor):
            first = 1 if k in batched else 0
            shape = [length if d >= first and n == tokens else n for d, n in enumerate(x.shape)]
            leaves[k] = x.new_zeros(shape)
    return pytree.tree_unflatten(leaves, spec)


def plan_lengths(request: PlanningRequest, source: Source, shares: Sequence[LengthShare]) -> LengthPlans:
    """Plans whose expected step is the shortest that the placements of one of them allow.

    Raises what planning raises, InfeasibleError if no placements of parameters serve all lengths.
    """
    return _Choice(request, source, shares).best()


class _Choice:
    def __init__(self, request: PlanningRequest, source: Source, shares: Sequence[LengthShare]) -> None:
        self.request, self.shares, say = request, shares, request.progress
        self.sources: list[Source] = []
        self.analyses: list[Analysis] = []
        self.alone: list[Planned] = []
        for each in shares:
            args, kwargs = resized_inputs((source.args, source.kwargs), each.length)
            sized = replace(source, args=args, kwargs=kwargs)
            say(f"planning for {each.length} tokens")
            self.sources.append(sized)
            self.analyses.append(sized.analysed(say))
            self.alone.append(request.planned_from(sized, self.analyses[-1]))
        self.programs = [compile_analysed(planned) for planned in self.alone]
        #: where the best plan of each length alone has its parameters
        self.storages = [(p.full_mesh, stored_parameters([p])) for p in self.programs]

    def _expected(self, plans: Sequence[Planned]) -> float:
        return sum(each.share * _seconds(planned) for each, planned in zip(self.shares, plans, strict=True))

    def best(self) -> LengthPlans:
        """See `plan_lengths`."""
        best: list[Planned] | None = None
        for program in self._distinct():
            best = self._on(program, None if best is None else self._expected(best)) or best
        if best is None:
            raise InfeasibleError(
                "no placements of the parameters serve all lengths",
                why="each length alone fits, on other placements",
                hint="give more memory, or train the longest sequences in a run of their own",
            )
        rows = zip(self.shares, best, self.alone, strict=True)
        plans: list[LengthPlan] = []
        bound = 0.0
        for share, planned, alone in rows:
            optimal, apart = planned.plan.optimality, alone.plan.optimality
            plans.append(LengthPlan(share.length, share.share, planned, min(apart.seconds, optimal.seconds)))
            bound += share.share * min(apart.dual_bound, optimal.dual_bound)
        return LengthPlans(tuple(plans), bound)

    def _distinct(self) -> list[Program]:
        """Programs of the lengths whose parameters lie differently, of the most frequent length first."""
        result: dict[Any, Program] = {}
        for _, k in sorted((-each.share, k) for k, each in enumerate(self.shares)):
            result.setdefault(self.storages[k], self.programs[k])
        return list(result.values())

    def _on(self, program: Program, incumbent: float | None) -> list[Planned] | None:
        """The plans of all lengths with the parameters of one of them; None if they are no better than the
        incumbent, in seconds, or do not fit."""
        where, options = Mesh.parse(program.full_mesh), options_on(self.request.options, [program])
        request = replace(self.request, where=where, options=options)
        plans = list(self.alone)
        for k in range(len(plans)):
            # the best plan of a length alone is the least that it can take
            if incumbent is not None and self._expected(plans) >= incumbent:
                return None
            if self.storages[k] == (program.full_mesh, options.stored):
                continue
            try:
                plans[k] = request.planned_from(self.sources[k], self.analyses[k])
            except InfeasibleError:
                return None
        return plans if incumbent is None or self._expected(plans) < incumbent else None


def _seconds(planned: Planned) -> float:
    return planned.plan.optimality.seconds
