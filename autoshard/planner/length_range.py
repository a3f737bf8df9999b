"""A plan for batches of any length in a range: that of the longest, whose decisions all other lengths take.

A length that the mesh does not divide runs by larger parts, or by a plan of its own on the same parameters,
and may hold more than a longer one. So beside the longest, others are looked at: the one before it, one just
above half of it, and the shortest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoshard.cluster.mesh import Mesh
from autoshard.cost.orthogonal import without_tables
from autoshard.cost.recipe import recipe_named
from autoshard.errors import InfeasibleError, UsageError
from autoshard.ir.units import bytes_text
from autoshard.planner.analysis import Analysis
from autoshard.planner.compiling import compile_analysed, options_on
from autoshard.planner.length_plans import resized_inputs
from autoshard.planner.lowering import lower_plan
from autoshard.planner.planned import Planned
from autoshard.planner.planning import MOST_REPLANS, PlanningRequest
from autoshard.planner.resized import NotResizableError, resized
from autoshard.planner.source import Source
from autoshard.program.program import Program
from autoshard.simulate.behaviour import behaviour_on
from autoshard.simulate.peaks import Peaks
from autoshard.simulate.stage_costs import StagePrices

_FORM = "write SHORTEST:LONGEST, as in 1:8192, or LENGTH:SHARE,..., as in 512:0.7,4096:0.3"


@dataclass(frozen=True)
class LengthRange:
    """All lengths from the shortest to the longest, in tokens."""

    shortest: int
    longest: int

    @property
    def looked_at(self) -> tuple[int, ...]:
        """The longest first. Of one token a graph is another one, which holds less than of two."""
        chosen = (self.longest, self.longest - 1, self.longest // 2 + 1, max(2, self.shortest))
        return tuple(n for n in dict.fromkeys(chosen) if n >= max(2, self.shortest))


@dataclass(frozen=True)
class LengthPeak:
    """bytes: the fullest rank's at its simulated peak. own: whether the length has a plan of its own."""

    length: int
    bytes: float
    own: bool


@dataclass(frozen=True)
class RangePlan:
    """planned: for the longest, which the step is priced at. peaks: of the lengths that were looked at."""

    planned: Planned
    range: LengthRange
    peaks: tuple[LengthPeak, ...]

    @property
    def fullest(self) -> LengthPeak:
        return max(self.peaks, key=lambda each: each.bytes)


def parse_range(text: str) -> LengthRange | None:
    """``1:8192``; None for a distribution, as ``512:0.7,4096:0.3`` or ``512:1``. Raises UsageError."""
    shortest, _, longest = text.strip().partition(":")
    if not (shortest.isdecimal() and longest.isdecimal()) or int(longest) <= max(1, int(shortest)):
        return None
    if int(shortest) < 1:
        raise UsageError(f"lengths are {text!r}", why="a sequence has a token at least", hint=_FORM)
    return LengthRange(int(shortest), int(longest))


def plan_range(request: PlanningRequest, source: Source, lengths: LengthRange) -> RangePlan:
    """One plan that fits at every length that is looked at. Raises what planning raises."""
    args, kwargs = resized_inputs((source.args, source.kwargs), lengths.longest)
    longest = replace(source, args=args, kwargs=kwargs)
    asked = request.memory
    for _ in range(MOST_REPLANS + 1):
        request.progress(f"planning for {lengths.longest} tokens")
        planned = request.planned_for_device(longest)
        result = RangePlan(planned, lengths, tuple(_peaks(request, planned, lengths)))
        over = 0.0 if asked is None else result.fullest.bytes - asked
        if over <= 0 or request.memory is None:
            return result
        request = replace(request, memory=int(request.memory - over))
    raise InfeasibleError(
        f"no plan was found that fits {bytes_text(asked or 0)} at {result.fullest.length} tokens",
        why=f"it holds {bytes_text(result.fullest.bytes)} there, more than at {lengths.longest}",
        hint="give lengths that the mesh divides, for instance by padding to a multiple of 128",
    )


def _peaks(request: PlanningRequest, planned: Planned, lengths: LengthRange) -> Iterator[LengthPeak]:
    micro = planned.of_microbatch(request.progress)
    assert micro.source is not None
    for length in lengths.looked_at:
        request.progress(f"simulating the memory of {length} tokens")
        args, kwargs = resized_inputs((micro.source.args, micro.source.kwargs), length)
        sized = replace(micro.source, args=args, kwargs=kwargs)
        try:
            analysis = micro.analysis if length == lengths.longest else sized.analysed(request.progress)
            plan = resized(micro.plan, micro.analysis, analysis)
        except (NotResizableError, UsageError):
            # in as many chunks as this length has, too
            own = _alone(request, micro, replace(sized, expert_chunks=1))
            yield LengthPeak(length, _most(request, compile_analysed(own), own.analysis), own=True)
            continue
        program = lower_plan(replace(plan, microbatches=planned.plan.microbatches), analysis, planned.cluster)
        yield LengthPeak(length, _most(request, program, analysis), own=False)


def _alone(request: PlanningRequest, planned: Planned, sized: Source) -> Planned:
    """A plan of a length with the parameters of another's."""
    program = compile_analysed(planned)
    where, options = Mesh.parse(program.full_mesh), options_on(request.options, [program])
    return replace(request, where=where, options=options).planned(sized)


def _most(request: PlanningRequest, program: Program, analysis: Analysis) -> float:
    recipe = without_tables(recipe_named(request.options.optimizer), analysis.folded)
    behaviour = behaviour_on(request.machine.device, recipe=recipe)
    peaks = Peaks(StagePrices(program, request.machine, behaviour=behaviour))
    return max(peak for _, peak in peaks.all)
