"""From a captured model and machines to a plan: the search, its solution as a program, the reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

from autoshard.cluster import Cluster, Mesh
from autoshard.cost.orthogonal import without_tables
from autoshard.cost.recipe import hosted, recipe_named
from autoshard.errors import BatchError, CaptureError, InfeasibleError, UsageError
from autoshard.ir.offload import NO_OFFLOAD, Offload
from autoshard.ir.placement import Layout, parse_placement
from autoshard.ir.units import bytes_text
from autoshard.options import PlanOptions
from autoshard.planner.alternatives import TILE_ROWS, Alternative, Alternatives, same_as
from autoshard.planner.analysis import Analysis
from autoshard.planner.candidates import (
    candidate_meshes,
    check_allowed,
    check_pipeline,
    check_products,
    given_mesh,
)
from autoshard.planner.host_memory import check_states
from autoshard.planner.memory_fit import MemoryFitter
from autoshard.planner.planned import Planned
from autoshard.planner.source import Progress, Source
from autoshard.search.problem.pins import Pin
from autoshard.search.problem.problem import batch_of, experts_of, tokens_of
from autoshard.search.problem.rescale_batch import distinct_batch
from autoshard.search.reasons.explain import explain
from autoshard.search.select.choose import Searches, choose
from autoshard.search.select.request import CandidateSolution, Incumbent, SearchRequest
from autoshard.search.select.tactics import Tactic, parse_tactics
from autoshard.search.solve.configuration import Staged, microbatch_sizes, staged_as
from autoshard.search.solve.formulate import layer_calls
from autoshard.search.solve.param_costs import whole_state
from autoshard.simulate.device_memory import device_memory

#: what goes to host memory where nothing fits otherwise, one after the other
_OFFLOADED = ("activations", "activations,optimizer", "activations,parameters")
#: share of the memory that states of parameters take at least, beyond which nothing may fit beside them
_FULL = 0.9
#: how often a plan is made again with less memory, at most
MOST_REPLANS = 3
#: times the memory of a device that the search may fill, one after the other, with activations that then go
#: to host memory; and how many programs that are too large say that there is no use in going on
_WIDER, _ENOUGH = (1.0, 2.0, 4.0, 16.0), 8
#: memories between that are tried, and the share of a step that recomputing and waiting for the host take at
#: most where none is
_HALVINGS, _LITTLE = 2, 0.02


def _layout(text: str) -> Layout:
    return tuple(map(parse_placement, text.split()))


@dataclass(frozen=True)
class PlanningRequest:
    """What a model is to be planned for.

    where: a mesh, or a cluster whose meshes are searched. machine: the cluster, with its prices. ranks: in
    all. memory: bytes per rank, None for no limit. target: what the plan is called. widths: times the memory
    that the search is given one after the other, where activations go to host memory. known: a plan; what
    cannot be faster is pruned.
    """

    where: Mesh | Cluster
    machine: Cluster
    ranks: int
    options: PlanOptions
    memory: int | None
    target: str
    progress: Progress
    widths: tuple[float, ...] = _WIDER
    known: Incumbent | None = None

    def __post_init__(self) -> None:
        check_pipeline(self.options)
        check_products(self.options, self.machine)
        check_allowed(self.options)

    @property
    def batch(self) -> int | None:
        """Sequences of a step, None for those that the model is captured with."""
        return self.options.global_batch

    @cached_property
    def offload(self) -> Offload:
        return Offload.parse(self.options.offload)

    @cached_property
    def request(self) -> SearchRequest:
        """The search's part of it."""
        options = self.options
        return SearchRequest(
            batch=options.global_batch,
            recipe=recipe_named(options.optimizer),
            recompute=options.recompute,
            baselines=options.baselines,
            replicate_small_batch=options.replicate_small_batch,
            stored=tuple((name, _layout(text)) for name, text, _ in options.stored),
            stages=tuple((name, stages) for name, _, stages in options.stored if stages),
            pins=tuple(map(Pin.parse, options.pins)),
            tactics=_tactics(options.tactics, self.where),
        )

    def planned(self, source: Source) -> Planned:
        """The best plan. Raises what the search raises."""
        searches = Searches()
        result = self.planned_from(source, source.analysed(self.progress), searches)
        return [*(plan for _, plan in self._faster(result, searches)), result][0]

    def planned_for_device(self, source: Source) -> Planned:
        """The same with what a process takes of its device. Where that is too much even with segments that
        grow, it is planned again with less memory, which a warning says, unless ``memory`` was given."""
        analysis, request, searches = source.analysed(self.progress), self, Searches()
        result = self._on_device(request.planned_from(source, analysis, searches))
        # how it came to have tiles, which a plan with less memory has from the start
        notes = result.plan.warnings if result.source and result.source.tile_rows != source.tile_rows else ()
        for attempt in range(MOST_REPLANS):
            if (
                result.device is None
                or not result.device.missing
                or self.memory is None
                or self.options.memory
            ):
                break  # as asked for, or it fits
            assert result.source is not None
            if result.source.tile_rows != source.tile_rows:
                source, analysis, searches = result.source, result.searched, Searches()
            less = (request.memory or self.memory) - result.device.missing
            if attempt and result.peak is not None:
                # that was no help: what is reserved falls by less than what a plan holds
                less = min(less, math.ceil(result.peak.bytes) - 2**attempt * result.device.missing)
            for kinds in self._as_much_offloaded(result.plan.offload):
                smaller = replace(request, memory=less, options=replace(self.options, offload=kinds))
                with suppress(InfeasibleError):
                    before = result
                    result = self._on_device(smaller._with_less(before, source, analysis, searches))
                    request = smaller
                    notes = tuple(n.replace(_words(before.plan.offload), _words(kinds)) for n in notes)
                    break
            else:
                break  # the plan before stands, and its device says that it does not fit
        for alternative, faster in request._faster(result, searches):
            other, held = request._on_less(self._on_device(faster), alternative, result, searches)
            if other.device is None or not other.device.missing:
                result, request = other, held
                break
        if request.memory == self.memory:
            return result
        notes = tuple(w for w in notes if w not in result.plan.warnings)
        asked, given = bytes_text(self.memory or 0), bytes_text(request.memory or 0)
        text = (
            f"planned for {given}: {asked} of tensors do not fit beside what the allocator cannot use, "
            "the CUDA context and NCCL"
        )
        return replace(result, plan=replace(result.plan, warnings=(*result.plan.warnings, *notes, text)))

    def _on_less(
        self, planned: Planned, new: Alternative, slower: Planned, searches: Searches
    ) -> tuple[Planned, PlanningRequest]:
        """Another way to run a plan, with less memory as long as it misses its device and is faster than a
        plan before; and the request with so much. searches: that led to it."""
        request, first = self, planned
        for attempt in range(MOST_REPLANS):
            memory = request.memory
            if not memory or planned.device is None or not planned.device.missing or self.options.memory:
                break
            request = replace(
                request, memory=memory - max(2**attempt * planned.device.missing, memory // 100)
            )
            smaller = replace(request, options=new.options)._refitted(planned, new.source)
            if smaller is None or not smaller.is_faster(slower):
                smaller = request._replanned(searches, first, new)
            if smaller is None or not smaller.is_faster(slower):
                break
            planned = self._on_device(smaller)
        return planned, request

    def _with_less(self, before: Planned, source: Source, analysis: Analysis, searches: Searches) -> Planned:
        """A plan of less memory than one before: on its mesh, unless that is slower. No other mesh was faster
        with more memory."""
        if before.plan.offload == str(self.offload) and before.source is not None:
            result = self._refitted(before, before.source)
            if result is None or before.is_faster(result):
                meshes = same_as(self._candidates(before.analysis), before)
                alike = Alternative(self.options, meshes, before.source, "less memory on its mesh")
                result = self._replanned(searches, before, alike)
            if result is not None and not before.is_faster(result):
                return result
        self.progress("planning with less memory on any mesh")
        as_wide = replace(self, widths=tuple(w for w in self.widths if w >= before.width) or self.widths)
        return as_wide.planned_from(source, analysis, searches)

    def _refitted(self, before: Planned, source: Source) -> Planned | None:
        """A plan of the same configuration that holds less, None if there is none, and for a pipeline, whose
        stages would be cut as they were."""
        assert before.solution is not None
        if before.plan.pipeline is not None:
            return None
        self.progress("planning with less memory")
        try:
            result = self._searched(
                source, before.analysis, (), self.request, Searches(), before.solution, refit=before
            )
        except InfeasibleError:
            return None
        warnings = tuple(dict.fromkeys((*result.plan.warnings, *before.plan.warnings)))
        return replace(result, plan=replace(result.plan, warnings=warnings))

    def _as_much_offloaded(self, kinds: str) -> Sequence[str]:
        """What may be in host memory where so much is; what was asked for if something was, or nothing."""
        if self.options.offload or not kinds:
            return (self.options.offload,)
        return _OFFLOADED[_OFFLOADED.index(kinds) :]

    def _on_device(self, planned: Planned) -> Planned:
        if planned.peaks is None:
            return planned
        self.progress("simulating the allocator")
        return replace(planned, device=device_memory(planned.peaks()))

    def _faster(self, planned: Planned, searches: Searches) -> list[tuple[Alternative, Planned]]:
        """Other ways to run a plan that are faster, see `Alternatives`. searches: that led to it."""
        return Alternatives(
            planned,
            self.options,
            not isinstance(self.where, Mesh),
            lambda options: replace(self, options=options)._candidates(planned.analysis),
            partial(self._replanned, searches),
            lambda: self._with_room(planned, searches),
        ).faster()

    def _with_room(self, planned: Planned, searches: Searches) -> float:
        """Seconds of the best step if there were more memory, by the search's prices alone."""
        self.progress("looking at what more memory would give")
        analysis, budget = planned.searched, self.memory and int(_WIDER[2] * self.memory)
        request = replace(self.request, budget=budget, baselines=False)
        try:
            meshes = self._candidates(analysis)
            best = choose(analysis.model, meshes, self.machine, request, self.progress, None, searches)
        except (UsageError, InfeasibleError):
            return math.inf
        return best.placements.seconds

    def _replanned(self, searches: Searches, planned: Planned, new: Alternative) -> Planned | None:
        """A plan of the same batch that runs in another way, None if none fits."""
        plan, analysis = planned.plan, planned.analysis if new.meshes else planned.searched
        self.progress(f"planning with {new.text}")
        total = None if self.batch is None else plan.batch * plan.microbatches or self.batch
        request = replace(self.request, batch=total, baselines=False)
        # as wide as the memory is, the plan stands
        widths = (planned.width,) if planned.plan.offload else _WIDER[1:]
        known = None if new.beat is None else new.beat.incumbent
        searcher = replace(self, options=new.options, widths=widths, known=known)
        try:
            if new.source != planned.source:
                analysis = new.source.analysed_from(analysis.captured, self.progress)
            if new.meshes:
                among = planned.solution
                result = searcher._searched(new.source, analysis, new.meshes, request, searches, among)
            else:
                searcher = replace(searcher, options=replace(new.options, baselines=False))
                result = searcher._of_any_batch(new.source, analysis, searches)
                assert result.solution is not None and planned.solution is not None
                solution = replace(result.solution, baselines=planned.solution.baselines)
                result = replace(result, solution=solution)
        except (UsageError, InfeasibleError):
            return None
        assert planned.source is not None
        alike = new.source.tile_rows == planned.source.tile_rows  # a warning says why there are tiles
        warnings = (*result.plan.warnings, *(plan.warnings if alike else ()))
        if not alike and not planned.source.tile_rows:
            recomputed = "most layers are recomputed in full without them"
            warnings = (*warnings, f"planned with {new.text} (logits are not returned): {recomputed}")
        return replace(result, plan=replace(result.plan, warnings=tuple(dict.fromkeys(warnings))))

    def planned_from(self, source: Source, analysis: Analysis, searches: Searches | None = None) -> Planned:
        """The same, of a source that was captured and analysed already. searches: before this one.

        Where nothing fits the memory, what is wide is computed in tiles, and then activations wait in host
        memory as well, unless the options say otherwise; a warning of the plan says so.
        """
        searches = searches or Searches()
        try:
            return self._of_any_batch(source, analysis, searches)
        except InfeasibleError as error:
            last = error
        tiled, tiled_analysis = source, analysis
        best: Planned | None = None
        for request, rows, text in self._roomier(source, analysis):
            self.progress(f"planning with {text}")
            if rows != tiled.tile_rows:
                tiled = replace(source, tile_rows=rows)
                tiled_analysis = tiled.analysed_from(analysis.captured, self.progress)
                searches = Searches()
            try:
                result = request._of_any_batch(tiled, tiled_analysis, searches)
            except InfeasibleError as error:
                last = error
                continue
            if best is None or result.step < best.step:
                warning = f"planned with {text}: nothing fits the memory without that"
                if self.batch is None and (batch := batch_of(analysis.folded)) > 1:
                    several = f"global_batch={batch} (--global-batch)"
                    warning += f"; {several} would let a step be several microbatches"
                best = replace(result, plan=replace(result.plan, warnings=(*result.plan.warnings, warning)))
            if not result.plan.recompute or request.offload:
                break  # less on the device could not be faster
        if best is None:
            raise last
        return best

    def _roomier(self, source: Source, analysis: Analysis) -> Iterator[tuple[PlanningRequest, int, str]]:
        """(request, tokens of a tile, in words) of ways to hold less, to be tried one after the other."""
        options, rows = self.options, source.tile_rows
        least = whole_state(analysis.model, self.request.recipe) / self.ranks
        few = tokens_of(analysis.folded) < self.ranks * TILE_ROWS
        if self.memory is None or least > self.memory or few:
            return  # parameters and their states alone are too much, or what tiles could divide is little
        if not rows and options.tile_rows is None:
            rows = TILE_ROWS
            yield self, rows, f"tiles of {rows:,} tokens in MLPs, head and loss (logits are not returned)"
        if options.offload or self.machine.device.host is None:
            return
        # activations in host memory make no room for what layers hold while they run
        full = least > _FULL * self.memory
        for kinds in _OFFLOADED[1:] if full else _OFFLOADED:
            if self.request.recipe.needs_matrices and Offload.parse(kinds).states:
                return  # the optimizer that steps in host memory is AdamW
            hosting = replace(self, options=replace(options, offload=kinds))
            tiles = f"tiles of {rows:,} tokens, and " if rows else ""
            yield hosting, rows, f"{tiles}{_words(kinds)} in host memory"

    def _of_any_batch(self, source: Source, analysis: Analysis, searches: Searches) -> Planned:
        try:
            return self._planned(source, analysis, searches)
        except BatchError as error:
            # a batch of the same size as something else, or of one, cannot be followed; another one may be
            batch, total = distinct_batch(analysis.folded), self.batch or batch_of(analysis.folded)
            if not total:
                raise
            request = replace(self, options=replace(self.options, global_batch=total))
            self.progress(f"capturing again, with {batch} sequences")
            try:
                repeated = source.with_batch(analysis, batch).analysed(self.progress)
                return request._planned(source, repeated, searches)
            except (BatchError, CaptureError):
                raise error from None

    def _planned(self, source: Source, analysis: Analysis, searches: Searches) -> Planned:
        meshes = self._candidates(analysis)
        planned = self._searched(source, analysis, meshes, self.request, searches)
        if planned.plan.batch != 1 or batch_of(analysis.folded) == 1:
            return planned
        # a graph of one sequence is not quite one of more of them: the program's own graph is placed
        self.progress("capturing again, with one sequence")
        alone = source.with_batch(analysis, 1).analysed(self.progress)
        request = replace(self.request, batch=planned.plan.microbatches, baselines=False)
        try:
            result = replace(self, known=None)._searched(
                source, alone, same_as(meshes, planned), request, searches, planned.solution
            )
            return replace(result, several=analysis)
        except InfeasibleError:
            # what was about to fill the memory fills it now
            larger = _of_more(meshes, planned.plan.microbatches)
            if not larger:
                raise
            self.progress("one sequence alone does not fit: looking among larger microbatches")
            return self._searched(source, analysis, larger, self.request, searches)

    def _searched(
        self,
        source: Source,
        analysis: Analysis,
        meshes: Sequence[Staged],
        request: SearchRequest,
        searches: Searches,
        among: CandidateSolution | None = None,
        refit: Planned | None = None,
    ) -> Planned:
        planned = plan_analysed(
            analysis,
            meshes,
            self.machine,
            memory=self.memory,
            request=request,
            target=self.target,
            fixed=bool(self.options.schedule),
            offload=self.offload,
            widths=self.widths,
            progress=self.progress,
            among=among,
            searches=searches,
            refit=refit,
            known=self.known,
        )
        return replace(
            planned,
            source=source,
            plan=replace(
                planned.plan,
                precision=source.precision,
                tile_rows=source.tile_rows,
                products=source.products,
                expert_chunks=source.expert_chunks,
                replicate_experts=source.replicate_experts,
                allow=source.allow,
                differentiate=source.differentiate,
            ),
        )

    def _candidates(self, analysis: Analysis) -> list[Staged]:
        layers = sum(layer_calls(analysis.folded).values())
        if isinstance(self.where, Mesh):
            total = self.batch or batch_of(analysis.folded)
            return [given_mesh(self.where, self.machine, layers, total, self.options)]
        experts = experts_of(analysis.model)
        return candidate_meshes(self.machine, self.ranks, layers, self.batch or 1, self.options, experts)


def _words(kinds: str) -> str:
    """What is offloaded, in words."""
    return kinds.replace(",", " and ")


def _tactics(text: str, where: Mesh | Cluster) -> tuple[Tactic, ...]:
    if not text.strip():
        return ()
    if not isinstance(where, Mesh):
        raise UsageError("tactics need a mesh", hint="give the mesh whose axes they use, as dp=4,tp=2")
    return parse_tactics(text, where)


def _of_more(meshes: Sequence[Staged], total: int) -> list[Staged]:
    """The same without microbatches of a single sequence. total: sequences of a step."""
    larger = [[b for b in s.batches or microbatch_sizes(s.mesh, total) if b > 1] for s in meshes]
    return [replace(s, batches=tuple(b)) for s, b in zip(meshes, larger, strict=True) if b]


def _among(solution: CandidateSolution, all_: CandidateSolution) -> CandidateSolution:
    """A configuration that was solved again, with what the search that led to it says of all others."""
    return replace(
        solution,
        bound=min(all_.bound, solution.bound),
        rejected=all_.rejected,
        baselines=all_.baselines,
        interrupted=all_.interrupted or solution.interrupted,
        spent=all_.spent or solution.spent,
    )


def plan_analysed(
    analysis: Analysis,
    meshes: Sequence[Mesh | Staged],
    cluster: Cluster,
    *,
    memory: int | None = None,
    request: SearchRequest | None = None,
    target: str = "",
    fixed: bool = False,
    offload: Offload = NO_OFFLOAD,
    widths: Sequence[float] = _WIDER,
    progress: Progress | None = None,
    reasons: bool = True,
    among: CandidateSolution | None = None,
    searches: Searches | None = None,
    refit: Planned | None = None,
    known: Incumbent | None = None,
) -> Planned:
    """The best plan over candidate meshes for a model that was analysed already.

    request: of the search; its budget is ``memory``. widths: see `PlanningRequest`. fixed: whether the
    schedule of a pipeline is decided.
    offload: what lives in host memory, for which the cluster must know its host. reasons: False
    for the decisions alone, which takes less time than to say what every other choice would cost. among: what
    a search over more meshes found, if these are what it led to. searches: before this one. refit: a plan
    whose solution is only to fit. known: what cannot be faster is pruned. Raises InfeasibleError if nothing
    else fits.
    """
    request = request or SearchRequest()
    request = replace(request, budget=memory, recipe=without_tables(request.recipe, analysis.folded))

    say = progress or (lambda _: None)

    fitter = MemoryFitter(analysis, cluster, request, fixed=fixed, progress=say, offload=offload)
    searches = searches or Searches()
    if refit is not None:
        assert refit.solution is not None
        solution, width = refit.solution, refit.width
        if refit.peak is not None and not offload:  # what waits in host memory would be something else
            fitter.note(solution, refit.peak)
    else:
        searched = (analysis, meshes, cluster, request, say, fitter, searches, tuple(widths))
        solution, width = _chosen(*searched, known)
    fitted = fitter.fitted(solution)
    solution, staging = fitted.solution, fitted.staging
    if among is not None:
        solution = _among(solution, among)
    best = explain(
        solution,
        cluster,
        analysis.fingerprint,
        budget=memory,
        replicated=analysis.replicated,
        target=target,
        reasons=reasons,
    )
    best = replace(best, offload=str(offload))
    if staging is not None:
        best = replace(best, pipeline=staging.pipeline)
    repeated = partial(fitter.full_peaks, solution, staging)
    return Planned(
        best, analysis, cluster, solution, staging=staging, peak=fitted.peak, peaks=repeated, width=width
    )


@dataclass
class _Widths:
    """Times the memory that the search is given: wider while recomputing takes longer than waiting for the
    host, then between. low, high: in logarithms."""

    wider: tuple[float, ...]
    left: int = _HALVINGS
    low: float = 0.0
    high: float = math.inf

    def __iter__(self) -> Iterator[float]:
        for times in self.wider:
            if self.high == math.inf:
                yield times
        while self.high < math.inf and self.left:
            self.left -= 1
            yield math.exp((self.low + self.high) / 2)

    def note(self, times: float, *, enough: bool) -> None:
        """Whether so much was enough, or more."""
        if enough:
            self.high = math.log(times)
        else:
            self.low = math.log(times)


def _lost(solution: CandidateSolution, fitter: MemoryFitter) -> tuple[float, float]:
    """Shares of a step that recomputing, and waiting for the host, take."""
    placements, peak = solution.placements, fitter.fitted(solution).peak
    waits = 0.0 if peak is None else peak.waits
    recomputing = placements.setting.recompute_seconds(placements.usage)
    return recomputing / placements.seconds, waits / placements.seconds


def _measured(incumbent: Incumbent) -> float:
    """Seconds of its step, simulated if it was made a program."""
    return incumbent.seconds if incumbent.measured is None else incumbent.measured


def _chosen(
    analysis: Analysis,
    meshes: Sequence[Mesh | Staged],
    cluster: Cluster,
    request: SearchRequest,
    say: Progress,
    fitter: MemoryFitter,
    searches: Searches,
    widths: tuple[float, ...],
    incumbent: Incumbent | None,
) -> tuple[CandidateSolution, float]:
    """The best solution that fits, as the fitter sees it, and how many times the memory it was searched with.

    The search counts activations on the device. With offloading it is given more memory than there is, as
    long as the solution then fits and is faster, and then on its mesh what is between. incumbent: what
    cannot be faster than that is pruned.
    """
    wider = widths if fitter.offload.activations and request.budget is not None else (1.0,)
    recipe = hosted(request.recipe, fitter.offload, cluster.device)
    if fitter.offload.states:
        away = whole_state(analysis.model, request.recipe) - whole_state(analysis.model, recipe)
        check_states(away, cluster.device, meshes[0].world_size if meshes else 1)
    request = replace(request, recipe=recipe)
    failure: InfeasibleError | None = None
    best: CandidateSolution | None = None
    width = 1.0
    tried = _Widths(wider)
    staged = [m if isinstance(m, Staged) else Staged(m) for m in meshes]
    for times in tried:
        among = staged
        if best is not None and tried.high < math.inf:
            among = [staged_as(staged, best.configuration)]
        # no baseline offloads activations: baselines are only looked for within the memory that there is
        budget = None if request.budget is None else int(times * request.budget)
        if failure is not None and budget is not None and failure.smallest_bytes > budget:
            continue  # what came closest needs more than that
        wide = replace(request, budget=budget, baselines=request.baselines and times == 1)
        try:
            reached = (incumbent, None if best is None else fitter.incumbent(best))
            known = min((i for i in reached if i is not None), key=_measured, default=None)
            solution = choose(analysis.model, among, cluster, wide, say, fitter, searches, known)
            if incumbent is not None and solution is incumbent.solution:
                if fitter.fastest is None:
                    raise InfeasibleError(f"nothing seems faster than {solution.configuration.name}")
                solution = fitter.fastest
            if len(wider) == 1 or solution.interrupted:
                return (solution, times) if best is None else (best, width)
            recomputing, waiting = _lost(solution, fitter)
            step = fitter.incumbent(solution).seconds
            improved = best is None or step < fitter.incumbent(best).seconds
        except InfeasibleError as error:
            failure = failure or error
            if best is None and fitter.failed >= _ENOUGH:
                break
            if best is not None:
                tried.note(times, enough=times > width)
            continue
        if solution is best and tried.high == math.inf:
            tried.note(times, enough=False)  # nothing else fits: more may let the search recompute less
            continue
        if improved:
            # baselines are only reported where it was looked for
            best = solution if best is None else replace(solution, baselines=best.baselines)
            width = times
        if recomputing + waiting <= _LITTLE:
            break
        # what is slower on one side of the best: the best is on the other
        tried.note(times, enough=waiting > recomputing if improved else times > width)
    if best is not None:
        return best, width
    assert failure is not None
    raise failure
