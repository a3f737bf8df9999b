"""From a captured model and machines to a plan: the search, its solution as a program, the reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice

from autoshard.cluster import Cluster, Mesh
from autoshard.cost.orthogonal import without_tables
from autoshard.cost.recipe import hosted, recipe_named
from autoshard.errors import BatchError, CaptureError, InfeasibleError, UsageError, VerificationError
from autoshard.ir.offload import NO_OFFLOAD, Offload
from autoshard.ir.placement import Layout, parse_placement
from autoshard.ir.units import bytes_text
from autoshard.options import PlanOptions
from autoshard.planner.analysis import Analysis
from autoshard.planner.candidates import candidate_meshes, check_pipeline, check_products, given_mesh
from autoshard.planner.host_memory import check_states
from autoshard.planner.memory_fit import MemoryFitter, Peak
from autoshard.planner.source import Progress, Source
from autoshard.planner.stage_partition import Staging
from autoshard.schedules.registry import lookup
from autoshard.search.plan.plan import Plan
from autoshard.search.problem.pins import Pin
from autoshard.search.problem.problem import batch_of, experts_of, tokens_of
from autoshard.search.problem.rescale_batch import distinct_batch
from autoshard.search.reasons.explain import explain
from autoshard.search.select.choose import Searches, choose
from autoshard.search.select.request import CandidateSolution, SearchRequest
from autoshard.search.select.tactics import Tactic, parse_tactics
from autoshard.search.solve.configuration import Staged, microbatch_sizes
from autoshard.search.solve.formulate import layer_calls
from autoshard.search.solve.param_costs import whole_state
from autoshard.simulate.device_memory import DeviceMemory, device_memory
from autoshard.simulate.peaks import Peaks

#: tokens of a tile on a rank, where a plan needs tiles: products of so many rows reach their full rate
TILE_ROWS = 2048
#: what goes to host memory where nothing fits otherwise, one after the other
_OFFLOADED = ("activations", "activations,optimizer", "activations,parameters")
#: share of the memory that states of parameters take at least, beyond which nothing may fit beside them
_FULL = 0.9
#: how often a plan is made again with less memory, at most
MOST_REPLANS = 3
#: chunks in which the tokens of experts are exchanged, each tried where the one before was so much faster
_EXPERT_CHUNKS, _WORTH = (1, 2, 4), 5e-3
#: runners-up whose programs are compared, and as how many times as long their steps may be priced
_MOST_RUNNERS_UP, _NEAR = 3, 1.15
#: as how many times as long a step in one piece may take, for chunks to be tried
_CLOSE = 1.05


@dataclass(frozen=True)
class Planned:
    """A plan and the analysed model it is for.

    The plan alone is what is stored. analysis: of the model with the batch it was captured with, which
    saves `compile` from capturing it again if that is the plan's microbatch. solution: what the plan is
    thought to cost, None for a plan that was read from a file. source: what to capture again, if need be.
    staging: how its pipeline was cut, None without one. peak: what the fullest rank holds, simulated, None
    where no limit was set. peaks: makes its program anew and looks at all ranks. device: what a process takes
    of its device, see `planned_for_device`.
    """

    plan: Plan
    analysis: Analysis = field(repr=False)
    cluster: Cluster = field(repr=False)
    solution: CandidateSolution | None = field(default=None, repr=False)
    source: Source | None = field(default=None, repr=False)
    staging: Staging | None = field(default=None, repr=False)
    peak: Peak | None = field(default=None, repr=False)
    peaks: Callable[[], Peaks] | None = field(default=None, repr=False)
    device: DeviceMemory | None = None

    def of_microbatch(self, say: Progress) -> Planned:
        """The same, with the analysis of one microbatch of the plan: captured again if need be.

        Raises VerificationError without a source to capture.
        """
        batch, captured = self.plan.batch, batch_of(self.analysis.folded)
        if batch in (0, captured):
            return self
        if self.source is None:
            raise VerificationError(
                f"the plan is for microbatches of {batch} sequences, the capture has {captured}",
                hint="compile with example inputs of one microbatch",
            )
        source = self.source.with_batch(self.analysis, batch)
        return replace(self, analysis=source.analysed(say), source=source)


def _layout(text: str) -> Layout:
    return tuple(map(parse_placement, text.split()))


@dataclass(frozen=True)
class PlanningRequest:
    """What a model is to be planned for.

    where: a mesh, or a cluster whose meshes are searched. machine: the cluster, with its prices. ranks: in
    all. memory: bytes per rank, None for no limit. target: what the plan is called.
    """

    where: Mesh | Cluster
    machine: Cluster
    ranks: int
    options: PlanOptions
    memory: int | None
    target: str
    progress: Progress

    def __post_init__(self) -> None:
        check_pipeline(self.options)
        check_products(self.options, self.machine)

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
        result = self.planned_from(source, source.analysed(self.progress))
        return [*self._with_expert_chunks(result), result][0]

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
                source, analysis, searches = result.source, result.analysis, Searches()
            less = (request.memory or self.memory) - result.device.missing
            if attempt and result.peak is not None:
                # that was no help: what is reserved falls by less than what a plan holds
                less = min(less, math.ceil(result.peak.bytes) - 2**attempt * result.device.missing)
            for kinds in self._as_much_offloaded(result.plan.offload):
                smaller = replace(request, memory=less, options=replace(self.options, offload=kinds))
                self.progress("planning with less memory")
                with suppress(InfeasibleError):
                    before, result = result, self._on_device(smaller.planned_from(source, analysis, searches))
                    request = smaller
                    notes = tuple(n.replace(_words(before.plan.offload), _words(kinds)) for n in notes)
                    break
            else:
                break  # the plan before stands, and its device says that it does not fit
        fits = result.device is None or not result.device.missing
        for faster in request._with_expert_chunks(result) if fits else ():
            chunked, smaller = self._on_device(faster), request
            held = request.memory or self.memory
            if held and chunked.device is not None and chunked.device.missing and not self.options.memory:
                smaller = replace(request, memory=held - chunked.device.missing)
                assert faster.source is not None
                smaller_plan = smaller._in_expert_chunks(faster, faster.source.expert_chunks)
                if smaller_plan is not None and _faster(smaller_plan, result):
                    chunked = self._on_device(smaller_plan)
            if chunked.device is None or not chunked.device.missing:
                result, request = chunked, smaller
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

    def _as_much_offloaded(self, kinds: str) -> Sequence[str]:
        """What may be in host memory where so much is; no more than that if it was asked for."""
        return (kinds,) if self.options.offload or not kinds else _OFFLOADED[_OFFLOADED.index(kinds) :]

    def _on_device(self, planned: Planned) -> Planned:
        if planned.peaks is None:
            return planned
        self.progress("simulating the allocator")
        return replace(planned, device=device_memory(planned.peaks()))

    def _with_expert_chunks(self, planned: Planned) -> list[Planned]:
        """Plans with the tokens of experts in chunks, on the same mesh and on runners-up that divide experts
        among another number of ranks, or in a pipeline beside another microbatch. Each is faster than the
        next and the last faster than this one, by their programs; the options may say in how many chunks."""
        source = planned.source
        assert source is not None
        if self.options.expert_chunks or source.expert_chunks > 1 or not _simulated(planned):
            return []
        best = [planned]
        same = _same_as(self._candidates(planned.analysis), planned) if _exchanges(planned) else []
        others = islice(self._runners_up(planned), _MOST_RUNNERS_UP)
        trials = [(same, _EXPERT_CHUNKS[1:])] if same else []
        for meshes, several in (*trials, *((other, _EXPERT_CHUNKS) for other in others)):
            for chunks in several:
                result = self._in_expert_chunks(planned, chunks, meshes)
                if result is None:
                    break
                if _faster(result, best[0]):
                    best.insert(0, result)
                elif chunks > 1 or _step_of(result) > _CLOSE * _step_of(best[0]):
                    break
        paired = self._in_pairs(planned) if same else None
        if paired is not None and _faster(paired, best[0]):
            best.insert(0, paired)
        return best[:-1]

    def _in_pairs(self, planned: Planned) -> Planned | None:
        """The plan of a pipeline with forwards that run as one with backwards, None where there is none."""
        pipeline, options = planned.plan.pipeline, self.options
        overlapped = "" if pipeline is None or options.schedule else lookup(pipeline.schedule).overlapped
        if pipeline is None or not overlapped:
            return None
        new = replace(self, options=replace(options, schedule=overlapped, chunks=pipeline.chunks))
        meshes = _same_as(new._candidates(planned.analysis), planned)
        new.progress(f"planning with forwards beside backwards on pp={pipeline.ranks},{meshes[0].mesh}")
        return new._replanned(planned, planned.plan.expert_chunks or 1, meshes)

    def _runners_up(self, planned: Planned) -> Iterator[list[Staged]]:
        """The best other meshes without a pipeline that divide experts, each among another number of ranks,
        whose step was thought to take little longer."""
        solution = planned.solution
        if isinstance(self.where, Mesh) or solution is None:
            return
        candidates = {str(s.mesh): s for s in self._candidates(planned.analysis) if s.ranks == 1}
        config = solution.configuration
        known = {1} if config.pipe.ranks > 1 else {1, _expert_ranks(config.mesh)}
        for rejected in sorted(solution.rejected, key=lambda r: r.seconds):
            other = candidates.get(rejected.name.split()[0])
            if other is None or rejected.seconds > _NEAR * solution.placements.seconds:
                continue
            ranks = _expert_ranks(other.mesh)
            if ranks not in known:
                known.add(ranks)
                yield [other]

    def _in_expert_chunks(
        self, planned: Planned, chunks: int, meshes: Sequence[Staged] = ()
    ) -> Planned | None:
        """A plan with the tokens of experts in so many chunks; None if sequences do not divide or none fits.
        meshes: where; left out, on the same."""
        meshes = meshes or _same_as(self._candidates(planned.analysis), planned)
        self.progress(f"planning with the tokens of experts in {chunks} chunks on {meshes[0].mesh}")
        return self._replanned(planned, chunks, meshes)

    def _replanned(self, planned: Planned, chunks: int, meshes: Sequence[Staged]) -> Planned | None:
        """A plan of the same batch on some meshes, None if none fits."""
        source, plan = planned.source, planned.plan
        assert source is not None
        total = None if self.batch is None else plan.batch * plan.microbatches or self.batch
        request = replace(self.request, batch=total, baselines=False)
        chunked = replace(source, expert_chunks=chunks)
        try:
            analysis = planned.analysis
            if chunks > 1:
                analysis = chunked.analysed_from(analysis.captured, self.progress)
            result = self._searched(chunked, analysis, meshes, request, Searches(), planned.solution)
        except (UsageError, InfeasibleError):
            return None
        warnings = tuple(dict.fromkeys((*result.plan.warnings, *plan.warnings)))
        return replace(result, plan=replace(result.plan, warnings=warnings))

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
                tiled_analysis, searches = tiled.analysed(self.progress), Searches()
            try:
                result = request._of_any_batch(tiled, tiled_analysis, searches)
            except InfeasibleError as error:
                last = error
                continue
            if best is None or _step_of(result) < _step_of(best):
                warning = f"planned with {text}: nothing fits the memory without tiles"
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
        if not rows:
            rows = TILE_ROWS
            yield self, rows, f"tiles of {rows:,} tokens in MLPs, head and loss (logits are not returned)"
        if options.offload or self.machine.device.host is None:
            return
        # activations in host memory make no room for what layers hold while they run
        full = least > _FULL * self.memory
        for kinds in _OFFLOADED[1:] if full else _OFFLOADED:
            if self.request.recipe.iterations and Offload.parse(kinds).states:
                return  # the optimizer that steps in host memory is AdamW
            hosting = replace(self, options=replace(options, offload=kinds))
            yield hosting, rows, f"tiles of {rows:,} tokens, and {_words(kinds)} in host memory"

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
            return self._searched(
                source, alone, _same_as(meshes, planned), request, searches, planned.solution
            )
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
            progress=self.progress,
            among=among,
            searches=searches,
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


def _same_as(meshes: Sequence[Staged], planned: Planned) -> list[Staged]:
    """The mesh and the microbatch that were found, and the pipelines it may have."""
    assert planned.solution is not None
    config = planned.solution.configuration
    same = [s for s in meshes if s.mesh == config.mesh and s.ranks == config.pipe.ranks]
    # with an axis in place of data ranks that a batch does not divide over, it is none of the candidates
    return [replace(s, batches=(config.batch,)) for s in (*same, Staged(config.mesh))[:1]]


def _faster(planned: Planned, other: Planned) -> bool:
    """Whether a plan is faster by its program, by more than that may be off."""
    return _step_of(planned) < (1 - _WORTH) * _step_of(other)


def _expert_ranks(mesh: Mesh) -> int:
    """Among how many ranks an axis for them divides experts."""
    return math.prod(axis.size for axis in mesh.axes if axis.meaning.divides_experts)


def _simulated(planned: Planned) -> bool:
    """Whether the program of a plan was simulated."""
    return planned.peak is not None and planned.peak.step is not None


def _exchanges(planned: Planned) -> bool:
    """Whether ranks exchange the tokens of experts."""
    rules, nodes = planned.analysis.rules, planned.plan.nodes
    return any(rules[k].exchanged(s.inputs, s.outputs) is not None for k, s in nodes.items())


def _of_more(meshes: Sequence[Staged], total: int) -> list[Staged]:
    """The same without microbatches of a single sequence. total: sequences of a step."""
    larger = [[b for b in s.batches or microbatch_sizes(s.mesh, total) if b > 1] for s in meshes]
    return [replace(s, batches=tuple(b)) for s, b in zip(meshes, larger, strict=True) if b]


def _step_of(planned: Planned) -> float:
    """Seconds of a step, simulated where that was done."""
    assert planned.solution is not None
    step = None if planned.peak is None else planned.peak.step
    return planned.solution.placements.seconds if step is None else step


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
    progress: Progress | None = None,
    reasons: bool = True,
    among: CandidateSolution | None = None,
    searches: Searches | None = None,
) -> Planned:
    """The best plan over candidate meshes for a model that was analysed already.

    request: of the search; its budget is ``memory``. fixed: whether the schedule of a pipeline is decided.
    offload: what lives in host memory, for which the cluster must know its host. reasons: False
    for the decisions alone, which takes less time than to say what every other choice would cost. among: what
    a search over more meshes found, if these are what it led to. searches: before this one.
    """
    request = request or SearchRequest()
    request = replace(request, budget=memory, recipe=without_tables(request.recipe, analysis.folded))

    say = progress or (lambda _: None)

    fitter = MemoryFitter(analysis, cluster, request, fixed=fixed, progress=say, offload=offload)
    solution = _chosen(analysis, meshes, cluster, request, say, fitter, searches or Searches())
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
    repeated = partial(fitter.program_peaks, solution, staging)
    return Planned(best, analysis, cluster, solution, staging=staging, peak=fitted.peak, peaks=repeated)


#: times the memory of a device that the search may fill, one after the other, with activations that then go
#: to host memory; and how many programs that are too large say that there is no use in going on
_WIDER, _ENOUGH = (1, 2, 4, 16), 8


def _chosen(
    analysis: Analysis,
    meshes: Sequence[Mesh | Staged],
    cluster: Cluster,
    request: SearchRequest,
    say: Progress,
    fitter: MemoryFitter,
    searches: Searches,
) -> CandidateSolution:
    """The best solution that fits, as the fitter sees it.

    The search counts activations on the device. With offloading it is given more memory than there is, as
    long as the solution then fits and is faster.
    """
    wider = _WIDER if fitter.offload.activations and request.budget is not None else (1,)
    recipe = hosted(request.recipe, fitter.offload, cluster.device)
    if fitter.offload.states:
        away = whole_state(analysis.model, request.recipe) - whole_state(analysis.model, recipe)
        check_states(away, cluster.device, meshes[0].world_size if meshes else 1)
    request = replace(request, recipe=recipe)
    failure: InfeasibleError | None = None
    best: CandidateSolution | None = None
    for times in wider:
        # no baseline offloads activations: baselines are only looked for within the memory that there is
        budget = None if request.budget is None else times * request.budget
        if failure is not None and budget is not None and failure.smallest_bytes > budget:
            continue  # what came closest needs more than that
        wide = replace(request, budget=budget, baselines=request.baselines and times == 1)
        try:
            known = None if best is None else (best, fitter.full_seconds(best))
            solution = choose(analysis.model, meshes, cluster, wide, say, fitter, searches, known)
            if len(wider) == 1 or solution.interrupted:
                return best or solution
            slower = known is not None and fitter.full_seconds(solution) >= known[1]
        except InfeasibleError as error:
            failure = failure or error
            if best is None and fitter.failed >= _ENOUGH:
                break
            continue
        if slower:
            break
        # baselines are only reported where it was looked for
        best = solution if best is None else replace(solution, baselines=best.baselines)
    if best is not None:
        return best
    assert failure is not None
    raise failure
