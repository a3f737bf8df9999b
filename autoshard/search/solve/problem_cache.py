"""The problems of one search, each formulated once however many stages ask for it."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.cluster.assign import assign_ranks
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cluster.order import RankOrder
from autoshard.cost.on_mesh import CostModels
from autoshard.cost.recipe import Recipe
from autoshard.cost.stage_machines import full_mesh, kinds_of
from autoshard.errors import BatchError
from autoshard.ir.placement import Layout
from autoshard.search.problem.pins import Pin
from autoshard.search.problem.problem import Model, batch_of, experts_of
from autoshard.search.problem.rescale_batch import NotRescalable, with_batch
from autoshard.search.problem.search_axes import SearchAxes
from autoshard.search.solve.axis_traffic import traffic_of
from autoshard.search.solve.formulate import ShardingProblem, formulate
from autoshard.search.solve.step_config import StepConfig


class ProblemCache:
    """Problems of a model by mesh and microbatch.

    captured: sequences that the model was captured with. world: ranks in all, which a pipeline divides among
    several meshes, 0 if there is none. total: sequences of a step.
    """

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        setting: StepConfig,
        recipe: Recipe,
        progress: Callable[[str], None],
        world: int = 0,
        total: int = 0,
    ) -> None:
        self.model, self.cluster, self.setting, self.recipe = model, cluster, setting, recipe
        self.progress = progress
        self.captured = batch_of(model.folded)
        self.total = total or self.captured
        self.prices = CostModels(cluster, world)
        self._posed: dict[object, ShardingProblem] = {}
        self._grown: dict[tuple[Mesh, int, tuple[Pin, ...], bool], ShardingProblem] = {}
        self._models: dict[int, Model] = {}
        self._orders: dict[Mesh, RankOrder] = {}

    @property
    def work(self) -> int:
        """That was done for all problems: see `Known`."""
        return sum(p.problem.known.work for p in (*self._posed.values(), *self._grown.values()))

    def of(
        self,
        mesh: Mesh,
        batch: int,
        pins: tuple[Pin, ...] = (),
        *,
        merge: bool = True,
        roughly: bool = False,
        axes: SearchAxes | None = None,
        stored: tuple[tuple[str, Layout], ...] = (),
        larger: int = 0,
    ) -> ShardingProblem:
        """A mesh with microbatches of ``batch`` sequences; merge: see `search.solve.formulate.formulate`.
        roughly: for bounds of other microbatches, without waves of tiles, and with ranks of a pipeline on
        devices in an order that is soon found. axes: in place of those of the mesh. stored: layouts that
        parameters have already. larger: microbatch that it is asked for, see there.

        Raises BatchError if the model cannot be scaled to that batch, UsageError if the mesh cannot be used.
        """
        # axes that store experts in parts may also exchange rows, which axes that only split the batch do not
        merge = merge and len(mesh.axes) > 1 and not experts_of(self.model)
        ordered = not roughly or self.cluster.links is None or self.prices.ranks(mesh) == 1
        key = (mesh, batch, pins, merge, ordered, axes, stored, not roughly)
        without = self._posed.get((*key[:-1], False))
        if key not in self._posed and without is not None:
            self._posed[key] = without.with_waves
        if key not in self._posed:
            self._posed[key] = formulate(
                self._scaled(mesh, batch),
                mesh,
                self.prices,
                self.setting,
                recipe=self.recipe,
                merge=merge,
                pins=pins,
                axes=axes,
                stored=dict(stored),
                larger=larger,
                order=self.order(mesh) if ordered else self.prices.rough_order(mesh),
                waves=not roughly,
            )
        return self._posed[key]

    def priced(
        self, mesh: Mesh, batch: int, pins: tuple[Pin, ...], least: int, *, bounds: bool = False
    ) -> ShardingProblem:
        """As `of`, roughly and good for costs alone: the problem of ``least`` sequences with more of them,
        where that leaves the same to decide. bounds: or where that takes no more; of this batch alone."""
        formulated = self.of(mesh, least, pins, roughly=True, larger=batch if batch != least else 0)
        grows = formulated.problem.grows_to(batch) or (bounds and formulated.problem.bounds(batch))
        if batch == least or not grows:
            return self.of(mesh, batch, pins, roughly=not bounds)
        key = (mesh, batch, pins, bounds)
        self._grown[key] = (formulated.with_waves if bounds else formulated).grown(batch)
        return self._grown[key]

    def order(self, mesh: Mesh) -> RankOrder | None:
        """Ranks on devices by measured links, where there are any: slow links get little to do. Of all ranks
        of a pipeline whose ranks are such meshes."""
        links = self.cluster.links
        if links is None:
            return None
        if mesh not in self._orders:
            ranks = self.prices.ranks(mesh)
            full = full_mesh(mesh, ranks)
            self.progress(f"assigning ranks of {full} to devices")
            traffic = None if ranks == 1 else traffic_of(self.model, mesh, ranks, self.total)
            self._orders[mesh] = assign_ranks(full, links, traffic, kinds=kinds_of(self.cluster))
        return self._orders[mesh]

    def scales_to(self, batch: int) -> bool:
        """Whether the model can be priced with another batch without capturing it again."""
        try:
            self._rebatched(batch)
        except NotRescalable:
            return False
        return True

    def _rebatched(self, batch: int) -> Model:
        if batch not in self._models:
            self._models[batch] = with_batch(self.model, batch)
        return self._models[batch]

    def _scaled(self, mesh: Mesh, batch: int) -> Model:
        try:
            return self._rebatched(batch)
        except NotRescalable as error:
            raise BatchError(
                f"the model cannot be planned for microbatches of {batch} sequences",
                where=f"mesh {mesh}, captured with {self.captured} sequences",
                why=f"what it computes depends on how many sequences there are, beyond one row for each "
                f"({error})",
                hint="plan the batch in one piece (on a mesh without pp, microbatches=1, --batch), or with "
                f"example inputs of {batch} sequences",
            ) from None
