"""Which configurations are worth solving exactly: an estimate for each, and a bound that no plan beats.

Two exact solutions per shape of the mesh, at the smallest and the largest microbatch, give everything else
by interpolation. What is least over all placements is concave in the batch (a least of sums of concave
costs), so the chord between the two is a lower bound for every microbatch between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TypeVar

import numpy as np

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cost.collective import seconds
from autoshard.cost.on_mesh import cost_model
from autoshard.cost.recipe import Recipe
from autoshard.ir import DTYPES
from autoshard.placement import Layout, R, Shard, chunk, local_shape
from autoshard.search.again import fill
from autoshard.search.lives import GATHERED
from autoshard.search.network import Array
from autoshard.search.problems import Posed
from autoshard.search.setting import Setting
from autoshard.search.settle import Placed
from autoshard.search.terms import Bytes, Profile, Time
from autoshard.search.variables import ParamVar

K = TypeVar("K")
#: bytes that differ by less are the same, but for uneven parts
_MORE = 1.01


@dataclass(frozen=True)
class Configuration:
    """A mesh and a number of microbatches. batch: sequences of one microbatch over the whole mesh."""

    mesh: Mesh
    batch: int
    microbatches: int


@dataclass(frozen=True)
class Estimated:
    """A configuration with an estimated setting and seconds, and a lower bound in seconds."""

    configuration: Configuration
    setting: Setting
    seconds: float
    bound: float


@dataclass(frozen=True)
class Parameters:
    """The trained parameters of a shape, as they are used. Arrays over classes.

    count: members. whole: bytes of one member in use. base: as stored, were it not split over data ranks.
    split: over how many of the data ranks its use is split, which need no gather. width: bytes per element.
    phases: how many of forward and backward use it. shapes: of one member, as stored but for data ranks.
    """

    count: Array
    whole: Array
    base: Array
    split: Array
    width: Array
    phases: Array
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Way:
    """Placements of everything: what they take, and how they use the parameters."""

    taken: Profile
    parameters: Parameters


@dataclass(frozen=True)
class End:
    """One microbatch solved exactly.

    batch: sequences over the mesh. free: the fastest placements. seconds: that computing and talking take at
    least. find_lean: makes placements that hold less. find_bytes: says what is held at least, with everything
    computed again. Both are asked only where memory is short.
    """

    batch: int
    free: Way
    seconds: float
    find_lean: Callable[[], Way]
    find_bytes: Callable[[], float]

    @cached_property
    def lean(self) -> Way:
        return self.find_lean()

    @cached_property
    def bytes(self) -> float:
        return self.find_bytes()


@dataclass(frozen=True)
class Shape:
    """Meshes that differ only in how the data axes are divided, solved at two microbatches.

    low, high: its ends.
    """

    meshes: tuple[Mesh, ...]
    low: End
    high: End

    def free(self, batch: int) -> Profile:
        """The fastest placements, interpolated between the two ends, without what belongs to parameters."""
        return self._between(batch, self.low.free, self.high.free)

    def lean(self, batch: int) -> Profile:
        """The same for those that hold less."""
        return self._between(batch, self.low.lean, self.high.lean)

    def seconds(self, batch: int) -> float:
        """Seconds that one microbatch takes at least."""
        return self.low.seconds + self._place(batch) * (self.high.seconds - self.low.seconds)

    def bytes(self, batch: int) -> float:
        """Bytes that are held at least."""
        return self.low.bytes + self._place(batch) * (self.high.bytes - self.low.bytes)

    def _between(self, batch: int, low: Way, high: Way) -> Profile:
        t = self._place(batch)
        times = _mixed(low.taken.seconds, high.taken.seconds, t)
        held = _mixed(low.taken.bytes, high.taken.bytes, t)
        return Profile(
            {k: v for k, v in times.items() if k.kind in ("work", "talk")},
            {k: v for k, v in held.items() if k.kind != "state"},
        )

    def _place(self, batch: int) -> float:
        width = self.high.batch - self.low.batch
        return (batch - self.low.batch) / width if width else 0.0


def way_of(posed: Posed, placed: Placed) -> Way:
    """What is worth knowing of placements."""
    return Way(placed.taken, _parameters_of(posed, placed))


def _parameters_of(posed: Posed, placed: Placed) -> Parameters:
    """The parameters of a problem, in the layouts that its placements use."""
    rows = []
    shapes: list[tuple[int, ...]] = []
    axes = posed.problem.axes
    groups = posed.model.flow.classes
    backward = posed.model.folded.is_backward()
    for variable, state in zip(posed.problem.variables, placed.states, strict=True):
        if not isinstance(variable, ParamVar):
            continue
        group = groups[variable.place]
        if not group.grads:
            continue
        life = variable.states[state]
        type_ = group.first.type
        phases = {backward[t[0]] for s, t in posed.model.flow.edges if s == variable.place}
        off_data = _off_data(life.stored, posed)
        shapes.append(local_shape(type_.shape, off_data, axes.mesh_sizes, (0,) * len(axes.mesh_sizes)))
        rows.append(
            (
                len(group.ports),
                posed.prices.ops.local_bytes(type_, life.use, axes.sizes),
                posed.prices.params.local_bytes(type_, off_data, axes.mesh_sizes),
                _data_ways(life.use, posed),
                DTYPES[type_.dtype][1],
                len(phases),
            )
        )
    table = np.array(rows, dtype=np.float64).reshape(-1, 6)
    count, whole, base, split, width, both = table.T
    return Parameters(count, whole, base, split, width, both, tuple(shapes))


def _off_data(stored: Layout, posed: Posed) -> Layout:
    """The layout of a stored parameter, were it whole on every data rank."""
    meanings = posed.problem.axes.mesh_meanings
    return tuple(R if m.splits_batch else p for p, m in zip(stored, meanings, strict=True))


def _data_ways(use: Layout, posed: Posed) -> float:
    """Over how many of the ranks that split the batch a parameter in use is split."""
    axes = posed.problem.axes
    ways = 1
    for placed, size, meaning in zip(use, axes.sizes, axes.meanings, strict=True):
        if meaning.splits_batch and isinstance(placed, Shard):
            ways *= size
    return float(ways)


def rank(
    shape: Shape, total: int, cluster: Cluster, setting: Setting, budget: float | None, recipe: Recipe
) -> list[Estimated]:
    """All configurations of a shape that may fit, for a global batch of ``total`` sequences.

    Where the fastest placements do not fit as they are, those that hold less are looked at, too. One that
    seems not to fit, without that being proven, has infinite estimated seconds.
    """
    found = []
    for mesh in shape.meshes:
        lives = _Lives(shape, mesh, cluster, recipe)
        only = [shape.low.batch] if shape.low.batch == shape.high.batch else []
        for batch in only or microbatch_sizes(mesh, total):
            if not shape.low.batch <= batch <= shape.high.batch:
                continue
            how = replace(setting, microbatches=total // batch)
            bound = how.microbatches * shape.seconds(batch)
            best = _best(shape.free(batch), lives.free, how, budget)
            if budget is not None and (best is None or best[0].recompute):
                lean = _best(shape.lean(batch), lives.lean, how, budget)
                best = min((b for b in (best, lean) if b is not None), key=lambda b: b[1], default=None)
            where = Configuration(mesh, batch, how.microbatches)
            if best is not None:
                found.append(Estimated(where, *best, min(bound, best[1])))
            elif budget is not None and shape.bytes(batch) <= budget:
                found.append(Estimated(where, how, inf, bound))
    return found


class _Lives:
    """What the parameters of a shape may take on one mesh, for either of its placements."""

    def __init__(self, shape: Shape, mesh: Mesh, cluster: Cluster, recipe: Recipe) -> None:
        self._shape, self._on = shape, (mesh, cluster, recipe)

    @cached_property
    def free(self) -> list[Profile]:
        return _lives(self._shape.low.free.parameters, *self._on)

    @cached_property
    def lean(self) -> list[Profile]:
        return _lives(self._shape.low.lean.parameters, *self._on)


def _best(
    bare: Profile, lives: Sequence[Profile], how: Setting, budget: float | None
) -> tuple[Setting, float] | None:
    """(setting, seconds of a step) of the fastest way that fits, or None."""
    best: tuple[Setting, float] | None = None
    for extra in lives:
        taken = Profile({**bare.seconds, **extra.seconds}, {**bare.bytes, **extra.bytes})
        filled = how if budget is None else fill(taken, how, budget)
        if filled is not None:
            time = filled.step(taken).total
            if best is None or time < best[1]:
                best = (filled, time)
    return best


def microbatch_sizes(mesh: Mesh, total: int) -> list[int]:
    """Sequences per microbatch over the whole mesh that divide the global batch evenly."""
    ways = data_ways(mesh)
    if total % ways:
        return []
    each = total // ways
    return [ways * b for b in range(1, each + 1) if each % b == 0]


def data_ways(mesh: Mesh) -> int:
    """How many ranks split the batch."""
    ways = 1
    for axis in mesh.axes:
        ways *= axis.size if axis.meaning.splits_batch else 1
    return ways


def _lives(given: Parameters, mesh: Mesh, cluster: Cluster, recipe: Recipe) -> list[Profile]:
    """What parameters take with ZeRO 3, 2 and 1 alike for all; data parallel if nothing is sharded."""
    links = cost_model(cluster, mesh).bucketed.links
    stored = [k for k, a in enumerate(mesh.axes) if a.meaning.stores_sharded]
    spread = [k for k, a in enumerate(mesh.axes) if a.meaning.splits_batch and not a.meaning.stores_sharded]
    ways = int(np.prod([mesh.sizes[k] for k in stored]))
    if (given.split > ways).any():
        return []  # used in more parts than this mesh stores them in
    # a shape that does not divide so that every rank holds some of it is stored whole
    divides = np.array([any(_divides(n, ways) for n in shape) for shape in given.shapes], dtype=bool)
    own, part = given.base / np.where(divides, ways, given.split), given.base / given.split
    zeros = np.zeros(len(own))
    inner = [k for k, a in enumerate(mesh.axes) if not a.meaning.splits_batch]
    over_data = sum((seconds("all_gather", part, links[k]) for k in stored), zeros)
    inside = sum((seconds("all_gather", given.whole, links[k]) for k in inner), zeros)
    gather = given.count * (
        np.where((given.split < ways) & divides, over_data, 0.0)
        + np.where(given.whole > _MORE * part, inside, 0.0)
    )
    gathered = given.whole > _MORE * own
    reduce = gather + given.count * sum((seconds("all_reduce", own, links[k]) for k in spread), zeros)
    grad = recipe.gradient_bytes(1) if recipe.gradient is not None else given.width
    optimizer = recipe.optimizer_bytes(1) if recipe.optimizer is not None else 2 * given.width
    touched = recipe.update_bytes(1) if recipe.touched is not None else 7 * given.width
    elements = given.count * own / given.width
    update = float((elements * touched).sum()) / cluster.device.memory_bandwidth
    state = float((given.count * own + elements * (grad + optimizer)).sum())
    whole = given.count * given.whole
    copies = np.where(gathered, given.whole, 0.0)
    windows = float((np.minimum(given.count, GATHERED) * copies).sum())
    fixed = {Time("update"): update}
    if not gathered.any():
        return [Profile({**fixed, Time("last", True): float(reduce.sum())}, {Bytes("state"): state})]
    forward, backward = float(gather.sum()), float((gather * (given.phases > 1)).sum())
    ahead = {Time("gather"): forward, Time("gather", True): backward}
    first = {Time("first"): forward}
    each, once = {Time("reduce", True): float(reduce.sum())}, {Time("last", True): float(reduce.sum())}
    held = state + float((given.count * copies).sum())
    full_grads = float((np.where(gathered, whole / given.width - elements, 0.0) * grad).sum())
    return [
        Profile({**fixed, **ahead, **each}, {Bytes("state"): state + windows}),
        Profile({**fixed, **first, **each}, {Bytes("state"): held}),
        Profile({**fixed, **first, **once}, {Bytes("state"): held + full_grads}),
    ]


def _divides(size: int, ways: int) -> bool:
    """Whether a dim can be split over so many ranks."""
    return size % ways == 0 or (size >= ways and chunk(size, ways, ways - 1)[1] > 0)


def _mixed(a: Mapping[K, float], b: Mapping[K, float], t: float) -> dict[K, float]:
    return {k: (1 - t) * a.get(k, 0.0) + t * b.get(k, 0.0) for k in dict.fromkeys((*a, *b))}


def shapes_of(meshes: Sequence[Mesh], owners: int = 0) -> list[tuple[Mesh, ...]]:
    """Meshes that differ only in how the data axes are divided, together; most sharded first.

    owners: how many experts there are that an axis of stored parameters may divide, 0 for none. Then only
    the mesh that divides them furthest is kept, beside the one that stores everything whole, since gathering
    experts costs far more.
    """
    groups: dict[object, list[Mesh]] = {}
    for mesh in meshes:
        rest = tuple((a.name, a.size) for a in mesh.axes if not a.meaning.splits_batch)
        groups.setdefault((data_ways(mesh), rest), []).append(mesh)
    found: list[tuple[Mesh, ...]] = []
    for group in groups.values():
        ordered = sorted(group, key=lambda m: -_sharded(m))
        alone = next((m for m in ordered if owners and owners % _sharded(m) == 0), None)
        whole = [m for m in ordered if _sharded(m) == 1 and m != alone]
        found.append(tuple(ordered) if alone is None else (alone, *whole))
    return found


def _sharded(mesh: Mesh) -> int:
    ways = 1
    for axis in mesh.axes:
        ways *= axis.size if axis.meaning.stores_sharded else 1
    return ways
