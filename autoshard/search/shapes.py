"""Shapes of the mesh, each solved at its smallest and its largest microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd

from autoshard.cluster.mesh import Axis, Mesh
from autoshard.cost.step_time import Exposure
from autoshard.errors import UsageError
from autoshard.search.ask import Ask
from autoshard.search.configuration import Staged, data_ways, microbatch_sizes
from autoshard.search.ends import End, Shape, Way, way_of
from autoshard.search.estimated import Estimated
from autoshard.search.floor import Regime, floors, whole_floors
from autoshard.search.network import Array
from autoshard.search.parameters import Parameters, least_parameters, whole_state
from autoshard.search.poses import Poses
from autoshard.search.problem import experts_of
from autoshard.search.problems import Posed
from autoshard.search.rank import rank
from autoshard.search.setting import OF_STATE, Setting
from autoshard.search.settle import priced
from autoshard.search.shared import shared_seconds
from autoshard.search.solve import least_cost
from autoshard.search.terms import Bytes, compose
from autoshard.search.traffic import between_layers, tied_bytes
from autoshard.search.tune import FINAL, ROUGH
from autoshard.search.uneven import chain_of

#: a shape is also solved at about so many times its smallest microbatch, where most plans are, if there are
#: microbatches far beyond that
_MIDDLE = 8
#: but problems of more states than this take too long for a third time
_LARGE = 8_000


class Shapes:
    """Solves and ranks shapes. total: sequences per step."""

    def __init__(
        self, poses: Poses, ask: Ask, setting: Setting, total: int, progress: Callable[[str], None]
    ) -> None:
        self.poses, self.ask, self.setting, self.total, self.progress = poses, ask, setting, total, progress

    def reachable(self, meshes: Sequence[Staged]) -> list[Staged]:
        """Meshes whose data ranks divide the batch; of the others, with the rest as a free axis ``seq``.

        More ranks than sequences only help if something other than the batch is divided, too.
        """
        if self.ask.batch is None or len(meshes) == 1:
            return list(meshes)
        found = [s for s in meshes if self.total % data_ways(s.mesh) == 0]
        if any(s.ranks == 1 for s in found) and len(found) == len([s for s in meshes if s.ranks == 1]):
            return found
        for staged in meshes:
            mesh = staged.mesh
            data = [a for a in mesh.axes if a.meaning.splits_batch]
            ways = gcd(self.total, data_ways(mesh))
            if staged.ranks == 1 and len(data) == 1 and 1 < ways < data[0].size:
                rest = [a for a in mesh.axes if not a.meaning.splits_batch]
                axes = (Axis(data[0].name, ways), Axis("seq", data[0].size // ways), *rest)
                found.append(replace(staged, mesh=Mesh(axes)))
        return found or list(meshes)

    def solved(self, group: tuple[Staged, ...]) -> Shape:
        """The shape at a few microbatches; raises UsageError if the batch divides over none of its meshes."""
        failure: UsageError | None = None
        for staged in group:
            mesh, ways = staged.mesh, data_ways(staged.mesh)
            sizes = sorted({b // data_ways(s.mesh) for s in group for b in self.sizes(s)} - {0})
            if sizes[:-1] and sizes[0] * ways == 1 and not self.poses.scales_to(1):
                del sizes[0]
            if not sizes:
                raise UsageError(
                    f"a batch of {self.total} does not divide over {ways} batch shards",
                    where=f"mesh {mesh}",
                    hint="choose a global batch that is a multiple of the data-parallel ranks",
                )
            # problems with experts are large, and there are more of them: their ends have to do
            few = experts_of(self.poses.model) > 0 or sizes[-1] <= _MIDDLE**2 * sizes[0]
            middle = [] if few else [b for b in sizes if b <= _MIDDLE * sizes[0]]
            self.progress(f"searching {mesh} at {sizes[0]} to {sizes[-1]} sequences per data rank")
            try:
                if middle and self._choices(mesh, sizes[0]) > _LARGE:
                    middle = []
                chosen = dict.fromkeys((sizes[0], *middle[-1:], sizes[-1]))
                # larger ones have no placements that this has not
                least = min((b for b in sizes if b > 1), default=1)
                ends = tuple(self._end(mesh, b, least) for b in chosen)
            except UsageError as error:
                failure = error
                continue
            choices = self._choices(mesh, sizes[0])
            state = whole_state(self.poses.model, self.ask.recipe)
            model = self.poses.model
            between, common = between_layers(model), tied_bytes(model)
            return Shape(group, ends, self.setting.calls, between, choices, state, common)
        assert failure is not None
        raise failure

    def _choices(self, mesh: Mesh, each: int) -> int:
        """States of all variables. each: sequences per data rank."""
        return self.poses.of(mesh, each * data_ways(mesh), self.ask.pins, roughly=True).problem.choices

    def ranked(self, shape: Shape) -> list[Estimated]:
        """Configurations of a shape (see `rank`)."""
        ask = self.ask
        return rank(shape, self.total, self.poses.prices, self.setting, ask.budget, ask.recipe)

    def sizes(self, staged: Staged) -> Sequence[int]:
        """Possible microbatches, in sequences over the mesh."""
        if staged.batches:
            return staged.batches
        if self.ask.batch is None and staged.ranks == 1:
            return [self.poses.captured]
        return microbatch_sizes(staged.mesh, self.total)

    def _end(self, mesh: Mesh, each: int, least: int) -> End:
        """each: sequences per data rank; least: of the smallest microbatch with more than one."""
        ways = data_ways(mesh)
        posed = self.poses.priced(mesh, each * ways, self.ask.pins, least * ways)
        free = posed.free

        def lean(sending: bool) -> Way:
            """Placements to which half the activations are worth half the time.

            What parameters hold depends on the data ranks, which the mesh that is solved need not have.
            """
            setting = replace(self.setting, sending=sending)
            held = replace(free.setting, sending=sending).held(free.taken).activations
            price = free.seconds / held if held else 0.0
            placed = priced(posed.problem, setting, price, allowed=posed.allowed, limits=FINAL)
            return way_of(posed, placed)

        def least_bytes() -> float:
            return self._least_bytes(posed)

        def chain() -> tuple[float, ...]:
            return chain_of(posed, free)

        def floors_at(prices: Sequence[float], regimes: Sequence[Regime]) -> Array | None:
            return floors(posed, self.setting, prices, regimes, recompute=self.ask.recompute)

        def whole_at(how: Setting, prices: Sequence[float], exposures: Sequence[Exposure]) -> Array | None:
            return whole_floors(posed, how, prices, exposures, recompute=self.ask.recompute)

        def least_used() -> Parameters:
            return least_parameters(posed)

        def shared() -> float:
            return shared_seconds(self.poses.of(mesh, least * ways, self.ask.pins))

        return End(
            each,
            way_of(posed, free),
            _least_seconds(posed),
            mesh,
            free.lower_bound,
            lean,
            least_bytes,
            chain,
            floors_at,
            whole_at,
            least_used,
            shared,
        )

    def _least_bytes(self, posed: Posed) -> float:
        """Bytes that no placements go below, with everything computed again, but for what belongs to
        parameters, which depends on the data ranks."""
        setting = replace(self.setting, optimistic=self.ask.recompute)

        def weight(key: Bytes) -> float:
            return 0.0 if key.kind in OF_STATE else setting.bytes_weight(key)

        network = compose(posed.problem.terms, lambda key: 0.0, weight, posed.allowed)
        return least_cost(network.at_price(1.0), ROUGH, posed.problem.known.orders)


def _least_seconds(posed: Posed) -> float:
    """Seconds of computing and talking that no placements go below, for one microbatch."""
    network = compose(
        posed.problem.terms,
        lambda key: float(key.kind in ("work", "talk")),
        lambda key: 0.0,
        posed.allowed,
    )
    return least_cost(network, ROUGH, posed.problem.known.orders)
