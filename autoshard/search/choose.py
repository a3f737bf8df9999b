"""The best plan over meshes, microbatches, recomputation and placements, under a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cost.recipe import ADAMW, Recipe
from autoshard.cost.step_time import OVERLAP
from autoshard.errors import AutoshardError, InfeasibleError, UsageError
from autoshard.search.amounts import bytes_up
from autoshard.search.network import InfeasibleNetwork
from autoshard.search.plan import Recompute
from autoshard.search.problem import Model
from autoshard.search.problems import Posed, layer_calls, pose
from autoshard.search.rank import (
    Configuration,
    Estimated,
    Shape,
    data_ways,
    microbatch_sizes,
    parameters_of,
    rank,
    shapes_of,
)
from autoshard.search.rebatch import batch_of, rebatched
from autoshard.search.setting import Setting
from autoshard.search.settle import Placed
from autoshard.search.solve import solve
from autoshard.search.terms import compose
from autoshard.search.tune import QUICK, tune

#: configurations solved exactly beyond the one that looks best
_MORE = 3
#: configurations whose estimate is this much over that of one that was solved are not solved
_MARGIN = 1.02


@dataclass(frozen=True)
class Ask:
    """What is asked of the search.

    budget: bytes per rank, None for no limit. batch: sequences per step; None: those the model was captured
    with, in one microbatch. recompute: whether activations may be computed again. overlap: share of
    computing that hides parameter collectives. recipe: what training keeps per parameter.
    """

    budget: int | None = None
    batch: int | None = None
    recompute: bool = True
    overlap: float = OVERLAP
    recipe: Recipe = ADAMW


@dataclass(frozen=True)
class Settled:
    """The best found.

    bound: seconds; no plan that was considered is faster. rejected: (mesh with microbatches, seconds or
    their lower bound) of others, best first. interrupted: whether the search was stopped before its end.
    """

    posed: Posed
    placed: Placed
    configuration: Configuration
    bound: float
    rejected: tuple[tuple[str, float], ...] = ()
    interrupted: bool = False


def choose(
    model: Model,
    meshes: Sequence[Mesh],
    cluster: Cluster,
    ask: Ask | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Settled:
    """The best plan over all meshes, and over microbatches if a global batch is asked for.

    Raises UsageError if no mesh can be used for the model and InfeasibleError if nothing fits, with what
    fills the memory of the mesh that needs least. On a KeyboardInterrupt the best found so far is returned.
    """
    ask = ask or Ask()
    if not meshes:
        raise UsageError("no mesh shape fits the cluster", hint="use another number of devices")
    search = _Search(model, cluster, ask, progress)
    if len(meshes) == 1 and ask.batch is None:
        return search.one(meshes[0])
    return search.many(meshes)


class _Search:
    def __init__(self, model: Model, cluster: Cluster, ask: Ask, progress: Callable[[str], None]) -> None:
        self.model, self.cluster, self.ask, self.progress = model, cluster, ask, progress
        self.captured = batch_of(model.folded)
        self.total = ask.batch or self.captured
        self.setting = Setting(1, layer_calls(model.folded), overlap=ask.overlap)
        self.failures: list[AutoshardError] = []

    def one(self, mesh: Mesh) -> Settled:
        """A mesh that was given, the batch in one piece."""
        self.progress(f"searching {mesh}")
        posed = pose(self.model, mesh, self.cluster, self.setting, recipe=self.ask.recipe)
        placed = self.tune(posed, self.setting)
        return Settled(posed, placed, Configuration(mesh, self.captured, 1), placed.lower_bound)

    def many(self, meshes: Sequence[Mesh]) -> Settled:
        shapes = []
        for group in shapes_of(meshes):
            try:
                shapes.append(self.shape(group))
            except UsageError as error:
                self.failures.append(error)
        ranked = [
            e
            for shape in shapes
            for e in rank(shape, self.total, self.cluster, self.setting, self.ask.budget, self.ask.recipe)
        ]
        if not ranked:
            return self.nothing(shapes)
        return self.exact(sorted(ranked, key=lambda e: (e.seconds, str(e.configuration.mesh))))

    def shape(self, meshes: tuple[Mesh, ...]) -> Shape:
        """Solve the shape at its smallest and its largest microbatch."""
        mesh = meshes[0]
        sizes = [b for b in self.sizes(mesh) if b > 1] or self.sizes(mesh)
        if not sizes:
            raise UsageError(
                f"a batch of {self.total} does not divide over {data_ways(mesh)} batch shards",
                where=f"mesh {mesh}",
                hint="choose a global batch that is a multiple of the data-parallel ranks",
            )
        self.progress(f"searching {mesh} at {sizes[0]} to {sizes[-1]} sequences")
        ends = []
        for batch in dict.fromkeys((sizes[0], sizes[-1])):
            posed = self.pose(mesh, batch)
            ends.append((batch, posed.free.taken, self.least(posed)))
        return Shape(meshes, ends[0], ends[-1], parameters_of(posed))

    def sizes(self, mesh: Mesh) -> list[int]:
        """Possible microbatches, in sequences over the whole mesh."""
        if self.ask.batch is None:
            return [self.captured]
        return microbatch_sizes(mesh, self.total)

    def pose(self, mesh: Mesh, batch: int) -> Posed:
        model = rebatched(self.model, batch)
        merge = len(mesh.axes) > 1
        return pose(model, mesh, self.cluster, self.setting, recipe=self.ask.recipe, merge=merge)

    def least(self, posed: Posed) -> float:
        """Seconds of computing and talking that no placements go below, for one microbatch."""
        network = compose(
            posed.problem.terms, lambda key: float(key.kind in ("work", "talk")), lambda key: 0.0
        )
        return solve(network, limits=QUICK).lower_bound

    def tune(self, posed: Posed, setting: Setting) -> Placed:
        budget = self.ask.budget
        try:
            return tune(posed.problem, setting, budget, recompute=self.ask.recompute)
        except InfeasibleNetwork as error:
            assert budget is not None
            raise _infeasible(posed, setting, error, budget) from None

    def exact(self, ranked: Sequence[Estimated]) -> Settled:
        """Solve the configurations that look best, until the others are ruled out or far behind."""
        best: Settled | None = None
        solved: dict[Configuration, float] = {}
        interrupted = False
        limit = float("inf")
        for estimated in ranked:
            where = estimated.configuration
            if best is not None and (
                estimated.bound >= best.placed.seconds or estimated.seconds > limit or len(solved) > _MORE
            ):
                continue
            self.progress(f"solving {where.mesh}, {where.microbatches} microbatches of {where.batch}")
            try:
                posed = self.pose(where.mesh, where.batch)
                placed = self.tune(posed, replace(self.setting, microbatches=where.microbatches))
            except (InfeasibleError, UsageError) as error:
                self.failures.append(error)
                solved[where] = float("inf")
                continue
            except KeyboardInterrupt:
                if best is None:
                    raise
                interrupted = True
                break
            solved[where] = placed.seconds
            # estimates err alike, so they are compared with each other
            limit = min(limit, _MARGIN * estimated.seconds)
            if best is None or placed.seconds < best.placed.seconds:
                best = Settled(posed, placed, where, placed.lower_bound)
        if best is None:
            raise min(self.failures, key=lambda e: getattr(e, "smallest_bytes", float("inf")))
        return self.finished(best, ranked, solved, interrupted)

    def finished(
        self,
        best: Settled,
        ranked: Sequence[Estimated],
        solved: dict[Configuration, float],
        interrupted: bool,
    ) -> Settled:
        others = [(e.configuration, e) for e in ranked if e.configuration != best.configuration]
        bounds = [e.bound for c, e in others if c not in solved]
        bound = min([best.bound, *bounds, *(s for s in solved.values())])
        named = sorted(
            ((_name(c), solved.get(c, e.seconds)) for c, e in others), key=lambda pair: (pair[1], pair[0])
        )
        return replace(best, bound=bound, rejected=tuple(named), interrupted=interrupted)

    def nothing(self, shapes: Sequence[Shape]) -> Settled:
        """Nothing fits by the estimates: let the shape that needs least say so exactly."""
        for shape in sorted(shapes, key=lambda s: s.low[0]):
            mesh = shape.meshes[0]
            try:
                posed = self.pose(mesh, shape.low[0])
                setting = replace(self.setting, microbatches=self.total // shape.low[0])
                placed = self.tune(posed, setting)
            except InfeasibleError as error:
                self.failures.append(error)
                continue
            return Settled(
                posed, placed, Configuration(mesh, shape.low[0], setting.microbatches), placed.lower_bound
            )
        raise min(self.failures, key=lambda e: getattr(e, "smallest_bytes", float("inf")))


def _name(where: Configuration) -> str:
    pieces = f" x {where.microbatches} microbatches" if where.microbatches > 1 else ""
    return f"{where.mesh}{pieces}"


def _infeasible(posed: Posed, setting: Setting, error: InfeasibleNetwork, limit: int) -> InfeasibleError:
    from autoshard.search.terms import profile

    everything = {s: Recompute("full", n) for s, n in setting.calls.items()}
    held = replace(setting, recompute=everything).held(profile(posed.problem.terms, error.states))
    parts = {"parameters, gradients and optimizer state": held.state, "activations": held.activations}
    binding = max(parts, key=lambda k: parts[k])
    text = ", ".join(f"{k} {bytes_up(v)}" for k, v in parts.items())
    failure = InfeasibleError(
        f"no plan for mesh {posed.mesh} fits {bytes_up(limit)} per rank; the smallest feasible is "
        f"{bytes_up(error.smallest_bytes)}",
        why=f"the binding term is {binding} ({text})",
        hint="use more ranks on fsdp or tp, a smaller batch, or a larger --memory",
    )
    failure.smallest_bytes = error.smallest_bytes
    return failure
