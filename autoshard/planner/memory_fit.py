"""What a solution of the search holds as a program: stages cut, passes run, peaks simulated, until it fits.

The search counts bytes by what they are (`search/problem/cost_terms.py`), not what lives inside a part for a
moment, nor what a pipeline's schedule piles up on one rank. So whatever would be taken is lowered and its
memory simulated, and solved again with less memory as long as it does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from math import inf, prod

from msgspec import structs

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cost.recipe import hosted
from autoshard.cost.stage_machines import rooms
from autoshard.errors import InfeasibleError, UsageError
from autoshard.ir import Folded
from autoshard.ir.offload import NO_OFFLOAD, Offload
from autoshard.options import PassOptions
from autoshard.passes.pipeline import LoweringOptions, check_slices, lower, lower_by_share
from autoshard.passes.sequence.slice_places import sequence_ports
from autoshard.planner.analysis import Analysis
from autoshard.planner.depth_extrapolation import SimulatedStep, TruncatedRun, extrapolate_depth
from autoshard.planner.host_memory import HostFullError, HostNeed, least_offload, need_of
from autoshard.planner.lowering import laid_for, lowering_of, saving_of, schedule_of
from autoshard.planner.stage_partition import Schedules, StagePartition, Staging
from autoshard.program.program import PipelineStages, Program, Signature
from autoshard.schedules.timeline import peak_bytes, step_seconds
from autoshard.search.plan.plan import Plan, Recompute
from autoshard.search.reasons.explain import explain
from autoshard.search.select.choose import retuned
from autoshard.search.select.request import CandidateSolution, Incumbent, SearchRequest
from autoshard.search.solve.configuration import Configuration, alike, stored_ways
from autoshard.search.solve.memory_text import bytes_up
from autoshard.search.solve.step_config import StepConfig, least_state
from autoshard.simulate.behaviour import behaviour_on
from autoshard.simulate.peaks import Peaks
from autoshard.simulate.saved_for_backward import ResidentBytes
from autoshard.simulate.segment_cache import OfSegments
from autoshard.simulate.slices import of_equal_work
from autoshard.simulate.stage_costs import StagePrices
from autoshard.simulate.step import spent_in

#: how often a solution is solved again with less memory
_ROUNDS = 4
#: share of the memory that may be left over without looking for something faster
_LEFT = 0.06
#: a peak that moves by less, as a share, is the same
_SAME = 1e-3
#: shares that are so near one another are as good as the same
_NEAR = 0.02
#: less memory than what is missing, since what is solved again is not what was measured
_MORE = 1.03
#: share of the room that is left when no stages can be cut that fit
_SMALLER = 0.88
#: equal parts of a sequence that slices may be made of
_UNITS = (32, 16, 8)
#: with activations in host memory, others are not tried after so many configurations of which every program
#: holds so much more than the memory, as a share of it
_BY_FAR = ((6, 1.0), (12, 0.1))


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Peak:
    """The fullest pipeline rank. bytes: at its peak. held: as the part begins in which that is. host: what is
    in the memory of its node, None if nothing is. waits: seconds of a step in which ranks wait for it. step:
    seconds of the simulated step of all ranks; None if what they hold does not fit. over: bytes that it, or
    one that has less room, holds too much, less than 0 if none does."""

    rank: int
    held: ResidentBytes
    bytes: float
    host: HostNeed | None = None
    waits: float = 0.0
    step: float | None = None
    over: float = -inf


@dataclass(frozen=True)
class MemoryFit:
    """A solution that fits. staging: None without a pipeline. peak: None where no limit was set."""

    solution: CandidateSolution
    staging: Staging | None = None
    peak: Peak | None = None

    @property
    def seconds(self) -> float:
        """As the search counts them, with what it waits for its host."""
        return self.solution.placements.seconds + (0.0 if self.peak is None else self.peak.waits)


class MemoryFitter:
    """Cuts and measures solutions; what was done for one is kept for when it is asked for again.

    request: with the recipe of everything that is kept, in whichever memory. fixed: whether the schedule of a
    pipeline is decided. offload: what lives in host memory.
    """

    def __init__(
        self,
        analysis: Analysis,
        cluster: Cluster,
        request: SearchRequest,
        *,
        fixed: bool,
        progress: Callable[[str], None],
        offload: Offload = NO_OFFLOAD,
    ) -> None:
        self.analysis, self.cluster, self.request, self.fixed = analysis, cluster, request, fixed
        self.offload = offload
        self.progress = progress
        self._schedules = Schedules()
        #: a model -> into how many equal parts its sequence may be divided for slices, the most first
        self._finest: dict[int, tuple[Folded, tuple[int, ...]]] = {}
        self._cuttings: list[tuple[CandidateSolution, StagePartition]] = []
        self._fitted: list[tuple[CandidateSolution, MemoryFit]] = []
        #: kind of solution -> what was measured: its setting, and the bytes beyond what the search counts
        self._more: dict[Hashable, list[tuple[StepConfig, float]]] = {}
        #: kind of configuration -> over how many ranks one of which nothing fits stores parameters, the most
        self._failed: dict[Hashable, int] = {}
        #: calls that are recomputed -> bytes beyond the budget but for states, with all activations in host
        #: memory that can be there, the least
        self._over_hosted: dict[Hashable, float] = {}
        #: how many configurations nothing fits of, and the least bytes that a program of theirs held too much
        self.failed, self._least_over = 0, inf
        #: the fastest solution that fits of those that were made full programs, its stages, and its peaks
        self._fastest: tuple[float, CandidateSolution, Staging | None, Peaks] | None = None
        #: why the last program that was too large for the host's memory was that
        self._host_full: HostFullError | None = None

    def seconds(self, solution: CandidateSolution) -> float:
        """Of a step of a solution with a pipeline, cut and simulated; inf if no cut fits."""
        try:
            return self.cutting(solution).seconds(fixed=self.fixed)
        except InfeasibleError:
            return inf

    def fit(
        self, solution: CandidateSolution, limit: float = inf, spent: Callable[[], bool] = _never
    ) -> CandidateSolution:
        """The solution, or one of the same configuration that holds less. Raises InfeasibleError.

        limit: seconds of a step that fits; what cannot be faster comes back slower than that, unmeasured.
        spent: whether the first that fits will do, found with little work.
        """
        return self.fitted(solution, limit, spent).solution

    def fitted(
        self, solution: CandidateSolution, limit: float = inf, spent: Callable[[], bool] = _never
    ) -> MemoryFit:
        """The same with its stages and its peak."""
        for other, cached in self._fitted:
            if _same(cached.solution, solution):
                return replace(cached, solution=solution)
            if _same(other, solution):
                return replace(cached, solution=replace(solution, placements=cached.solution.placements))
        fit = self._made(solution, limit, spent)
        if fit.peak is not None or self.request.budget is None:
            self._fitted.append((solution, fit))
        return fit

    def _made(self, solution: CandidateSolution, limit: float, spent: Callable[[], bool]) -> MemoryFit:
        self._host_full = None
        room = self.request.budget or inf
        if any(self.failed >= n and share * room < self._least_over < inf for n, share in _BY_FAR):
            raise self._failure(solution, None, self._least_over)
        self._check_state(solution)
        over, fit = self._over(solution)
        if fit is not None and over <= 0:
            return fit
        first, budget = fit, self.request.budget
        assert budget is not None
        best: MemoryFit | None = None
        slower: CandidateSolution | None = None
        measured = [(solution, over)]
        # shares of the memory that the search is given, more than all of it if what it counts may be in host
        # memory: with the least known the program is too large, with the most that is known to be too little
        # nothing is found
        start = max(1.0, solution.placements.bytes / budget) if self.offload.activations else 1.0
        high, low = start, 0.0
        share = self._less(start, over, solution)
        too_large: Hashable = None
        for _ in range(_ROUNDS):
            if high - low <= _NEAR or (best is not None and spent()):
                break
            share = share if low < share < high else (low + high) / 2
            tried = retuned(solution, self.request, share, quick=spent())
            if tried is None:
                if self._leaves_no_less(share, measured[-1][0]):
                    too_large = _kind_of(measured[-1][0])
                low, share = share, (share + high) / 2
                continue
            if _kind_of(tried) == too_large:
                break  # what recomputes the same never holds as little as it would have to
            if best is None and limit <= self._seconds(tried) < inf:
                if _kind_of(tried) == _kind_of(measured[-1][0]):
                    return MemoryFit(tried)  # with more memory it does not fit
                slower, low, share = tried, share, (share + high) / 2
                continue
            if best is not None and tried.placements.seconds >= best.seconds:
                low, share = share, (share + high) / 2  # with as much memory the best still is better
                continue
            cached = next((bytes_ for other, bytes_ in measured if _same(other, tried)), None)
            if cached is None:
                over, fit = self._over(tried)
                first = first or fit
                measured.append((tried, over))
            else:
                over, fit = cached, None
            if over > 0:
                before = measured[-2][1] if len(measured) > 1 else inf
                if best is None and abs(before - over) < _SAME * budget and cached is None and over < inf:
                    break  # what does not fit is not what the search can change
                high, share = share, self._less(share, over, tried)
                continue
            if fit is not None and (best is None or fit.seconds < best.seconds):
                best = fit
            if -over <= _LEFT * budget:
                break
            low, share = share, (share + high) / 2
        if best is not None:
            return best
        if slower is not None:
            return MemoryFit(slower)
        self._count(solution.configuration)
        if self.offload.activations:  # of which the search does not know how much may wait in host memory
            self._least_over = min(self._least_over, *(bytes_ for _, bytes_ in measured))
        raise self._host_full or self._failure(solution, first, measured[0][1])

    def _check_state(self, solution: CandidateSolution) -> None:
        """Raise InfeasibleError if the memory does not even hold the least state of a configuration. With
        activations in host memory the search is given more than the memory, and does not see that."""
        budget, memory = self.request.budget, self.cluster.device.memory_bytes
        larger = any(group.device.memory_bytes > memory for group in self.cluster.groups)
        if budget is None or not self.offload.activations or self.offload.parameters or larger:
            return
        least = least_state(solution.formulated.problem.terms, solution.placements.setting)
        if least > budget:
            self._count(solution.configuration)
            failure = InfeasibleError(
                f"no plan for {solution.configuration.name} fits {bytes_up(budget)} per rank",
                why=f"parameters, gradients and optimizer alone hold {bytes_up(least)} on the fullest rank",
            )
            failure.smallest_bytes = least
            raise failure

    def _count(self, config: Configuration) -> None:
        """Note a configuration of which nothing fits: nothing fits of others like it that store no less."""
        self.failed += 1
        self._failed[alike(config)] = max(stored_ways(config.mesh), self._failed.get(alike(config), 0))

    def _less(self, share: float, over: float, tried: CandidateSolution) -> float:
        """The share of the memory to try after one with which so many bytes are missing."""
        assert self.request.budget is not None
        if over == inf:
            return share * _SMALLER
        less = share - _MORE * over / self.request.budget
        more = self._known_more(tried)
        return less if more is None else min(less, 1.0 - more / self.request.budget)

    def _leaves_no_less(self, share: float, tried: CandidateSolution) -> bool:
        """Whether a share of the memory is about what one like this may be given at most."""
        more = self._known_more(tried)
        budget = self.request.budget
        return more is not None and budget is not None and share > 1 - more / budget - _NEAR

    def measured(self, solution: CandidateSolution) -> float | None:
        """Seconds of the simulated step of a solution that was made a program, None of others."""
        peak = self._peak(solution)
        return None if peak is None else peak.step

    def waits(self, solution: CandidateSolution) -> float:
        """Seconds of them in which it waits for its host."""
        peak = self._peak(solution)
        return 0.0 if peak is None else peak.waits

    def _peak(self, solution: CandidateSolution) -> Peak | None:
        return next((fit.peak for _, fit in self._fitted if _same(fit.solution, solution)), None)

    def incumbent(self, solution: CandidateSolution) -> Incumbent:
        """A solution that fits. Its seconds are with what it waits for its host."""
        self.fitted(solution)
        seconds = self._seconds(solution) + self.waits(solution)
        return Incumbent(solution, seconds, self.measured(solution))

    def _seconds(self, tried: CandidateSolution) -> float:
        return tried.placements.seconds if tried.configuration.pipe.ranks == 1 else self.seconds(tried)

    def _over(self, tried: CandidateSolution) -> tuple[float, MemoryFit | None]:
        """(bytes beyond the budget, the solution with its stages); None for one that no cut fits, or of which
        solutions like it say that it does not."""
        expected = self._expected(tried)
        if expected is not None and expected > 0:
            return expected, None
        staging = None
        if tried.configuration.pipe.ranks > 1:
            self.progress("cutting the pipeline")
            self.cutting(tried).check_stages()
            try:
                staging = self.cutting(tried).best(fixed=self.fixed)
            except InfeasibleError:
                if self.request.budget is None:
                    raise
                return inf, None
        if self.request.budget is None:
            return 0.0, MemoryFit(tried, staging)
        try:
            peak = self.peak(tried, staging)
        except HostFullError as error:
            self._host_full = error
            return error.missing, None
        if staging is not None and peak.over > 0:
            staging, peak = self._recut(tried, staging, peak)
        self.note(tried, peak)
        if peak.over > 0 and self.offload.activations:
            ours = _calls_of(tried)
            self._over_hosted[ours] = min(peak.over - _state(tried), self._over_hosted.get(ours, inf))
        return peak.over, MemoryFit(tried, staging, peak)

    def note(self, solution: CandidateSolution, peak: Peak) -> None:
        """What a program was measured to hold, which says something of others like it."""
        more = peak.bytes - solution.placements.bytes
        self._more.setdefault(_kind_of(solution), []).append((solution.placements.setting, more))

    def _recut(self, tried: CandidateSolution, staging: Staging, peak: Peak) -> tuple[Staging, Peak]:
        """Stages that leave room for what the first ones held too much, if there are any about as fast."""
        cutting, counted = self.cutting(tried), max(peak_bytes(staging.schedule, staging.costs))
        # stages that are counted to leave more room than they do
        unused = max(0.0, (self.request.budget or counted) - counted)
        cutting.spare(_MORE * peak.over + unused)
        try:
            other = cutting.best(fixed=self.fixed)
        except InfeasibleError:
            other = staging
        if other.seconds <= (1 + _NEAR) * staging.seconds and other.pipeline != staging.pipeline:
            after = self.peak(tried, other)
            if after.over <= 0:
                return other, after
        cutting.spare(0.0)
        return staging, peak

    def _expected(self, tried: CandidateSolution) -> float | None:
        """Bytes beyond the budget at least, by what was measured of solutions that recompute the same; None
        if that says nothing: with a pipeline, whose schedule decides. Where activations may wait in host
        memory, by one of which all did: only its states may take less."""
        if self.offload.activations:
            over = self._over_hosted.get(_calls_of(tried)) if tried.configuration.pipe.ranks == 1 else None
            return None if over is None else over + _state(tried)
        more = self._known_more(tried)
        budget = self.request.budget
        return None if more is None or budget is None else tried.placements.bytes + more - budget

    def _known_more(self, tried: CandidateSolution) -> float | None:
        """Bytes that one like it held beyond what the search counts; None with a pipeline."""
        return self._more_like(tried.configuration, tried.placements.setting)

    def _more_like(self, config: Configuration, setting: StepConfig) -> float | None:
        if config.pipe.ranks > 1:
            return None
        # what recomputes more calls may hold less
        known = self._more.get(_kind(config, setting), ())
        return min((more for other, more in known if _recomputes(other, setting)), default=None)

    def beyond(self, config: Configuration, setting: StepConfig) -> float:
        """Bytes that one like it held beyond what the search counts, the least; 0 if there was none. With
        activations in host memory inf if one like it was too large, and this one stores no less on a rank."""
        if self.offload.activations:
            over = stored_ways(config.mesh) <= self._failed.get(alike(config), 0) and config.pipe.ranks == 1
            return inf if over else 0.0
        return max(0.0, self._more_like(config, setting) or 0.0)

    def _failure(self, tried: CandidateSolution, fit: MemoryFit | None, over: float) -> InfeasibleError:
        """over: bytes beyond the budget of the first that was tried."""
        name, budget = tried.configuration.name, bytes_up(self.request.budget or 0.0)
        if fit is None or fit.peak is None:
            known = fit is None and over < inf
            least = (self.request.budget or 0.0) + over
            why = (
                f"programs like it hold {bytes_up(least)}"
                if known
                else "no stages of it fit, however they are cut"
            )
            failure = InfeasibleError(f"no plan for {name} fits {budget} per rank", why=why)
            if known:
                failure.smallest_bytes = least
        else:
            held = fit.peak.held
            inside = fit.peak.bytes - held.total
            failure = InfeasibleError(
                f"no plan for {name} fits {budget} per rank: the one that was found holds "
                f"{bytes_up(fit.peak.bytes)} at its simulated peak",
                why=f"parameters {bytes_up(held.parameters)}, gradients {bytes_up(held.gradients)}, "
                f"optimizer {bytes_up(held.optimizer)}, activations {bytes_up(held.activations)}, "
                f"temporaries {bytes_up(inside)}, on pipeline rank {fit.peak.rank}",
                hint="use more ranks on fsdp or tp, smaller microbatches, or a larger --memory",
            )
            failure.smallest_bytes = fit.peak.bytes
        return failure

    def peak(self, solution: CandidateSolution, staging: Staging | None) -> Peak:
        """The simulated peak of the program that a solution becomes."""
        self.progress("simulating its memory")
        options = self.lowering(solution)[1]
        if staging is None and not self.offload and self.request.budget is not None:
            deep = extrapolate_depth(
                solution.formulated.model.folded, options, self._look(solution), self.request.budget
            )
            if deep is not None:
                return Peak(0, deep.held, deep.bytes, step=deep.step, over=deep.bytes - self.request.budget)
        peaks = self._program_peaks(solution, staging)
        prices, budget = peaks.prices, self.request.budget
        rank, (held, most) = max(enumerate(peaks.all), key=lambda row: row[1][1])
        over = -inf
        if budget is not None:
            limits = rooms(prices.cluster, prices.machines, budget) or (budget,) * len(peaks.all)
            over = max(bytes_ - own for (_, bytes_), own in zip(peaks.all, limits, strict=True))
        fits = over <= 0
        if not fits:
            return Peak(rank, held, most, over=over)
        seconds = step_seconds(prices.schedule, prices.costs, prices.behaviour.steps_overlap)
        host, waits = None, 0.0
        if self.offload:
            host, waits = need_of(prices), spent_in(prices).axes.get("host", 0.0)
        if self._fastest is None or seconds < self._fastest[0]:
            self._fastest = seconds, solution, staging, peaks
        return Peak(rank, held, most, host, waits, seconds, over)

    @property
    def fastest(self) -> CandidateSolution | None:
        """Of the solutions that were made full programs and fit."""
        return None if self._fastest is None else self._fastest[1]

    def full_peaks(self, solution: CandidateSolution, staging: Staging | None) -> Peaks:
        """Of the full program that a solution becomes, which may be one that was measured."""
        if self._fastest is not None and _same(self._fastest[1], solution) and self._fastest[2] is staging:
            return self._fastest[3]
        return self._program_peaks(solution, staging)

    def _program_peaks(self, solution: CandidateSolution, staging: Staging | None) -> Peaks:
        plan, options = self.lowering(solution)
        schedule = uncut = None
        if staging is not None:
            # slices are cut out of what is not localised yet, which a cutting does not keep
            uncut = self.cutting(solution).uncut if staging.pipeline.slices == 1 else None
            plan = replace(plan, pipeline=staging.pipeline)
            schedule = schedule_of(plan)
            splits = schedule is not None and schedule.splits_backward
            saving = saving_of(laid_for(plan, self.cluster), Mesh.parse(plan.mesh), plan)
            options = replace(options, plan=plan, split_backward=splits, saving=saving)
        stages = None
        if schedule is not None and staging is not None:
            stages = PipelineStages(schedule, 0, parts=staging.pipeline.parts)
        folded = solution.formulated.model.folded
        lowered = lower_by_share(folded, options, uncut)

        def build(share: float, ahead: bool) -> Program:
            return Program(
                plan.mesh,
                lowered(share, ahead),
                Signature.of(folded.joint),
                {},
                microbatches=plan.microbatches,
                stages=stages,
                offload=self.offload,
            )

        return least_offload(build, self._pricing(solution), self.request.budget)

    def _pricing(self, solution: CandidateSolution) -> Callable[[Program], StagePrices]:
        """Prices programs of a solution."""
        machine, segment_cache = self.cluster.laid(solution.formulated.order), OfSegments()
        behaviour = behaviour_on(machine.device, recipe=self.request.recipe)
        return lambda program: StagePrices(program, machine, behaviour=behaviour, known=segment_cache)

    def _look(self, solution: CandidateSolution) -> Callable[[Folded, LoweringOptions], TruncatedRun]:
        """Looks at programs of a solution without a pipeline."""
        prices_of = self._pricing(solution)

        def look(folded: Folded, options: LoweringOptions) -> TruncatedRun:
            plan = options.plan
            lowered, signature = lower(folded, options), Signature.of(folded.joint)
            program = Program(plan.mesh, lowered, signature, {}, microbatches=plan.microbatches)
            prices = prices_of(program)
            peaks = Peaks(prices)

            def step() -> SimulatedStep:
                seconds = step_seconds(prices.schedule, prices.costs, prices.behaviour.steps_overlap)
                parts = prices.parts.all.values()
                return SimulatedStep(seconds, tuple((p.seconds, p.talk + p.hidden) for p in parts))

            return TruncatedRun(*peaks.of(0), tuple(peaks.along(0)), step)

        return look

    def cutting(self, solution: CandidateSolution) -> StagePartition:
        """The model at the microbatch of a solution, placed by it and not cut yet."""
        for other, cutting in self._cuttings:
            if _same(other, solution):
                return cutting
        partition = StagePartition(
            solution.formulated.model.folded,
            self.lowering(solution)[1],
            self.cluster.laid(solution.formulated.order),
            hosted(self.request.recipe, self.offload, self.cluster.device),
            # what activations take of a device is only known once some of them are stored
            None if self.offload.activations else self.request.budget,
            placements=solution.placements,
            schedules=self._schedules,
            stages={name: frozenset(stages) for name, stages in self.request.stages},
        )
        self._cuttings.append((solution, partition))
        return partition

    def lowering(self, solution: CandidateSolution) -> tuple[Plan, LoweringOptions]:
        """The plan of a solution, and how the passes place its model."""
        budget, print_ = self.request.budget, self.analysis.fingerprint
        plan = explain(solution, self.cluster, print_, budget=budget, reasons=False)
        passes, flow = PassOptions(offload=str(self.offload)), solution.formulated.model.flow
        lowering = lowering_of(plan, flow, self.analysis, self.cluster, passes)
        if plan.pipeline is None or plan.pipeline.slices == 1:
            return plan, lowering
        # of how much work each slice is, only prices say (`StagePartition`)
        units = self._units(solution.formulated.model.folded, lowering, plan.pipeline.slices)
        even = of_equal_work(plan.pipeline.slices, units, 0.0).counts
        plan = replace(plan, pipeline=structs.replace(plan.pipeline, parts=even))
        return plan, replace(lowering, plan=plan)

    def _units(self, folded: Folded, how: LoweringOptions, slices: int) -> int:
        """Equal parts of a sequence that slices may be made of: more than slices, where the model can be
        divided so finely. Raises UsageError if it cannot be divided into slices at all."""
        length, ranks = sequence_ports(folded.joint, 1)[0].type.shape[1], prod(how.mesh.sizes)
        if id(folded) not in self._finest:
            check_slices(folded, how, slices)
            able = [n for n in _UNITS if n > slices and length % n == 0]
            most = next((n for n in able if _divides(folded, how, n)), 0)
            self._finest[id(folded)] = folded, tuple(n for n in able if n <= most)
        _, fine = self._finest[id(folded)]
        return next((n for n in fine if length % (n * ranks) == 0), slices)


def _divides(folded: Folded, how: LoweringOptions, units: int) -> bool:
    """Whether a model can be divided into so many slices."""
    try:
        check_slices(folded, how, units)
    except UsageError:
        return False
    return True


def _state(solution: CandidateSolution) -> float:
    """Bytes of parameters, gradients and optimizer, as the search counts them."""
    return solution.placements.setting.state_bytes(solution.placements.usage)


def _kind_of(solution: CandidateSolution) -> Hashable:
    return _kind(solution.configuration, solution.placements.setting)


def _calls_of(solution: CandidateSolution) -> Hashable:
    """The same with how many calls are recomputed."""
    recompute = solution.placements.setting.recompute
    calls = frozenset((name, r.policy, r.calls) for name, r in recompute.items() if r.calls)
    return calls, alike(solution.configuration)


def _kind(config: Configuration, setting: StepConfig) -> Hashable:
    """What decides how much a program holds beyond what the search counts: what lives inside a part."""
    recompute = {(name, r.policy) for name, r in setting.recompute.items() if r.calls}
    return frozenset(recompute), alike(config)


def _recomputes(setting: StepConfig, other: StepConfig) -> bool:
    """Whether as many calls are recomputed as in another setting, or more."""
    none = Recompute("full", 0)
    return all(setting.recompute.get(name, none).calls >= r.calls for name, r in other.recompute.items())


def _same(a: CandidateSolution, b: CandidateSolution) -> bool:
    """Whether two solutions place and run everything alike."""
    states = a.placements.states == b.placements.states and a.placements.setting == b.placements.setting
    return a.formulated is b.formulated and a.configuration == b.configuration and states
