"""What the parameters of a model take, by how placements use them: gathers, reductions, updates and bytes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cost.collective import seconds
from autoshard.cost.on_mesh import cost_model
from autoshard.cost.recipe import Recipe
from autoshard.cost.reshard import Share, StepKind
from autoshard.ir import DTYPES
from autoshard.ir.held import held_shape
from autoshard.placement import Layout, R, Shard, chunk
from autoshard.search.buckets import Shares
from autoshard.search.inline import gather_copies, reduce_copies
from autoshard.search.lives import GATHERED
from autoshard.search.network import Array
from autoshard.search.problem import MORE
from autoshard.search.problems import Posed
from autoshard.search.settle import Placed
from autoshard.search.terms import Bytes, Profile, Time
from autoshard.search.variables import ParamVar


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
    shares: tuple[Shares, ...]

    @cached_property
    def likeness(self) -> Hashable:
        """The same for parameters that are used alike."""
        arrays = (self.count, self.whole, self.base, self.split, self.width, self.phases)
        return self.shapes, self.shares, tuple(array.tobytes() for array in arrays)


def parameters_of(posed: Posed, placed: Placed) -> Parameters:
    """The parameters of a problem, in the layouts that its placements use."""
    rows = []
    shapes: list[tuple[int, ...]] = []
    shares: list[Shares] = []
    known = posed.model.shares
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
        shares.append(known[variable.place])
        shapes.append(held_shape(type_.shape, off_data, axes.mesh_sizes))
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
    return Parameters(count, whole, base, split, width, both, tuple(shapes), tuple(shares))


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


def zero_stages(given: Parameters, mesh: Mesh, cluster: Cluster, recipe: Recipe) -> list[Profile]:
    """What parameters take with ZeRO 3, 2 and 1 alike for all; data parallel if nothing is sharded."""
    links = cost_model(cluster, mesh).reshard.links
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

    def one(kind: StepKind, nbytes: Array, axes: Sequence[int], shares: Sequence[Share]) -> Array:
        """Of a member over some axes."""
        share = np.array([s.of(kind) for s in shares])
        return sum((share * seconds(kind, nbytes / share, links[k]) for k in axes), zeros)

    def sharded(shares: Sequence[Share]) -> tuple[Array, Array]:
        """A gather of all members, or the reduce-scatter that mirrors it; over data axes, and over others."""
        over_data = np.where((given.split < ways) & divides, one("all_gather", part, stored, shares), 0.0)
        inside = np.where(given.whole > MORE * part, one("all_gather", given.whole, inner, shares), 0.0)
        return given.count * over_data, given.count * inside

    def reduced(shares: Sequence[Share]) -> float:
        return float((sum(sharded(shares)) + given.count * one("all_reduce", own, spread, shares)).sum())

    gather, inside = sharded([s.gather for s in given.shares])
    gathered = given.whole > MORE * own
    bandwidth = cluster.device.memory_bandwidth
    shared = np.array([s.gather.other < 1 for s in given.shares], dtype=bool)
    unpacked = np.where(gathered & shared, gather_copies(own, given.whole, bandwidth), 0.0)
    bare = inside + given.count * unpacked
    sums_up = gathered | (given.split < ways * int(np.prod([mesh.sizes[k] for k in spread])))
    packed = float((given.count * np.where(sums_up, reduce_copies(given.whole, bandwidth), 0.0)).sum())
    reduce = reduced([s.reduce for s in given.shares])
    last = {Time("last", True): reduce}
    grad = recipe.gradient_bytes(1) if recipe.gradient is not None else given.width
    summed = np.array([recipe.sum_bytes(int(w)) for w in given.width])
    optimizer = recipe.optimizer_bytes(1) if recipe.optimizer is not None else 2 * given.width
    touched = recipe.update_bytes(1) if recipe.touched is not None else 7 * recipe.slower * given.width
    elements = given.count * own / given.width
    update = float((elements * touched).sum()) / cluster.device.memory_bandwidth
    shards = given.count * own if recipe.resident else 0.0
    state = float((shards + elements * (grad + optimizer)).sum())
    whole = given.count * given.whole
    copies = np.where(gathered, given.whole, 0.0)
    sums = float((elements * (summed - grad)).sum())
    windows = float((np.minimum(given.count, GATHERED) * copies).sum())
    fixed = {Time("update"): update}
    if not gathered.any():
        return [Profile({**fixed, **last, Time("once"): packed}, _held(state, sums))]
    forward, bare_forward = float(gather.sum()), float(bare.sum())
    both = given.phases > 1
    backward, bare_backward = float((gather * both).sum()), float((bare * both).sum())
    ahead = {Time("gather"): forward, Time("gather", True): backward, Time("inline"): bare_forward}
    first, each = {Time("first"): forward}, {Time("reduce", True): reduce}
    held = state + float((given.count * copies).sum())
    whole_sums = float((np.where(gathered, whole / given.width - elements, 0.0) * summed).sum())
    return [
        Profile(
            {**fixed, **ahead, **each, Time("inline", True): bare_backward + packed},
            {**_held(state, sums), Bytes("window"): windows},
        ),
        Profile(
            {**fixed, **first, **each, Time("inline", True): packed, Time("once"): bare_forward},
            _held(held, sums),
        ),
        Profile(
            {**fixed, **first, **last, Time("once"): bare_forward + packed},
            _held(held, sums + whole_sums),
        ),
    ]


def _held(state: float, sums: float) -> dict[Bytes, float]:
    return {Bytes("state"): state, Bytes("sums"): sums}


def _divides(size: int, ways: int) -> bool:
    """Whether a dim can be split over so many ranks."""
    return size % ways == 0 or (size >= ways and chunk(size, ways, ways - 1)[1] > 0)
