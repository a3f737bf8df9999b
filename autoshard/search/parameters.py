"""What the parameters of a model take, by how placements use them: gathers, reductions, updates and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cost.collective import AxisLink, seconds
from autoshard.cost.recipe import Recipe, added_bytes
from autoshard.cost.reshard import StepKind
from autoshard.ir import DTYPES
from autoshard.ir.held import held_shape
from autoshard.placement import Layout, R, Shard, chunk
from autoshard.search.buckets import Shares
from autoshard.search.inline import gather_copies, reduce_copies
from autoshard.search.lives import GATHERED
from autoshard.search.network import Array
from autoshard.search.problem import MORE, Model
from autoshard.search.problems import Posed
from autoshard.search.settle import Placed
from autoshard.search.terms import Bytes, Profile, Time
from autoshard.search.variables import ParamVar

Mask: TypeAlias = npt.NDArray[np.bool_]


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
    def likeness(self) -> str:
        """The same for parameters that are used alike; a text, which keeps its hash."""
        arrays = (self.count, self.whole, self.base, self.split, self.width, self.phases)
        return repr((self.shapes, self.shares, [array.tobytes() for array in arrays]))


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
        phases = {backward[name] for name, _ in posed.model.flow.targets.get(variable.place, ())}
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


def whole_state(model: Model, recipe: Recipe) -> float:
    """Bytes of all trained parameters with their gradients and optimizer, nothing of it split or repeated."""
    found = 0.0
    for group in model.flow.classes.values():
        if group.grads:
            type_ = group.first.type
            width = DTYPES[type_.dtype][1]
            found += (
                len(group.ports)
                * type_.numel
                * (_kept_width(recipe, width) + (width if recipe.resident else 0))
            )
    return found


def _kept_width(recipe: Recipe, width: float) -> float:
    """Bytes of the gradient and the optimizer's state of an element that takes ``width`` itself."""
    grad = recipe.gradient_bytes(1) if recipe.gradient is not None else width
    return grad + (recipe.optimizer_bytes(1) if recipe.optimizer is not None else 2 * width)


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


class Zero:
    """What parameters take on any mesh; what no mesh changes is worked out once. Arrays over classes."""

    def __init__(self, given: Parameters, cluster: Cluster, recipe: Recipe) -> None:
        self.given, self.traffic = given, cluster.device.traffic
        self._part = given.base / given.split
        self._gather = np.array([s.gather.of("all_gather") for s in given.shares])
        self._scatter = np.array([s.reduce.of("all_gather") for s in given.shares])
        self._reduce = np.array([s.reduce.of("all_reduce") for s in given.shares])
        width = given.width
        self._grad = recipe.gradient_bytes(1) if recipe.gradient is not None else width
        self._summed = np.array([recipe.sum_bytes(int(w)) for w in width])
        self._added = np.array([added_bytes(int(w)) for w in width])
        self._optimizer = recipe.optimizer_bytes(1) if recipe.optimizer is not None else 2 * width
        self._touched = recipe.update_bytes(1) if recipe.touched is not None else 7 * recipe.slower * width
        self._resident = recipe.resident
        self._packed = given.count * reduce_copies(given.whole, self.traffic)
        self._shared = np.array([s.gather.other < 1 for s in given.shares], dtype=bool)
        self._divided: dict[int, Mask] = {}

    def stages(self, mesh: Mesh, links: Sequence[AxisLink]) -> list[Profile]:
        """What they take with ZeRO 3, 2 and 1 alike for all; data parallel if nothing is sharded.

        links: of every axis. Without any stages if the mesh stores them in fewer parts than they are used in.
        """
        given, part = self.given, self._part
        stored = [k for k, a in enumerate(mesh.axes) if a.meaning.stores_sharded]
        spread = [
            k for k, a in enumerate(mesh.axes) if a.meaning.splits_batch and not a.meaning.stores_sharded
        ]
        ways = prod(mesh.sizes[k] for k in stored)
        if (given.split > ways).any():
            return []
        divides = self._divides(ways)
        own = given.base / np.where(divides, ways, given.split)
        inner = [k for k, a in enumerate(mesh.axes) if not a.meaning.splits_batch]
        zeros = np.zeros(len(own))

        def one(kind: StepKind, nbytes: Array, axes: Sequence[int], share: Array) -> Array:
            """Of a member over some axes."""
            return sum((share * seconds(kind, nbytes / share, links[k]) for k in axes), zeros)

        over_data, inside = (given.split < ways) & divides, given.whole > MORE * part

        def over_stored(share: Array) -> Array:
            """Over one axis after the other, the innermost last; not over those that divide it in use."""
            found, within = zeros, 1
            for k in reversed(stored):
                size = part / within * np.minimum(given.split, within)
                used = given.split >= within * mesh.sizes[k]
                found = found + np.where(used, 0.0, one("all_gather", size, [k], share))
                within *= mesh.sizes[k]
            return found

        def sharded(share: Array) -> tuple[Array, Array]:
            """A gather of all members, or the reduce-scatter that mirrors it; over data axes, and others."""
            found = given.count * np.where(over_data, over_stored(share), 0.0)
            if not inner:
                return found, zeros
            return found, given.count * np.where(inside, one("all_gather", given.whole, inner, share), 0.0)

        scattered = sharded(self._scatter)
        reduce = float((sum(scattered) + given.count * one("all_reduce", own, spread, self._reduce)).sum())
        last = {Time("last", True): reduce}
        elements = given.count * own / given.width
        update = float((elements * self._touched).sum()) / self.traffic
        shards = given.count * own if self._resident else 0.0
        state = float((shards + elements * (self._grad + self._optimizer)).sum())
        sums = float((elements * (self._summed - self._grad)).sum())
        adding = float((elements * self._added).sum()) / self.traffic
        fixed = {Time("update"): update, Time("sum"): adding}
        gathered = given.whole > MORE * own
        # gradients are sums of the batch's parts, and are packed, unless every rank has other parameters
        sums_up = gathered | (given.split < ways * prod(mesh.sizes[k] for k in spread))
        packed = float(np.where(sums_up, self._packed, 0.0).sum())
        if not gathered.any():
            return [Profile({**fixed, **last, Time("once"): packed}, _held(state, sums))]
        (gather, bare), whole = sharded(self._gather), given.count * given.whole
        unpacked = np.where(gathered & self._shared, gather_copies(own, given.whole, self.traffic), 0.0)
        bare = bare + given.count * unpacked
        copies = np.where(gathered, given.whole, 0.0)
        windows = float((np.minimum(given.count, GATHERED) * copies).sum())
        both = given.phases > 1
        forward, backward = float(gather.sum()), float((gather * both).sum())
        bare_forward, bare_backward = float(bare.sum()), float((bare * both).sum())
        ahead = {Time("gather"): forward, Time("gather", True): backward, Time("inline"): bare_forward}
        first, each = {Time("first"): forward}, {Time("reduce", True): reduce}
        held = state + float((given.count * copies).sum())
        more = np.where(gathered, whole / given.width - elements, 0.0)
        whole_sums = float((more * self._summed).sum())
        whole_adding = adding + float((more * self._added).sum()) / self.traffic
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
                {**fixed, **first, **last, Time("sum"): whole_adding, Time("once"): bare_forward + packed},
                _held(held, sums + whole_sums),
            ),
        ]

    def _divides(self, ways: int) -> Mask:
        """Classes of which every rank holds some; a shape that does not divide so is stored whole."""
        if ways not in self._divided:
            rows = [any(_divides(n, ways) for n in shape) for shape in self.given.shapes]
            self._divided[ways] = np.array(rows, dtype=bool)
        return self._divided[ways]


def _held(state: float, sums: float) -> dict[Bytes, float]:
    return {Bytes("state"): state, Bytes("sums"): sums}


def _divides(size: int, ways: int) -> bool:
    """Whether a dim can be split over so many ranks."""
    return size % ways == 0 or (size >= ways and chunk(size, ways, ways - 1)[1] > 0)
