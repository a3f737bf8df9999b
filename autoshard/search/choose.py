"""The best plan over meshes, microbatches, recomputation and placements, under a memory budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd, inf, isfinite

from autoshard.cluster.assign import assign_ranks
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Axis, Mesh
from autoshard.cluster.order import RankOrder
from autoshard.cost.recipe import ADAMW, Recipe
from autoshard.errors import AutoshardError, InfeasibleError, UsageError
from autoshard.search.amounts import bytes_up
from autoshard.search.network import InfeasibleNetwork
from autoshard.search.pins import Pin
from autoshard.search.problem import Model, experts_of
from autoshard.search.problems import Posed, layer_calls, pose
from autoshard.search.rank import (
    Configuration,
    End,
    Estimated,
    Shape,
    data_ways,
    microbatch_sizes,
    rank,
    shapes_of,
    way_of,
)
from autoshard.search.rebatch import NotRebatchable, batch_of, rebatched
from autoshard.search.rivals import Rival, rivals
from autoshard.search.setting import Setting
from autoshard.search.settle import Placed, place, priced
from autoshard.search.solve import solve
from autoshard.search.tactics import Stage, Tactic, run_tactics
from autoshard.search.terms import compose, profile
from autoshard.search.tune import QUICK, proven, tune

#: configurations solved exactly, and those among them that only divide the data ranks otherwise
_MOST, _ALIKE = 3, 2
#: states of solved configurations together after which no other is solved
_WORK = 8_000
#: configurations whose estimate is this much over that of one that was solved are not solved
_MARGIN = 1.03


@dataclass(frozen=True)
class Ask:
    """What is asked of the search.

    budget: bytes per rank, None for no limit. batch: sequences per step; None: those the model was captured
    with, in one microbatch. recompute: whether activations may be computed again. overlap: share of
    computing that hides parameter collectives (None: what the cluster says). recipe: what training keeps
    per parameter. rivals: whether to price what a user would have picked by hand. pins: placements that are
    decided already. tactics: what to decide axis by axis, on a mesh that is given.
    """

    budget: int | None = None
    batch: int | None = None
    recompute: bool = True
    overlap: float | None = None
    recipe: Recipe = ADAMW
    rivals: bool = False
    pins: tuple[Pin, ...] = ()
    tactics: tuple[Tactic, ...] = ()


@dataclass(frozen=True)
class Settled:
    """The best found.

    bound: seconds; no plan that was considered is faster. rejected: (mesh with microbatches, seconds or
    an estimate) of others, best first. interrupted: whether the search was stopped before its end.
    """

    posed: Posed
    placed: Placed
    configuration: Configuration
    cluster: Cluster
    bound: float
    rejected: tuple[tuple[str, float], ...] = ()
    interrupted: bool = False
    rivals: tuple[Rival, ...] = ()
    stages: tuple[Stage, ...] = ()


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
    search = _Search(model, cluster.used_by(meshes[0].world_size), ask, progress)
    if ask.tactics:
        found = search.by_tactics(meshes)
    elif len(meshes) == 1 and ask.batch is None:
        found = search.one(meshes[0])
    else:
        found = search.many(meshes)
    if not ask.rivals or found.interrupted:
        return found
    try:
        return replace(found, rivals=search.rivals(found.configuration.mesh.world_size))
    except KeyboardInterrupt:
        return replace(found, interrupted=True)


class _Search:
    def __init__(self, model: Model, cluster: Cluster, ask: Ask, progress: Callable[[str], None]) -> None:
        self.model, self.cluster, self.ask, self.progress = model, cluster, ask, progress
        self.captured = batch_of(model.folded)
        self.total = ask.batch or self.captured
        overlap = cluster.device.overlap if ask.overlap is None else ask.overlap
        self.setting = Setting(1, layer_calls(model.folded), overlap=overlap)
        self.failures: list[AutoshardError] = []
        self.shapes: list[Shape] = []
        self.interrupted = False
        self.orders: dict[Mesh, RankOrder] = {}
        self.models: dict[int, Model] = {}

    def one(self, mesh: Mesh) -> Settled:
        """A mesh that was given, the batch in one piece."""
        self.progress(f"searching {mesh}")
        posed = self.pose(mesh, self.captured, self.ask.pins, merge=False)
        placed = self.proven(posed, self.tune(posed, self.setting))
        where = Configuration(mesh, self.captured, 1)
        return Settled(posed, placed, where, self.cluster, placed.lower_bound)

    def by_tactics(self, meshes: Sequence[Mesh]) -> Settled:
        """Axis by axis on a mesh that was given, the batch in one piece."""
        if len(meshes) != 1 or self.ask.batch is not None:
            raise UsageError(
                "tactics decide the axes of one mesh and one batch",
                hint="give --mesh and --batch in place of --cluster alone and --global-batch",
            )
        mesh = meshes[0]

        def solve(posed: Posed, last: bool) -> Placed:
            self.progress(f"searching {posed.mesh}")
            return (
                self.tune(posed, self.setting)
                if last
                else place(posed.problem, self.setting, None, allowed=posed.allowed)
            )

        posed, placed, stages = run_tactics(
            self.model, mesh, self.cluster, self.setting, self.ask.tactics, self.ask.recipe, solve
        )
        where = Configuration(mesh, self.captured, 1)
        return Settled(posed, placed, where, self.cluster, placed.lower_bound, stages=stages)

    def many(self, meshes: Sequence[Mesh]) -> Settled:
        try:
            for group in shapes_of(self.reachable(meshes), experts_of(self.model)):
                try:
                    self.shapes.append(self.shape(group))
                except UsageError as error:
                    self.failures.append(error)
        except KeyboardInterrupt:
            if not self.shapes:
                raise
            self.interrupted = True  # what is known by now still gives a plan
        ranked = [e for shape in self.shapes for e in self.ranked(shape)]
        if not ranked:
            return self.nothing(self.shapes)
        return self.exact(sorted(ranked, key=lambda e: (e.seconds, e.bound, str(e.configuration.mesh))))

    def reachable(self, meshes: Sequence[Mesh]) -> list[Mesh]:
        """Meshes whose data ranks divide the batch; of the others, with the rest as a free axis ``seq``.

        More ranks than sequences only help if something other than the batch is divided, too.
        """
        if self.ask.batch is None or len(meshes) == 1:
            return list(meshes)
        found = [m for m in meshes if self.total % data_ways(m) == 0]
        if len(found) == len(meshes):
            return found
        for mesh in meshes:
            data = [a for a in mesh.axes if a.meaning.splits_batch]
            ways = gcd(self.total, data_ways(mesh))
            if len(data) == 1 and 1 < ways < data[0].size:
                rest = [a for a in mesh.axes if not a.meaning.splits_batch]
                axes = (Axis(data[0].name, ways), Axis("seq", data[0].size // ways), *rest)
                found.append(Mesh(axes))
        return found or list(meshes)

    def ranked(self, shape: Shape) -> list[Estimated]:
        return rank(shape, self.total, self.cluster, self.setting, self.ask.budget, self.ask.recipe)

    def rivals(self, devices: int) -> tuple[Rival, ...]:
        """What a user would have picked on as many devices."""
        self.progress("pricing the rivals")

        def ranked(mesh: Mesh) -> list[Estimated]:
            known = next((s for s in self.shapes if mesh in s.meshes), None)
            found = self.ranked(known or self.shape((mesh,)))
            fitting = (e for e in found if e.configuration.mesh == mesh and isfinite(e.seconds))
            return sorted(fitting, key=lambda e: e.seconds)

        def pose(where: Configuration) -> Posed:
            return self.pose(where.mesh, where.batch)

        def known(mesh: Mesh) -> bool:
            return any(mesh in s.meshes for s in self.shapes)

        return rivals(devices, self.cluster, self.ask.budget, self.setting, ranked, pose, known)

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
            posed = self.pose(mesh, batch, self.ask.pins)
            ways = [way_of(posed, placed) for placed in self.ways(posed)]
            ends.append(End(batch, tuple(ways), self.least_seconds(posed), self.least_bytes(posed)))
        return Shape(meshes, ends[0], ends[-1])

    def ways(self, posed: Posed) -> list[Placed]:
        """The fastest placements; with a budget also some to which half the bytes are worth half the time."""
        free = posed.free
        if self.ask.budget is None or free.bytes == 0:
            return [free]
        return [free, priced(posed.problem, self.setting, free.seconds / free.bytes, allowed=posed.allowed)]

    def sizes(self, mesh: Mesh) -> list[int]:
        """Possible microbatches, in sequences over the whole mesh."""
        if self.ask.batch is None:
            return [self.captured]
        return microbatch_sizes(mesh, self.total)

    def pose(self, mesh: Mesh, batch: int, pins: tuple[Pin, ...] = (), *, merge: bool = True) -> Posed:
        try:
            if batch not in self.models:
                self.models[batch] = rebatched(self.model, batch)
        except NotRebatchable as error:
            raise UsageError(
                f"the model cannot be planned for microbatches of {batch} sequences",
                where=f"mesh {mesh}, captured with {self.captured} sequences",
                why=str(error),
                hint="plan one batch in one piece (--batch), with example inputs of that many sequences",
            ) from None
        # axes that store experts in parts may also exchange rows, which axes that only split the batch do not
        merge = merge and len(mesh.axes) > 1 and not experts_of(self.model)
        return pose(
            self.models[batch],
            mesh,
            self.cluster,
            self.setting,
            recipe=self.ask.recipe,
            merge=merge,
            pins=pins,
            order=self.order(mesh),
        )

    def order(self, mesh: Mesh) -> RankOrder | None:
        """Ranks on devices by measured links, where there are any: slow links get little to do."""
        links = self.cluster.links
        if links is None:
            return None
        if mesh not in self.orders:
            self.progress(f"assigning ranks of {mesh} to devices")
            self.orders[mesh] = assign_ranks(mesh, links)
        return self.orders[mesh]

    def least_seconds(self, posed: Posed) -> float:
        """Seconds of computing and talking that no placements go below, for one microbatch."""
        network = compose(
            posed.problem.terms,
            lambda key: float(key.kind in ("work", "talk")),
            lambda key: 0.0,
            posed.allowed,
        )
        return solve(network, limits=QUICK).lower_bound

    def least_bytes(self, posed: Posed) -> float:
        """Bytes that no placements go below, with everything computed again; 0 without a budget."""
        if self.ask.budget is None:
            return 0.0
        setting = replace(self.setting, optimistic=self.ask.recompute)
        network = compose(posed.problem.terms, lambda key: 0.0, setting.bytes_weight, posed.allowed)
        return solve(network.at_price(1.0), limits=QUICK).lower_bound

    def at_once(self, posed: Posed, setting: Setting) -> Placed:
        """Placements that fit, with the least work."""
        budget = self.ask.budget
        try:
            return place(posed.problem, setting, budget, allowed=posed.allowed, limits=QUICK, rounds=1)
        except InfeasibleNetwork:
            return self.tune(posed, setting.running_again("full"))

    def proven(self, posed: Posed, placed: Placed) -> Placed:
        if not self.ask.recompute:
            return placed
        return proven(posed.problem, placed, self.ask.budget, allowed=posed.allowed)

    def tune(self, posed: Posed, setting: Setting) -> Placed:
        budget = self.ask.budget
        try:
            return tune(posed.problem, setting, budget, recompute=self.ask.recompute, allowed=posed.allowed)
        except InfeasibleNetwork as error:
            assert budget is not None
            raise _infeasible(posed, setting, error, budget) from None

    def exact(self, ranked: Sequence[Estimated]) -> Settled:
        """Solve the configurations that look best, until the others are ruled out or far behind."""
        best: Settled | None = None
        solved: dict[Configuration, float] = {}
        limit, work = inf, 0
        alike: Counter[object] = Counter()
        for estimated in ranked:
            where = estimated.configuration
            if best is not None and (
                self.interrupted
                or estimated.bound >= best.placed.seconds
                or (isfinite(estimated.seconds) and estimated.seconds > limit)
                or len(solved) >= _MOST
                or work > _WORK
                or alike[_kind(where)] >= _ALIKE
            ):
                continue
            alike[_kind(where)] += 1
            try:
                found = self.solved(estimated, at_once=best is None)
            except (InfeasibleError, UsageError) as error:
                self.failures.append(error)
                solved[where] = inf
                continue
            except KeyboardInterrupt:
                if best is None:
                    raise
                self.interrupted = True
                break
            seconds = solved[where] = found.placed.seconds
            work += sum(found.posed.problem.terms.states)
            if isfinite(estimated.seconds):
                # estimates err alike, so they are compared with each other, unless this one was far off
                far = _MARGIN * estimated.seconds < seconds
                limit = min(limit, seconds / _MARGIN if far else _MARGIN * estimated.seconds)
            if best is None or seconds < best.placed.seconds:
                best = found
        if best is None:
            raise min(self.failures, key=lambda e: getattr(e, "smallest_bytes", inf))
        return self.finished(best, ranked, solved)

    def solved(self, estimated: Estimated, *, at_once: bool) -> Settled:
        """One configuration. at_once: if interrupted, finish with the least work instead of stopping."""
        where = estimated.configuration
        try:
            self.progress(f"solving {where.mesh}, {where.microbatches} microbatches of {where.batch}")
            posed = self.pose(where.mesh, where.batch, self.ask.pins)
            placed = self.tune(posed, estimated.setting)
        except KeyboardInterrupt:
            if not at_once:
                raise
            # nothing is solved yet: what the estimate says is at hand in a moment
            self.interrupted = True
            self.progress("interrupted; finishing the first plan (interrupt again to stop at once)")
            posed = self.pose(where.mesh, where.batch, self.ask.pins)
            placed = self.at_once(posed, estimated.setting)
        return Settled(posed, placed, where, self.cluster, placed.lower_bound)

    def finished(
        self,
        best: Settled,
        ranked: Sequence[Estimated],
        solved: dict[Configuration, float],
    ) -> Settled:
        try:
            placed = best.placed if self.interrupted else self.proven(best.posed, best.placed)
        except KeyboardInterrupt:
            self.interrupted, placed = True, best.placed
        best = replace(best, placed=placed)
        others = [(e.configuration, e) for e in ranked if e.configuration != best.configuration]
        bound = min([placed.lower_bound, *(e.bound for _, e in others)])
        # an estimate below what was found says little: those that were solved come first
        priced = sorted((c not in solved, solved.get(c, e.seconds), _name(c)) for c, e in others)
        named = [(name, seconds) for _, seconds, name in priced if isfinite(seconds)]
        return replace(best, bound=bound, rejected=tuple(named), interrupted=self.interrupted)

    def nothing(self, shapes: Sequence[Shape]) -> Settled:
        """Nothing fits by the estimates: let the shape that needs least say so exactly."""
        for shape in sorted(shapes, key=lambda s: s.low.batch):
            mesh = shape.meshes[0]
            try:
                posed = self.pose(mesh, shape.low.batch, self.ask.pins)
                setting = replace(self.setting, microbatches=self.total // shape.low.batch)
                placed = self.tune(posed, setting)
            except InfeasibleError as error:
                self.failures.append(error)
                continue
            where = Configuration(mesh, shape.low.batch, setting.microbatches)
            return Settled(posed, placed, where, self.cluster, placed.lower_bound)
        raise min(self.failures, key=lambda e: getattr(e, "smallest_bytes", inf))


def _kind(where: Configuration) -> object:
    """What configurations share that only divide the data ranks otherwise."""
    rest = tuple((a.name, a.size) for a in where.mesh.axes if not a.meaning.splits_batch)
    return rest, where.batch


def _name(where: Configuration) -> str:
    pieces = f" x {where.microbatches} microbatches" if where.microbatches > 1 else ""
    return f"{where.mesh}{pieces}"


def _infeasible(posed: Posed, setting: Setting, error: InfeasibleNetwork, limit: int) -> InfeasibleError:
    held = setting.running_again("full").held(profile(posed.problem.terms, error.states))
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
