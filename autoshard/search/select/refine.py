"""The exact stage: the configurations that look best, solved one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite, prod
from typing import Protocol

from autoshard.errors import AutoshardError, InfeasibleError, UsageError
from autoshard.search.bound.best_bound import with_best_bound
from autoshard.search.bound.candidate_queue import CandidateQueue
from autoshard.search.bound.estimate import Estimated
from autoshard.search.bound.global_lower_bound import GlobalLowerBound
from autoshard.search.bound.mesh_families import MeshFamily
from autoshard.search.bound.stage_imbalance import imbalance_seconds
from autoshard.search.problem.cost_terms import profile
from autoshard.search.select.branch_and_bound import BranchAndBound
from autoshard.search.select.request import CandidateSolution, Incumbent, Rejected, SearchRequest
from autoshard.search.solve.configuration import Configuration, data_ways
from autoshard.search.solve.formulate import ShardingProblem
from autoshard.search.solve.memory_text import bytes_up
from autoshard.search.solve.problem_cache import ProblemCache
from autoshard.search.solve.solve_placements import PlacementSolution, place
from autoshard.search.solve.step_config import StepConfig
from autoshard.search.solve.tune import FINAL, QUICK, tune
from autoshard.solver.network import InfeasibleNetwork

#: a pipeline that takes so many times as long as estimated is solved once more, with all layers recomputed
_UNEVEN = 1.15


class Evaluator(Protocol):
    """What is known of a solved configuration once it is a program."""

    def seconds(self, solution: CandidateSolution) -> float:
        """Of a step with its stages cut; inf if they do not fit."""
        ...

    def fit(self, solution: CandidateSolution, limit: float, spent: Callable[[], bool]) -> CandidateSolution:
        """The solution, or one that holds less and fits as a program, or else any that takes no less than
        ``limit`` seconds. spent: whether the first that fits will do. Raises InfeasibleError."""
        ...

    def measured(self, solution: CandidateSolution) -> float | None:
        """Seconds of the simulated step of a program, None of a solution that was not made one."""
        ...

    def waits(self, solution: CandidateSolution) -> float:
        """Seconds of them in which it waits for its host."""
        ...

    def beyond(self, config: Configuration, setting: StepConfig) -> float:
        """Bytes that a program like this holds at least beyond what the search counts, 0 if unknown, inf if
        one that holds no more was too large, however it was solved."""
        ...


class CandidateSolver:
    """Solves configurations; what a search has to say of failures and an interruption stays with it.

    failures: errors of configurations, raised if none is solved. interrupted: whether the user stopped the
    search; the incumbent is then the plan. evaluator: simulates pipelines with their stages cut, and says
    whether a solution fits as a program; without one, stages are estimated.
    """

    def __init__(
        self,
        problems: ProblemCache,
        request: SearchRequest,
        setting: StepConfig,
        progress: Callable[[str], None],
        evaluator: Evaluator | None = None,
    ) -> None:
        self.problems, self.request, self.setting, self.progress = problems, request, setting, progress
        self.evaluator = evaluator
        self.failures: list[AutoshardError] = []
        self.interrupted = False
        self._before = problems.work

    def spent(self) -> bool:
        """Whether all work was done that was asked for."""
        return self.problems.work - self._before > self.request.work

    def best(self, ranked: CandidateQueue, known: Incumbent | None = None) -> CandidateSolution | None:
        """Solve the configurations that look best, until the others are ruled out or far behind; None if
        there is none that may fit. known: one that fits, itself the best if no other is.

        What was solved becomes a program when nothing else is expected to be faster: fitting one takes
        longer than solving it, and most of those that look too good do not fit.
        """
        bnb = BranchAndBound()
        if known is not None:
            bnb.begin(known.solution, known.seconds, known.measured)
        solved = self._run(bnb, ranked)
        if known is not None and bnb.incumbent is known.solution:
            return known.solution
        # what seems not to fit comes after all that does
        solved += self._run_unsure(bnb, ranked.unsure)
        if not solved:
            return None
        if bnb.incumbent is None:
            raise self.worst()
        return self._finished(bnb.incumbent, solved, ranked, bnb.seconds)

    def _run(self, bnb: BranchAndBound, left: CandidateQueue) -> list[Estimated]:
        """Solve what is not left out, best first, and fit what comes out best; returns what was solved."""
        solved: list[Estimated] = []
        while True:
            out: list[Estimated] = []
            while (estimated := left.pop()) is not None:
                if not estimated.rough and estimated.configuration in bnb.seconds:
                    continue  # solved ahead of its turn
                if self._fit(bnb, estimated.seconds) and out:
                    # what had to wait for that comes before what is expected to take longer
                    left.extend((*out, estimated))
                    out.clear()
                elif self._leaves_out(bnb, estimated):
                    if not estimated.rough and self._is_slower(bnb, estimated):
                        bnb.rule_out(estimated)
                    out.append(estimated)
                elif estimated.rough:
                    left.put(self._closer(estimated))
                elif (fuller := self._fuller(estimated)) is not estimated:
                    left.put(fuller)
                elif self._is_slower(bnb, estimated := self._bounded(estimated, bnb.needed)):
                    bnb.rule_out(estimated)
                    out.append(estimated)
                else:
                    solved.append(estimated)
                    self._solve(bnb, estimated)
                    # solving takes less than fitting: what is solved anyway may be what is fitted first
                    other = self._other(bnb, left)
                    if other is not None:
                        solved.append(other)
                        self._solve(bnb, other)
            self._fit(bnb, inf)
            left.extend(out)
            # what was solved in the place of others may have come out slower than it looked
            if all(self._leaves_out(bnb, estimated) for estimated in out):
                return solved

    def _other(self, bnb: BranchAndBound, left: CandidateQueue) -> Estimated | None:
        """What is solved anyway, before anything is fitted: unless it is proven to be slower than what waits
        for that, which most likely fits."""
        try:
            estimated = None if self.interrupted or self.spent() else left.take(bnb.wants)
        except KeyboardInterrupt:
            self.interrupted = True
            return None
        if estimated is None:
            return None
        estimated = self._bounded(estimated, bnb.ahead)
        left.put(estimated)
        return None if estimated.bound >= bnb.ahead(estimated.configuration) else estimated

    def _bounded(self, estimated: Estimated, needed: Callable[[Configuration], float]) -> Estimated:
        """With a bound that rules it out, or the best one; bounds of what is not solved are looked for in the
        end anyway. needed: seconds that a configuration has to be faster than."""
        bound, limit = estimated.bound, needed(estimated.configuration)
        if limit == inf or self.interrupted:
            return estimated
        try:
            for value in self._bounds_of(estimated):
                bound = max(bound, value)
                if bound >= limit:
                    break
        except KeyboardInterrupt:
            self.interrupted = True
        return replace(estimated, bound=bound)

    def _formulated(self, config: Configuration) -> ShardingProblem:
        return self.problems.of(config.mesh, config.batch, self.request.pins)

    def _is_slower(self, bnb: BranchAndBound, estimated: Estimated) -> bool:
        """Whether one is proven to be slower than what is known to fit."""
        return estimated.bound >= bnb.needed(estimated.configuration)

    def _run_unsure(self, bnb: BranchAndBound, unsure: Sequence[Estimated]) -> list[Estimated]:
        """The same for those that seem not to fit; where something else does, until one really does not.

        Where nothing does, a failure is followed by the smallest microbatch: what fails with that needs no
        larger one to be solved.
        """
        solved: list[Estimated] = []
        smallest: dict[object, Estimated] = {}
        for estimated in sorted(unsure, key=lambda e: -e.configuration.batch):
            smallest[_alone(estimated)] = estimated
        too_large: set[object] = set()
        for estimated in sorted(unsure, key=lambda e: (e.floor, e.bound, str(e.configuration.mesh))):
            for each in (estimated, smallest[_alone(estimated)]):
                self._fit(bnb, inf)
                known = each.configuration in bnb.seconds or _alone(each) in too_large
                known = known or self._fuller(each).beyond == inf
                if known or self._leaves_out(bnb, each):
                    continue
                solved.append(each)
                self._solve(bnb, each)
                if isfinite(bnb.seconds.get(each.configuration, inf)):
                    break
                if bnb.incumbent is not None:
                    return solved
                if each is smallest[_alone(each)]:
                    too_large.add(_alone(each))
        self._fit(bnb, inf)
        return solved

    def _leaves_out(self, bnb: BranchAndBound, estimated: Estimated) -> bool:
        return bnb.begun and (self.interrupted or self.spent() or bnb.leaves_out(estimated))

    def _closer(self, estimated: Estimated) -> Estimated | None:
        """A closer look; if it is interrupted for the first time, the same as before."""
        try:
            return estimated.closer()
        except KeyboardInterrupt:
            if self.interrupted:
                raise
            self.interrupted = True
            return estimated

    def _fuller(self, estimated: Estimated) -> Estimated:
        """With what programs like it were found to hold; the same if that is known to it already."""
        if self.evaluator is None or self.request.budget is None:
            return estimated
        return estimated.holding(self.evaluator.beyond(estimated.configuration, estimated.setting))

    def _solve(self, bnb: BranchAndBound, estimated: Estimated) -> None:
        """Solve one configuration, or note why it cannot be; an interruption ends the search."""
        bnb.enter(estimated.configuration)
        try:
            beat = bnb.worth(estimated.configuration)
            solution = self._solved(estimated, beat, at_once=not bnb.begun)
            if solution.configuration != estimated.configuration:
                bnb.fail(estimated.configuration)
        except (InfeasibleError, UsageError) as error:
            self.failures.append(error)
            bnb.fail(estimated.configuration)
        except KeyboardInterrupt:
            if not bnb.begun:
                raise
            self.interrupted = True
        else:
            bnb.solve(estimated, *self._with_even_stages(estimated, solution))

    def _with_even_stages(
        self, estimated: Estimated, solution: CandidateSolution
    ) -> tuple[CandidateSolution, float]:
        """(the solution, or one that recomputes all layers, seconds of its step).

        What is kept of a few layers may be too much for the stages that have them, while it is little for all
        stages together.
        """
        seconds = self.evaluated(solution)
        piped = solution.configuration.pipe.ranks > 1
        may_help = piped and self.request.recompute and self.request.budget is not None
        if not may_help or self.interrupted or seconds <= _UNEVEN * estimated.seconds:
            return solution, seconds
        try:
            full = solution.placements.setting.recomputing("full")
            placements = self._placed(solution.formulated, full)
        except InfeasibleNetwork:
            return solution, seconds
        tried = replace(solution, placements=replace(placements, lower_bound=solution.placements.lower_bound))
        result = self.evaluated(tried)
        return (tried, result) if result < seconds else (solution, seconds)

    def _placed(self, formulated: ShardingProblem, setting: StepConfig) -> PlacementSolution:
        """Placements that fit, with the least work."""
        return place(
            formulated.problem,
            setting,
            self.request.budget,
            allowed=formulated.allowed,
            limits=QUICK,
            rounds=1,
        )

    def _fit(self, bnb: BranchAndBound, expected: float) -> bool:
        """Make programs of the solutions that take no more seconds than is expected of all others; returns
        whether there were any."""
        fitted = False
        while (first := bnb.next(expected)) is not None:
            fitted = True
            solution, seconds = first
            if bnb.incumbent is not None and self.spent():
                continue  # a fit may be solved several times
            measured, waits, needed = None, 0.0, bnb.promising(solution.configuration)
            if seconds < needed and self.evaluator is not None:
                try:
                    fits = solution if self.interrupted else self.evaluator.fit(solution, needed, self.spent)
                except (InfeasibleError, UsageError) as error:  # too large, or its stages cannot be cut apart
                    self.failures.append(error)
                    bnb.fail(solution.configuration)
                    continue
                except KeyboardInterrupt:
                    self.interrupted, fits = True, solution
                if self.interrupted and bnb.incumbent is not None:
                    continue  # what is known to fit goes before what may be faster
                if fits.placements is not solution.placements:
                    solution, seconds = fits, self.evaluated(fits)
                measured = self.evaluator.measured(solution)
                waits = self.evaluator.waits(solution)
            bnb.finish(solution, seconds, measured, waits)
        return fitted

    def evaluated(self, solution: CandidateSolution) -> float:
        """Seconds by which a solved configuration is compared."""
        if solution.configuration.pipe.ranks == 1 or self.interrupted:
            return solution.placements.seconds
        if self.evaluator is None:
            return imbalance_seconds(solution.formulated, solution.placements, solution.configuration.pipe)
        try:
            return self.evaluator.seconds(solution)
        except KeyboardInterrupt:
            self.interrupted = True
            return solution.placements.seconds

    def worst(self) -> AutoshardError:
        """Why nothing can be solved: what came closest."""
        return min(self.failures, key=lambda e: getattr(e, "smallest_bytes", inf))

    def nothing(self, shapes: Sequence[MeshFamily], total: int) -> CandidateSolution:
        """Nothing fits by the estimates: let the shape that needs least say so exactly.

        total: sequences per step.
        """
        for shape in shapes:
            staged = max(shape.meshes, key=lambda s: (s.ranks == 1, s.mesh.world_size))
            batch = shape.ends[0].batch * data_ways(staged.mesh)
            try:
                formulated = self.problems.of(staged.mesh, batch, self.request.pins)
                count = max(1, total // batch)
                setting = replace(self.setting, microbatches=count, pipe=staged.pipes[0])
                placements = self.tuned(formulated, setting)
            except (InfeasibleError, UsageError) as error:
                self.failures.append(error)
                continue
            config = Configuration(staged.mesh, batch, count, staged.pipes[0])
            return CandidateSolution(
                formulated, placements, config, self.problems.cluster, placements.lower_bound
            )
        raise self.worst()

    def tuned(
        self, formulated: ShardingProblem, setting: StepConfig, beat: float = inf, *, first: bool = False
    ) -> PlacementSolution:
        """The best placements with the best recomputation; raises InfeasibleError if nothing fits. beat: see
        `tune`. first: nothing is solved yet, so that this is worth all work."""
        request, budget = self.request, self.request.budget
        limits = QUICK if self.spent() and not first else FINAL
        try:
            return tune(
                formulated.problem,
                setting,
                budget,
                recompute=request.recompute,
                allowed=formulated.allowed,
                limits=limits,
                beat=beat,
            )
        except InfeasibleNetwork as error:
            assert budget is not None
            raise _infeasible(formulated, setting, error, budget) from None

    def proven(self, formulated: ShardingProblem, placements: PlacementSolution) -> PlacementSolution:
        """The same with a lower bound that holds for every recomputation."""
        if not self.request.recompute:
            return placements
        return with_best_bound(formulated, placements, self.request.budget)

    def _solved(self, estimated: Estimated, beat: float, *, at_once: bool) -> CandidateSolution:
        """One configuration. beat: see `tune`. at_once: if interrupted, finish with the least work instead of
        stopping."""
        config, setting = estimated.configuration, estimated.setting
        try:
            self.progress(f"solving {config.name}, {config.microbatches} microbatches of {config.batch}")
            formulated = self._formulated(config)
            try:
                placements = self.tuned(formulated, setting, beat, first=at_once)
            except InfeasibleError:
                # an estimate chose the pipeline, by what then turns out not to fit
                leanest = setting if estimated.proof is None else estimated.proof.leanest()
                if leanest.pipe == setting.pipe:
                    raise
                config, setting = replace(config, pipe=leanest.pipe), leanest
                placements = self.tuned(formulated, setting, beat, first=at_once)
        except KeyboardInterrupt:
            if not at_once:
                raise
            # nothing is solved yet: what the estimate says is at hand in a moment
            self.interrupted = True
            self.progress("interrupted; finishing the first plan (interrupt again to stop at once)")
            formulated = self._formulated(config)
            placements = self._at_once(formulated, setting)
        return CandidateSolution(
            formulated, placements, config, self.problems.cluster, placements.lower_bound
        )

    def _at_once(self, formulated: ShardingProblem, setting: StepConfig) -> PlacementSolution:
        """Placements that fit, with the least work."""
        try:
            return self._placed(formulated, setting)
        except InfeasibleNetwork:
            return self.tuned(formulated, setting.recomputing("full"))

    def _lowest(self, others: Sequence[Estimated], limit: float) -> float:
        """Seconds that none of the others goes below, ``limit`` at most."""
        lowest = GlobalLowerBound(others, self._exact_bound)
        try:
            stopped = self.interrupted or self.spent()
            return min(limit, lowest.seconds) if stopped else lowest.raised(limit)
        except KeyboardInterrupt:
            self.interrupted = True
            return min(limit, lowest.seconds)

    def _exact_bound(self, estimated: Estimated, enough: float) -> float:
        """Seconds that no placements go below, by the problem that is solved: the most, or any that are
        enough."""
        bound = estimated.bound
        for bound in self._exact_bounds(estimated):
            if bound >= enough:
                break
        return bound

    def _bounds_of(self, estimated: Estimated) -> Iterator[float]:
        """All that can be said of what is about to be solved."""
        yield from estimated.bounds()
        # it is formulated to be solved anyway, which takes longer than to look at it
        yield from self._exact_bounds(estimated)

    def _exact_bounds(self, estimated: Estimated) -> Iterator[float]:
        try:
            formulated = self._formulated(estimated.configuration)
        except (InfeasibleError, UsageError):
            return  # says so if it is solved
        yield from estimated.bounds_of(formulated)

    def _finished(
        self,
        best: CandidateSolution,
        entered: Sequence[Estimated],
        left: CandidateQueue,
        solved: Mapping[Configuration, float],
    ) -> CandidateSolution:
        """With the proof, and what was not taken. entered: estimates of those that were solved."""
        try:
            placements = best.placements
            placements = placements if self.interrupted else self.proven(best.formulated, placements)
            if all(e.configuration == best.configuration for e in entered):
                left.first()  # the next best is an estimate: let it be a good one
        except KeyboardInterrupt:
            self.interrupted, placements = True, best.placements
        best = replace(best, placements=placements)
        others = {e.configuration: e for e in (*entered, *left) if e.configuration != best.configuration}
        bound = self._lowest([e for e in others.values() if e.may_fit()], placements.lower_bound)
        # an estimate below what was found says little: those that were solved come first, those that nobody
        # looked at closely last
        priced = sorted(
            (c not in solved, e.rough, solved.get(c, max(e.seconds, e.bound)), name_of(c))
            for c, e in others.items()
        )
        return replace(
            best,
            bound=bound,
            rejected=tuple(Rejected(name, s, not guessed) for guessed, _, s, name in priced if isfinite(s)),
            interrupted=self.interrupted,
            spent=self.spent(),
        )


def _alone(estimated: Estimated) -> object:
    """What configurations share that only have other microbatches."""
    config = estimated.configuration
    return config.mesh, config.pipe.ranks, config.pipe.schedule, config.pipe.chunks


def name_of(config: Configuration) -> str:
    """A mesh with its schedule and microbatches, as a report has it."""
    microbatches = f" x {config.microbatches} microbatches" if config.microbatches > 1 else ""
    schedule = f" {config.pipe.schedule}" if config.pipe.ranks > 1 else ""
    return f"{config.name}{schedule}{microbatches}"


def _infeasible(
    formulated: ShardingProblem, setting: StepConfig, error: InfeasibleNetwork, limit: int
) -> InfeasibleError:
    resident = setting.recomputing("full").held(profile(formulated.problem.terms, error.states))
    parts = {"parameters, gradients and optimizer state": resident.state, "activations": resident.activations}
    binding = max(parts, key=lambda k: parts[k])
    text = ", ".join(f"{k} {bytes_up(v)}" for k, v in parts.items())
    staged = f"pp={setting.pipe.ranks}," if setting.pipe.ranks > 1 else ""
    ranks = "more ranks (fsdp, tp or pp)"
    less = ranks if parts[binding] == resident.state else f"smaller microbatches, {ranks}"
    free = prod(a.size for a in formulated.mesh.axes if a.meaning.is_free)
    if free > 1:  # of more ranks than the batch divides over
        less = f"a global batch that is a multiple of {free * data_ways(formulated.mesh)}, {less}"
    failure = InfeasibleError(
        f"no plan for mesh {staged}{formulated.mesh} fits {bytes_up(limit)} per rank; the smallest feasible "
        f"is {bytes_up(error.smallest_bytes)}",
        why=f"the binding term is {binding} ({text})",
        hint=f"use {less}, --offload, or a larger --memory",
    )
    failure.smallest_bytes = error.smallest_bytes
    return failure
