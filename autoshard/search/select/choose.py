"""The best plan over meshes, microbatches, recomputation and placements, under a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, isfinite, prod

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cost.on_mesh import CostModels
from autoshard.errors import InfeasibleError, UsageError
from autoshard.search.bound.candidate_queue import CandidateQueue
from autoshard.search.bound.estimate import Estimated
from autoshard.search.bound.mesh_families import MeshFamily
from autoshard.search.problem.padded_params import padded_model
from autoshard.search.problem.problem import Model, batch_of, experts_of
from autoshard.search.problem.search_axes import axes_of_batch
from autoshard.search.select.baselines import Baseline, BaselineConfigurations, MemoryCheck, price_baselines
from autoshard.search.select.mesh_shapes import MeshShapes
from autoshard.search.select.rank_speed import RankSpeeds
from autoshard.search.select.refine import CandidateSolver, Evaluator, name_of
from autoshard.search.select.request import CandidateSolution, Incumbent, Rejected, SearchRequest
from autoshard.search.select.tactics import run_tactics
from autoshard.search.solve.configuration import Configuration, Staged, data_ways, inside, shapes_of
from autoshard.search.solve.formulate import ShardingProblem, layer_calls
from autoshard.search.solve.param_costs import whole_state
from autoshard.search.solve.problem_cache import ProblemCache
from autoshard.search.solve.solve_placements import PlacementSolution, place
from autoshard.search.solve.step_config import StepConfig
from autoshard.search.solve.tune import FINAL, QUICK, tune
from autoshard.solver.network import InfeasibleNetwork

#: layers are split further, in the largest problems, where estimates are at most so many times the best
_ABOUT = 1.02
#: and never where they are more than so many times the best: twice as many ways have saved 7 % at most
_FAR = 1.08
#: shapes with pipelines that are solved for models with experts
_PIPELINES = 1


class Searches:
    """What searches of models have in common that differ in the memory alone: problems and shapes."""

    def __init__(self) -> None:
        self._known: list[tuple[Model, Cluster, int, MeshShapes]] = []

    def shapes(self, model: Model, cluster: Cluster, world: int, fresh: MeshShapes) -> MeshShapes:
        """The shapes of a search, those of one before if there was one alike; else ``fresh``."""
        for of, on, ranks, shapes in self._known:
            alike = shapes.request.within == fresh.request.within and ranks == world
            if of is model and on is cluster and alike:
                return shapes.within(fresh.request)
        self._known.append((model, cluster, world, fresh))
        return fresh


def choose(
    model: Model,
    meshes: Sequence[Mesh | Staged],
    cluster: Cluster,
    request: SearchRequest | None = None,
    progress: Callable[[str], None] = lambda _: None,
    evaluator: Evaluator | None = None,
    searches: Searches | None = None,
    known: Incumbent | None = None,
) -> CandidateSolution:
    """The best plan over all meshes, and over microbatches with a global batch.

    Raises UsageError if the model can use no mesh, and InfeasibleError if nothing fits, with the breakdown
    of the mesh that needs least. A KeyboardInterrupt returns the incumbent. evaluator: of solutions.
    searches: before this one. known: its solution is returned if no other of several meshes is faster.
    """
    request = request or SearchRequest()
    if not meshes:
        raise UsageError("no mesh shape fits the cluster", hint="use another number of devices")
    given = [m if isinstance(m, Staged) else Staged(m) for m in meshes]
    world = given[0].world_size
    search = _Search(model, cluster, request, progress, evaluator, world, searches or Searches())
    if any(s.devices for s in given):
        speeds = RankSpeeds(model, search.cluster, search.setting)
        given = [speeds.of(s) for s in given]
    if request.tactics:
        solution = search.by_tactics([s.mesh for s in given])
    elif len(given) == 1 and (request.stored or (request.batch is None and given[0].ranks == 1)):
        solution = search.one(given[0])
    else:
        solution = search.many(given, known)
        if known is not None and solution is known.solution:
            return solution
    if not request.baselines or solution.interrupted or solution.spent:
        return solution
    try:
        baselines = search.baselines(world, solution)
    except KeyboardInterrupt:
        return replace(solution, interrupted=True)
    return replace(search.better(solution, given), baselines=baselines)


def retuned(
    solution: CandidateSolution, request: SearchRequest, memory_share: float, *, quick: bool = False
) -> CandidateSolution | None:
    """The same configuration with a share ``memory_share`` of the memory, None if nothing fits that.

    quick: with little work.
    """
    if request.budget is None:
        return None
    formulated = solution.formulated
    try:
        placements = tune(
            formulated.problem,
            solution.placements.setting,
            int(memory_share * request.budget),
            recompute=request.recompute,
            allowed=formulated.allowed,
            limits=QUICK if quick else FINAL,
        )
    except InfeasibleNetwork:
        return None
    return replace(solution, placements=replace(placements, lower_bound=solution.placements.lower_bound))


class _Search:
    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        request: SearchRequest,
        progress: Callable[[str], None],
        evaluator: Evaluator | None,
        world: int,
        searches: Searches,
    ) -> None:
        self.model, self.request, self.progress = model, request, progress
        self.cluster = cluster.used_by(world)
        overlap = self.cluster.device.overlap if request.overlap is None else request.overlap
        self.setting = StepConfig(1, layer_calls(model.folded), overlap=overlap)
        self.total = request.batch or batch_of(model.folded)
        recipe = request.recipe
        problems = ProblemCache(model, self.cluster, self.setting, recipe, progress, world, self.total)
        fresh = MeshShapes(problems, request, self.setting, self.total, progress)
        self.shapes = searches.shapes(model, cluster, world, fresh)
        self.problems = self.shapes.problems
        self.exact = CandidateSolver(self.problems, request, self.setting, progress, evaluator)
        self.solved: list[MeshFamily] = []
        self.fitted: list[CandidateSolution] = []

    def one(self, staged: Staged) -> CandidateSolution:
        """A mesh that was given, with its first pipeline and microbatch: otherwise the batch in one piece."""
        mesh, request, pipe = staged.mesh, self.request, staged.pipes[0]
        self.progress(f"searching {mesh}")
        batch = staged.batches[0] if staged.batches else self.problems.captured
        count = max(1, self.total // batch) if batch else 1
        axes = axes_of_batch(mesh, batch) if request.replicate_small_batch else None
        formulated = self.problems.of(
            mesh, batch, request.pins, merge=False, axes=axes, stored=request.stored
        )
        setting = replace(self.setting, microbatches=count, pipe=pipe)
        placements = self.exact.proven(formulated, self.exact.tuned(formulated, setting))
        config = Configuration(mesh, batch, count, pipe)
        return CandidateSolution(formulated, placements, config, self.cluster, placements.lower_bound)

    def by_tactics(self, meshes: Sequence[Mesh]) -> CandidateSolution:
        """Axis by axis on a mesh that was given, the batch in one piece."""
        if len(meshes) != 1 or self.request.batch is not None:
            raise UsageError(
                "tactics decide the axes of one mesh and one batch",
                hint="give --mesh and --batch in place of --cluster alone and --global-batch",
            )
        mesh = meshes[0]

        def solve(formulated: ShardingProblem, last: bool) -> PlacementSolution:
            self.progress(f"searching {formulated.mesh}")
            if last:
                return self.exact.tuned(formulated, self.setting)
            return place(formulated.problem, self.setting, None, allowed=formulated.allowed)

        formulated, placements, stages = run_tactics(
            self.model,
            mesh,
            CostModels(self.cluster),
            self.setting,
            self.request.tactics,
            self.request.recipe,
            solve,
            pins=self.request.pins,
            order=self.problems.order(mesh),
        )
        config = Configuration(mesh, self.problems.captured, 1)
        bound = placements.lower_bound
        return CandidateSolution(formulated, placements, config, self.cluster, bound, stages=stages)

    def many(self, given: Sequence[Staged], known: Incumbent | None = None) -> CandidateSolution:
        """The best of all shapes, microbatches and recomputation."""
        ranked = CandidateQueue()
        try:
            groups = shapes_of(self.shapes.reachable(given), experts_of(self.model))
            later = [g for g in groups if experts_of(self.model) and all(s.ranks > 1 for s in g)]
            apart = [g for g in groups if len(given) > 1 and _divides_experts(g[0].mesh) and g not in later]
            free = [g for g in groups if len(given) > 1 and _has_free_axis(g[0].mesh) and g not in apart]
            plain = [g for g in groups if g not in (*later, *apart, *free)]
            split = [g for g in plain if len(given) > 1 and experts_of(self.model) and inside(g[0].mesh)]
            for group in (g for g in plain if g not in split):
                ranked.extend(self._ranked(group))
            unsplit = ranked.first()
            ranked.extend(self._least_split(free))
            ranked.extend(self._best_division(apart))
            # experts make every size of the data axes a problem of its own: pipelines of the best layout only
            divided = [g for g in later if _divides_experts(g[0].mesh)]
            ranked.extend(self._divided_pipelines(divided, ranked))
            ranked.extend(self._least_split(split, unsplit, ranked.first()))
            for group in _few([g for g in later if g not in divided], ranked, self.cluster):
                ranked.extend(self._ranked(group))
        except KeyboardInterrupt:
            if not self.solved:
                raise
            self.exact.interrupted = True  # what is known by now still gives a plan
        known = known if self.solved else None  # shapes that cannot be searched are not slower ones
        return self.exact.best(ranked, known) or self.exact.nothing(self.solved, self.total)

    def _best_division(self, groups: Sequence[tuple[Staged, ...]]) -> list[Estimated]:
        """Configurations that divide experts over an axis of their own. Wide ones exchange tokens among more
        ranks, narrow ones gather more; inside a node, exchanges take far less."""
        node = max((level.size or 1 for level in self.cluster.levels), default=1)
        inside = [g for g in groups if _expert_ways(g[0].mesh) <= node]
        rows = [g for g in groups if g not in inside], inside
        wider, narrower = (sorted(row, key=lambda g: _expert_ways(g[0].mesh)) for row in rows)
        return [*self._downhill(wider), *self._downhill(narrower, last=bool(wider))]

    def _divided_pipelines(
        self, groups: Sequence[tuple[Staged, ...]], ranked: CandidateQueue
    ) -> list[Estimated]:
        """Of pipelines that divide experts, those that do so as the best shape without one does; where that
        divides none, as the best of those of a middling depth."""
        first = ranked.first() if groups else None
        ways = 1 if first is None else _expert_ways(first.configuration.mesh)
        result: list[Estimated] = []
        if ways == 1 and groups:
            each = sorted({data_ways(g[0].mesh) for g in groups})
            result = self._best_division([g for g in groups if data_ways(g[0].mesh) == each[len(each) // 2]])
            best = CandidateQueue(result).first()
            ways = 1 if best is None else _expert_ways(best.configuration.mesh)
        alike = sorted(
            (g for g in groups if _expert_ways(g[0].mesh) == ways), key=lambda g: data_ways(g[0].mesh)
        )
        once = {e.configuration: e for e in (*result, *self._downhill(alike))}
        return list(once.values())

    def _downhill(self, groups: Sequence[tuple[Staged, ...]], *, last: bool = False) -> list[Estimated]:
        """Configurations of the middle shape of a row, or of the last, then of its neighbours as long as that
        helps."""
        queues: dict[int, CandidateQueue] = {}

        def seconds(k: int) -> float:
            if k not in queues:
                queues[k] = CandidateQueue(self._ranked(groups[k]))
            first = queues[k].first()
            return inf if first is None else first.seconds

        at, within = len(groups) - 1 if last else len(groups) // 2, range(len(groups))
        if groups:
            seconds(at)
        for way in (1, -1):
            while at + way in within and (seconds(at + way) < seconds(at) or not isfinite(seconds(at))):
                at += way
        return [e for each in queues.values() for e in each]

    def _least_split(
        self,
        groups: Sequence[tuple[Staged, ...]],
        unsplit: Estimated | None = None,
        best: Estimated | None = None,
    ) -> list[Estimated]:
        """Configurations of the largest problems, with experts or with a free axis for ranks that the batch
        does not divide over: those that split layers least, then further as long as that helps or they are
        about as fast as the best; never beyond one that is far slower. unsplit: the best that does not split
        layers; best: of all already known.
        """
        result: list[Estimated] = []
        before, least = (inf if one is None else one.seconds for one in (unsplit, best))
        for group in sorted(groups, key=lambda g: _ways_inside(g[0].mesh)):
            queue = CandidateQueue(self._ranked(group))
            first = queue.first()
            result.extend(queue)
            if first is None:
                continue
            slower = first.seconds >= before and first.seconds > _ABOUT * least
            if slower or first.seconds > _FAR * least:
                break
            before, least = first.seconds, min(least, first.seconds)
        return result

    def _ranked(self, group: tuple[Staged, ...]) -> list[Estimated]:
        """The configurations of one shape."""
        try:
            shape = self.shapes.solved(group)
        except UsageError as error:
            self.exact.failures.append(error)
            return []
        self.solved.append(shape)
        return self.shapes.ranked(shape)

    def baselines(self, devices: int, solution: CandidateSolution) -> tuple[Baseline, ...]:
        """The baselines on as many devices, beside what was found."""
        self.progress("pricing the baselines")
        # baselines have no pins
        request, setting = replace(self.request, pins=()), self.setting
        solved = [] if self.request.pins else self.solved

        def pricing(problems: ProblemCache, solved: Sequence[MeshFamily]) -> BaselineConfigurations:
            shapes = MeshShapes(problems, request, setting, self.total, self.progress)

            def ranked(alone: Staged) -> CandidateQueue:
                shape = next((s for s in solved if _has(s, alone)), None) or shapes.solved((alone,))
                return CandidateQueue(shapes.ranked(replace(shape, meshes=(alone,))))

            return BaselineConfigurations(ranked, lambda config: problems.of(config.mesh, config.batch))

        plain = sharded = pricing(self.problems, solved)
        stored = padded_model(self.model, devices)
        if stored is not self.model:
            of_stored = ProblemCache(
                stored, self.cluster, setting, request.recipe, self.progress, devices, self.total
            )
            sharded = pricing(of_stored, ())
        seen = [staged for shape in self.solved for staged in shape.meshes]
        reached = self.exact.evaluated(solution)
        state = whole_state(self.model, request.recipe)
        return price_baselines(
            devices, self.cluster, request.budget, state, setting, plain, sharded, seen, self._room, reached
        )

    def _room(self, config: Configuration, setting: StepConfig) -> MemoryCheck | None:
        """What a plan of ours holds on the mesh of a baseline if it is to fit; that plan is kept.

        Where the search finds none, that says nothing of what others store in another way.
        """
        try:
            formulated = self.problems.of(config.mesh, config.batch)
            tuned = self.exact.tuned(formulated, setting)
        except (InfeasibleError, UsageError):
            return MemoryCheck(setting, self.request.budget)
        fits = CandidateSolution(formulated, tuned, config, self.cluster, tuned.lower_bound)
        if self.exact.evaluator is not None:
            try:
                fits = self.exact.evaluator.fit(fits, inf, self.exact.spent)
            except (InfeasibleError, UsageError):
                return None
        self.fitted.append(fits)
        placements, budget = fits.placements, self.request.budget
        return MemoryCheck(placements.setting, budget if placements is tuned else placements.bytes)

    def better(self, solution: CandidateSolution, given: Sequence[Staged]) -> CandidateSolution:
        """What was found, or a faster plan on a baseline's mesh if that was given: estimates left it out."""
        seconds = self.exact.evaluated(solution)
        given_fits = (s for s in self.fitted if any(_is_of(s.configuration, g) for g in given))
        first = min(given_fits, key=lambda s: s.placements.seconds, default=solution)
        slower = first.placements.seconds >= seconds
        if self.request.pins or slower or self._simulated_slower(first, solution):
            return solution
        name, former = name_of(first.configuration), Rejected(name_of(solution.configuration), seconds, True)
        proven = self.exact.proven(first.formulated, first.placements)
        others = tuple(r for r in solution.rejected if r.name != name)
        return replace(
            first,
            placements=proven,
            bound=min(solution.bound, proven.lower_bound),
            rejected=(former, *others),
        )

    def _simulated_slower(self, one: CandidateSolution, other: CandidateSolution) -> bool:
        """Whether both were made programs, of which that of the first takes no less."""
        if self.exact.evaluator is None:
            return False
        times = [self.exact.evaluator.measured(s) for s in (one, other)]
        return times[0] is not None and times[1] is not None and times[0] >= times[1]


def _has(shape: MeshFamily, staged: Staged) -> bool:
    """Whether a mesh is one of a shape, whichever pipelines it may have."""
    return any(s.mesh == staged.mesh and s.ranks == staged.ranks for s in shape.meshes)


def _divides_experts(mesh: Mesh) -> bool:
    return any(axis.meaning.divides_experts for axis in mesh.axes)


def _expert_ways(mesh: Mesh) -> int:
    """Over how many ranks experts are divided by an axis of their own."""
    return prod(axis.size for axis in mesh.axes if axis.meaning.divides_experts)


def _has_free_axis(mesh: Mesh) -> bool:
    return any(axis.meaning.is_free for axis in mesh.axes)


def _ways_inside(mesh: Mesh) -> int:
    """Into how many parts products inside layers are divided."""
    return prod(axis.size for axis in mesh.axes if axis.meaning.divides_products)


def _is_of(config: Configuration, given: Staged) -> bool:
    """Whether it is one of those that were given, without a pipeline."""
    same_mesh = given.ranks == 1 and config.mesh == given.mesh
    return same_mesh and (not given.batches or config.batch in given.batches)


def _few(
    groups: Sequence[tuple[Staged, ...]], ranked: CandidateQueue, cluster: Cluster
) -> list[tuple[Staged, ...]]:
    """Of shapes with pipelines, a few that divide layers as the best one without does, and one that does not
    divide them and stays in a node: what is best over all nodes says little of what is best inside of one.

    On unlike groups also the widest that does not divide layers.
    """
    first = ranked.first() if groups else None
    widest = sorted(groups, key=lambda g: -data_ways(g[0].mesh))
    if first is None:
        few = list(groups)[:_PIPELINES]
    else:
        best = inside(first.configuration.mesh)
        few = [g for g in widest if inside(g[0].mesh) == best][:_PIPELINES]
    plain = [g for g in widest if not inside(g[0].mesh)]
    node = min((n for part in cluster.groups or (cluster,) for n in part.group_sizes if n > 1), default=0)
    within = [g for g in plain if data_ways(g[0].mesh) <= node]
    return list(dict.fromkeys((*few, *within[:1], *(plain[:1] if cluster.groups else ()))))
