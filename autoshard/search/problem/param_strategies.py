"""The strategies that a parameter may have: how it is stored, gathered and reduced, and what each costs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isfinite, prod

import numpy as np

from autoshard.cost.orthogonal import owner_seconds
from autoshard.cost.recipe import Recipe, added_bytes
from autoshard.cost.reshard import ReshardTable, Share
from autoshard.ir import DTYPES, TensorType
from autoshard.ir.flow import PortClass
from autoshard.ir.placement import Layout, R, Shard, is_even
from autoshard.search.problem.cost_terms import Bytes, Time
from autoshard.search.problem.decisions import ParamState
from autoshard.search.problem.exposed_collectives import bare_gather, gather_copies, is_reduced, reduce_copies
from autoshard.search.problem.problem_prices import Prices
from autoshard.search.problem.search_axes import SearchAxes
from autoshard.solver.network import Array

#: a shard that needs padding or a copy to gather is as fast, but simpler is better
TIE = 1e-10
#: layers whose parameters are gathered at once: the one that computes and the one that is fetched
GATHERED = 2
#: copies of a layer's gradients while they are reduced: as they were made, and packed as they are sent
SENT = 2


@dataclass(frozen=True)
class ParamStrategies:
    """States of one class of parameters with their seconds and bytes, over all its members."""

    states: tuple[ParamState, ...]
    seconds: dict[Time, Array]
    held: dict[Bytes, Array]


def strategies_of(
    group: PortClass,
    stored: Sequence[Layout],
    uses: Sequence[Layout],
    phases: Collection[bool],
    axes: SearchAxes,
    prices: Prices,
    share: Share,
) -> ParamStrategies:
    """Every way to store (on the mesh) and use (on the search's axes) a class of parameters.

    phases: whether forward, backward or both use it. share: of a member in the messages that gather it.
    """
    type_, recipe = group.first.type, prices.recipe.of(group.first)
    trained = group.first.kind == "param" and bool(group.grads)
    width = DTYPES[type_.dtype][1]
    #: moved per element to add a gradient to those of the microbatches before
    added = added_bytes(DTYPES[group.first.stored_dtype][1]) if trained else 0
    table = prices.params.reshard.table(type_, [*stored, *(axes.to_mesh(u) for u in uses)], share)
    states: list[ParamState] = []
    gathers: list[float] = []
    inline: list[float] = []
    packed: list[float] = []
    held: list[float] = []
    windows: list[float] = []
    sums: list[float] = []
    adding: list[float] = []
    updates: list[float] = []
    links = prices.params.reshard.links
    by_owner = owner_seconds(recipe, type_, prices.params.device, links) if trained else 0.0
    owned = recipe.owned_bytes(group.first) / prod(link.size for link in links) if trained else 0.0
    used = [(u, axes.to_mesh(u), prices.ops.local_bytes(type_, u, axes.sizes)) for u in uses]
    sizes, meanings, bandwidth = axes.mesh_sizes, axes.mesh_meanings, prices.params.device.traffic
    for s in stored:
        own = prices.params.local_bytes(type_, s, axes.mesh_sizes)
        for u, on_mesh, full in used:
            ways = table
            if not _direct(table, s, on_mesh):
                # the program goes by no layout that is neither how it is stored nor how it is used
                ways = prices.params.reshard.table(type_, [s, on_mesh], share)
            row = ways.seconds[ways.index[s]]
            once = row.item(ways.index[on_mesh])
            if not isfinite(once):
                continue
            bare = bare_gather(s, on_mesh, row, ways, meanings)
            # what travels alone is copied if its own layouts need it, which the table has
            copies = gather_copies(own, full, bandwidth) if full > own and share.other < 1 else 0.0
            sums_up = trained and (full > own or is_reduced(on_mesh, sizes, meanings))
            packs = reduce_copies(full, bandwidth) if sums_up else 0.0
            for keep, late in _ways(gathered=full > own, trained=trained):
                states.append(ParamState(s, u, keep, late))
                gathers.append(once - bare)
                inline.append(bare + copies)
                packed.append(packs)
                state = _bytes(type_, own, full * keep, trained, len(group.ports), recipe)
                held.append(state + len(group.ports) * owned)
                windows.append(min(len(group.ports), GATHERED) * full * (full > own and not keep))
                sums.append(_sums(type_, own, full, keep and late, len(group.ports), recipe))
                adding.append((full if keep and late else own) / width * added / bandwidth)
                update = _update(type_, own, trained, recipe, bandwidth) + by_owner
                updates.append(update + _tie(type_, s, axes, full > own))
    count = len(group.ports)
    costs, waits, packing = (count * np.array(taken) for taken in (gathers, inline, packed))
    keeps = np.array([s.keep for s in states], dtype=bool)
    lates = np.array([s.late for s in states], dtype=bool)
    times = {Time("update"): count * np.array(updates), Time("first"): np.where(keeps, costs, 0.0)}
    times |= {Time("gather", phase): np.where(keeps, 0.0, costs) for phase in phases}
    each = {phase: np.where(keeps, 0.0, waits) for phase in phases}
    each[True] = each.get(True, np.zeros(len(states))) + np.where(lates, 0.0, packing)
    times |= {Time("inline", phase): taken for phase, taken in each.items() if taken.any()}
    alone = np.where(keeps, waits, 0.0) + np.where(lates, packing, 0.0)
    if alone.any():
        times[Time("once")] = alone
    bytes_ = {Bytes("state"): np.array(held)}
    if any(windows):
        bytes_[Bytes("window")] = np.array(windows)
    if trained:
        bytes_[Bytes("sums")] = np.array(sums)
        times[Time("sum")] = count * np.array(adding)
    return ParamStrategies(tuple(states), times, bytes_)


def _direct(table: ReshardTable, stored: Layout, used: Layout) -> bool:
    """Whether the cheapest way between two layouts has no placement on any axis that neither has."""
    at, goal = table.index[stored], table.index[used]
    while at != goal and isfinite(table.seconds.item(at, goal)):
        at = table.hop.item(at, goal)
        between = zip(table.layouts[at], stored, used, strict=True)
        if any(p not in (s, u, R) for p, s, u in between):
            return False
    return True


def _ways(*, gathered: bool, trained: bool) -> tuple[tuple[bool, bool], ...]:
    """(keep, late): ZeRO-3, ZeRO-2 and ZeRO-1 where there is something to gather."""
    if not gathered:
        return ((False, True), (False, False)) if trained else ((False, True),)
    return ((False, False), (True, False), (True, True)) if trained else ((False, False), (True, False))


def _bytes(
    type_: TensorType,
    own: float,
    copy: float,
    trained: bool,
    count: int,
    recipe: Recipe,
) -> float:
    """Bytes of all members of a class: shards, gradients, optimizer, and gathered copies that are kept.

    copy: of one member, if it is larger than what is stored.
    """
    width = DTYPES[type_.dtype][1]
    held = count * own if recipe.resident or not trained else 0.0
    if trained:
        per_element = recipe.gradient_bytes(width) + recipe.optimizer_bytes(width)
        held += count * own / width * per_element
    return held + (count * copy if copy > own else 0.0)


def _sums(type_: TensorType, own: float, whole: float, late: bool, count: int, recipe: Recipe) -> float:
    """Bytes that the gradients of a class hold beyond their shards while microbatches are summed up."""
    width = DTYPES[type_.dtype][1]
    most = max(own, whole) if late else own
    summed, alone = recipe.sum_bytes(width), recipe.gradient_bytes(width)
    return count * (most * summed - own * alone) / width


def _update(type_: TensorType, own: float, trained: bool, recipe: Recipe, traffic: float) -> float:
    """Seconds of the optimizer: it is bound by memory."""
    if not trained:
        return 0.0
    width = DTYPES[type_.dtype][1]
    return own / width * recipe.update_bytes(width) / traffic


def _tie(type_: TensorType, stored: Layout, axes: SearchAxes, gathered: bool) -> float:
    score = 10.0 * gathered
    for placement, size in zip(stored, axes.mesh_sizes, strict=True):
        if isinstance(placement, Shard):
            score += 0.01 * placement.dim + 0.1 * (placement.outer > 1)
            score += 1.0 * (not is_even(type_.shape[placement.dim], placement, size))
    return TIE * score
