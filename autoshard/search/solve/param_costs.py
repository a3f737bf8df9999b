"""What the parameters of a model take, by how placements use them: gathers, reductions, updates and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor, prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cost.collective import AxisLink, seconds
from autoshard.cost.recipe import Recipe, added_bytes
from autoshard.ir import DTYPES
from autoshard.ir.collectives import TransferKind
from autoshard.ir.flow import PortClass
from autoshard.ir.local_bytes import held_shape
from autoshard.ir.placement import Layout, R, Shard, chunk
from autoshard.search.problem.cost_terms import AssignmentCosts, Bytes, Time
from autoshard.search.problem.decisions import ParamState, ParamVar
from autoshard.search.problem.exposed_collectives import gather_copies, reduce_copies
from autoshard.search.problem.param_buckets import Shares
from autoshard.search.problem.param_strategies import GATHERED
from autoshard.search.problem.problem import MORE, Model
from autoshard.search.solve.formulate import ShardingProblem
from autoshard.search.solve.solve_placements import PlacementSolution
from autoshard.solver.network import Array

Mask: TypeAlias = npt.NDArray[np.bool_]
#: into so many steps parts of gathers are rounded, so that many meshes have the same
_TIES = 2


@dataclass(frozen=True)
class Parameters:
    """The trained parameters of a shape, as they are used. Arrays over classes.

    count: members. whole: bytes of one member in use. base: as stored, were it not split over data ranks.
    split: over how many of the data ranks its use is split, which need no gather. width: bytes per element.
    phases: how many of forward and backward use it. most: bytes of one member in the use that takes most.
    shapes: that one member may have as stored, but for data ranks. least: whether every other figure is the
    least of any use, not all of them of the same.
    """

    count: Array
    whole: Array
    base: Array
    split: Array
    width: Array
    phases: Array
    most: Array
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    shares: tuple[Shares, ...]
    least: bool = False

    @cached_property
    def likeness(self) -> str:
        """The same for parameters that are used alike; a text, which keeps its hash."""
        arrays = (self.count, self.whole, self.base, self.split, self.width, self.phases, self.most)
        return repr((self.shapes, self.shares, [array.tobytes() for array in arrays]))


def parameters_of(formulated: ShardingProblem, placements: PlacementSolution) -> Parameters:
    """The parameters of a problem, in the layouts that its placements use."""
    return _parameters(formulated, lambda number, variable: (variable.states[placements.states[number]],))


def least_parameters(formulated: ShardingProblem) -> Parameters:
    """The same, each with the least of every figure over all its states."""
    return replace(_parameters(formulated, lambda _, variable: variable.states), least=True)


def _parameters(
    formulated: ShardingProblem, strategies: Callable[[int, ParamVar], Sequence[ParamState]]
) -> Parameters:
    """lives: that a parameter may have, by its number and variable."""
    rows = []
    shapes: list[tuple[tuple[int, ...], ...]] = []
    shares: list[Shares] = []
    axes, prices = formulated.problem.axes, formulated.prices
    for number, variable, group, phases in _trained(formulated):
        type_ = group.first.type
        chosen = strategies(number, variable)
        uses = dict.fromkeys(strategy.use for strategy in chosen)
        stored = dict.fromkeys(_off_data(strategy.stored, formulated) for strategy in chosen)
        wholes = [prices.ops.local_bytes(type_, use, axes.sizes) for use in uses]
        base = min(prices.params.local_bytes(type_, lay, axes.mesh_sizes) for lay in stored)
        shares.append(formulated.model.shares[variable.place])
        shapes.append(tuple(dict.fromkeys(held_shape(type_.shape, lay, axes.mesh_sizes) for lay in stored)))
        split = max(_data_ways(use, formulated) for use in uses)
        width = DTYPES[type_.dtype][1]
        rows.append((len(group.ports), min(wholes), base, split, width, phases, max(wholes)))
    table = np.array(rows, dtype=np.float64).reshape(-1, 7)
    count, full, base_, split_, widths, both, most = table.T
    return Parameters(count, full, base_, split_, widths, both, most, tuple(shapes), tuple(shares))


def _trained(formulated: ShardingProblem) -> Iterator[tuple[int, ParamVar, PortClass, int]]:
    """(number of the variable, variable, class, how many of forward and backward use it)."""
    flow, backward = formulated.model.flow, formulated.model.folded.is_backward()
    for number, variable in enumerate(formulated.problem.variables):
        if isinstance(variable, ParamVar) and flow.classes[variable.place].grads:
            phases = {backward[name] for name, _ in flow.targets.get(variable.place, ())}
            yield number, variable, flow.classes[variable.place], len(phases)


@dataclass(frozen=True, eq=False)
class ParamUseCosts:
    """What a use of parameters adds to the least that they take, by state of a variable, [states] each.

    keep: whether copies last for the step. gather: seconds over axes inside layers, of all members. gathers:
    of a microbatch, for forward and for backward, if they use it. copies: bytes. sums: of gradients that
    microbatches add up before they are reduced.
    """

    keep: Mask
    gather: Array
    gathers: Array
    copies: Array
    sums: Array


def added_by_use(formulated: ShardingProblem) -> dict[int, ParamUseCosts]:
    """By number of the variable, where a use adds anything."""
    axes, prices = formulated.problem.axes, formulated.prices
    inner = [k for k, m in enumerate(axes.mesh_meanings) if not m.splits_batch]
    costs: dict[int, ParamUseCosts] = {}
    for number, variable, group, phases in _trained(formulated):
        type_, count = group.first.type, len(group.ports)
        used = {u: prices.ops.local_bytes(type_, u, axes.sizes) for u in {s.use for s in variable.states}}
        lays = {s.stored: _off_data(s.stored, formulated) for s in variable.states}
        kept = {s: prices.params.local_bytes(type_, lay, axes.mesh_sizes) for s, lay in lays.items()}
        full = np.array([used[s.use] for s in variable.states])
        base = np.array([kept[s.stored] for s in variable.states])
        larger = full > MORE * base
        if not larger.any() or not inner:
            continue
        share = formulated.model.shares[variable.place].gather.of("all_gather")
        link = [prices.params.reshard.links[k] for k in inner]
        took = {
            n: max(share * float(seconds("all_gather", n / share, x)) for x in link) for n in used.values()
        }
        gather = np.where(larger, [count * took[used[s.use]] for s in variable.states], 0.0)
        keep = np.array([s.keep for s in variable.states], dtype=bool)
        late = np.array([s.keep and s.late for s in variable.states], dtype=bool)
        width, more = DTYPES[type_.dtype][1], count * (full - full.min())
        sums = np.where(late, more / width * prices.recipe.sum_bytes(width), 0.0)
        costs[number] = ParamUseCosts(keep, gather, phases * gather, more, sums)
    return costs


def whole_state(model: Model, recipe: Recipe) -> float:
    """Bytes of all trained parameters with their gradients and optimizer, nothing of it split or repeated."""
    total = 0.0
    for group in model.flow.classes.values():
        if group.grads:
            type_ = group.first.type
            width = DTYPES[type_.dtype][1]
            total += (
                len(group.ports)
                * type_.numel
                * (_kept_width(recipe, width) + (width if recipe.resident else 0))
            )
            total += len(group.ports) * recipe.of(group.first).owned_bytes(group.first)
    return total


def _kept_width(recipe: Recipe, width: float) -> float:
    """Bytes of the gradient and the optimizer's state of an element that takes ``width`` itself."""
    grad = recipe.gradient_bytes(1) if recipe.gradient is not None else width
    return grad + (
        recipe.optimizer_bytes(1) if recipe.optimizer is not None else recipe.sharded_moments * width
    )


def _off_data(stored: Layout, formulated: ShardingProblem) -> Layout:
    """The layout of a stored parameter, were it whole on every data rank."""
    meanings = formulated.problem.axes.mesh_meanings
    return tuple(R if m.splits_batch else p for p, m in zip(stored, meanings, strict=True))


def _data_ways(use: Layout, formulated: ShardingProblem) -> float:
    """Over how many of the ranks that split the batch a parameter in use is split."""
    axes = formulated.problem.axes
    ways = 1
    for placement, size, meaning in zip(use, axes.sizes, axes.meanings, strict=True):
        if meaning.splits_batch and isinstance(placement, Shard):
            ways *= size
    return float(ways)


@dataclass(frozen=True, eq=False)
class StrategyCosts:
    """What classes of parameters take in one stage of ZeRO: seconds and bytes by kind, [classes] each."""

    seconds: Mapping[Time, Array]
    bytes: Mapping[Bytes, Array]


class Zero:
    """What parameters take on any mesh; what no mesh changes is worked out once. Arrays over classes."""

    def __init__(self, given: Parameters, cluster: Cluster, recipe: Recipe) -> None:
        self.given, self.traffic = given, cluster.device.traffic
        self._part = (np.minimum(given.base, given.whole) if given.least else given.base) / given.split
        self._gather = np.array([s.gather.of("all_gather") for s in given.shares])
        self._scatter = np.array([s.reduce.of("all_gather") for s in given.shares])
        self._reduce = np.array([s.reduce.of("all_reduce") for s in given.shares])
        width = given.width
        self._grad = recipe.gradient_bytes(1) if recipe.gradient is not None else width
        self._summed = np.array([recipe.sum_bytes(int(w)) for w in width])
        self._added = np.array([added_bytes(int(w)) for w in width])
        self._optimizer = (
            recipe.optimizer_bytes(1) if recipe.optimizer is not None else recipe.sharded_moments * width
        )
        self._touched = (
            recipe.update_bytes(1) if recipe.touched is not None else recipe.accesses * recipe.slower * width
        )
        self._resident = recipe.resident
        self._packed = given.count * reduce_copies(given.whole, self.traffic)
        self._shared = np.array([s.gather.other < 1 for s in given.shares], dtype=bool)
        self._divided: dict[int, tuple[Mask, Mask]] = {}

    def stages(self, mesh: Mesh, links: Sequence[AxisLink]) -> list[AssignmentCosts]:
        """What they take with ZeRO 3, 2 and 1 alike for all; data parallel if nothing is sharded.

        links: of every axis. Without any stages if the mesh stores them in fewer parts than they are used in.
        """
        return [
            AssignmentCosts(
                {k: float(each.sum()) for k, each in strategy_costs.seconds.items()},
                {k: float(each.sum()) for k, each in strategy_costs.bytes.items()},
            )
            for strategy_costs in self.strategy_costs(mesh, links)
        ]

    def strategy_costs(self, mesh: Mesh, links: Sequence[AxisLink]) -> list[StrategyCosts]:
        """The same by class. Of the least of every figure, nothing that any way to use or to store a class
        would save."""
        given, part = self.given, self._part
        stored = [k for k, a in enumerate(mesh.axes) if a.meaning.stores_sharded]
        spread = [
            k for k, a in enumerate(mesh.axes) if a.meaning.splits_batch and not a.meaning.stores_sharded
        ]
        ways = prod(mesh.sizes[k] for k in stored)
        if not given.least and (given.split > ways).any():
            return []
        divides, may = self._divides(ways)
        own = given.base / np.where(divides, ways, given.split)
        inner = [k for k, a in enumerate(mesh.axes) if not a.meaning.splits_batch]
        zeros = np.zeros(len(own))

        def one(kind: TransferKind, nbytes: Array, axes: Sequence[int], share: Array) -> Array:
            """Of a member over some axes."""
            return sum((share * seconds(kind, nbytes / share, links[k]) for k in axes), zeros)

        over_data, inside = (given.split < ways) & divides, given.whole > MORE * part
        if given.least:
            # what is used in parts, or need not be split, may have no one to gather it from
            over_data, inside = over_data & (given.split == 1) & ~may, inside & False
            own = np.where(divides | may | (given.split > 1), given.base / ways, own)

        def over_stored(share: Array) -> Array:
            """Over one axis after the other, the innermost last; not over those that divide it in use."""
            terms, within = zeros, 1
            for k in reversed(stored):
                size = part / within * np.minimum(given.split, within)
                used = given.split >= within * mesh.sizes[k]
                terms = terms + np.where(used, 0.0, one("all_gather", size, [k], share))
                within *= mesh.sizes[k]
            return terms

        def sharded(share: Array) -> tuple[Array, Array]:
            """A gather of all members, or the reduce-scatter that mirrors it; over data axes, and others."""
            terms = given.count * np.where(over_data, over_stored(share), 0.0)
            if not inner:
                return terms, zeros
            return terms, given.count * np.where(inside, one("all_gather", given.whole, inner, share), 0.0)

        scattered = sharded(self._scatter)
        reduce = sum(scattered) + given.count * one("all_reduce", own, spread, self._reduce)
        last = {Time("last", True): reduce}
        elements = given.count * own / given.width
        update = elements * self._touched / self.traffic
        shards = given.count * own if self._resident else zeros
        state = shards + elements * (self._grad + self._optimizer)
        sums = elements * (self._summed - self._grad)
        adding = elements * self._added / self.traffic
        fixed = {Time("update"): update, Time("sum"): adding}
        gathered = over_data if given.least else given.whole > MORE * own
        # gradients are sums of the batch's parts, and are packed, unless every rank has other parameters
        sums_up = gathered | (given.split < ways * prod(mesh.sizes[k] for k in spread))
        packed = np.where(sums_up & (gathered | (not given.least)), self._packed, 0.0)
        if not gathered.any() and not given.least:
            return [StrategyCosts({**fixed, **last, Time("once"): packed}, _held(state, sums))]
        (gather, bare), full = sharded(self._gather), given.count * given.whole
        unpacked = np.where(gathered & self._shared, gather_copies(own, given.whole, self.traffic), 0.0)
        bare = bare + given.count * unpacked
        copies = np.where(gathered, given.whole, 0.0)
        windows = np.minimum(given.count, GATHERED) * copies
        both = given.phases > 1
        first, each = {Time("first"): gather}, {Time("reduce", True): reduce}
        ahead = {Time("gather"): gather, Time("gather", True): gather * both, Time("inline"): bare}
        held = state + given.count * copies
        more = np.where(gathered, full / given.width - elements, 0.0)
        full_sums = more * self._summed
        full_adding = adding + more * self._added / self.traffic
        return [
            StrategyCosts(
                {**fixed, **ahead, **each, Time("inline", True): bare * both + packed},
                {**_held(state, sums), Bytes("window"): windows},
            ),
            StrategyCosts(
                {**fixed, **first, **each, Time("inline", True): packed, Time("once"): bare},
                _held(held, sums),
            ),
            StrategyCosts(
                {**fixed, **first, **last, Time("sum"): full_adding, Time("once"): bare + packed},
                _held(held, sums + full_sums),
            ),
        ]

    def ties(self, mesh: Mesh, links: Sequence[AxisLink], shown: float) -> float:
        """Part of the gathers of the whole over axes inside layers that a use adds at least, in steps.

        Where parameters are gathered over data axes first that is all of it. The other way round more would
        travel over data axes, at a part ``shown`` of its seconds, and that may be less.
        """
        given = self.given
        stored = [k for k, a in enumerate(mesh.axes) if a.meaning.stores_sharded]
        inner = [k for k, a in enumerate(mesh.axes) if not a.meaning.splits_batch and a.size > 1]
        larger = given.most > MORE * self._part
        if not inner or not larger.any():
            return 1.0
        if len(stored) > 1 or len(inner) > 1:
            return 0.0
        share = np.array([s.gather.of("all_gather") for s in given.shares])[larger]

        def took(nbytes: Array, axis: int) -> Array:
            return np.asarray(share * seconds("all_gather", nbytes[larger] / share, links[axis]))

        inside = took(given.most, inner[0])
        instead = [shown * (took(given.most, k) - took(self._part, k)) / inside for k in stored]
        least = min((float(each.min()) for each in instead), default=1.0)
        return floor(_TIES * min(1.0, max(0.0, least))) / _TIES

    def _divides(self, ways: int) -> tuple[Mask, Mask]:
        """Classes of which every rank holds some, however they are stored, and those of which that depends
        on how; a shape that does not divide so is stored whole."""
        if ways not in self._divided:
            rows = [
                [any(_divides(n, ways) for n in shape) for shape in shapes] for shapes in self.given.shapes
            ]
            every, some = [all(row) for row in rows], [any(row) and not all(row) for row in rows]
            self._divided[ways] = np.array(every, dtype=bool), np.array(some, dtype=bool)
        return self._divided[ways]


def _held(state: Array, sums: Array) -> dict[Bytes, Array]:
    return {Bytes("state"): state, Bytes("sums"): sums}


def _divides(size: int, ways: int) -> bool:
    """Whether a dim can be split over so many ranks."""
    return size % ways == 0 or (size >= ways and chunk(size, ways, ways - 1)[1] > 0)
