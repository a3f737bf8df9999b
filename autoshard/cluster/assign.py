"""Which rank runs on which device, where links were measured and differ.

After J. Yim et al., "Pipette: Automatic Fine-Grained Large Language Model Training Configurator for
Real-World Clusters" (DATE 2024, arXiv 2405.18093): the slowest link of a ring sets its pace, so that slow
links belong where little is sent; simulated annealing over swaps finds where. Here it begins at a greedy
grouping, swaps full blocks of ranks as well as single ones, and ends no worse than rank r on device r.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite

import numpy as np
import numpy.typing as npt

from autoshard.cluster.links import Links, Matrix
from autoshard.cluster.mesh import Mesh
from autoshard.cluster.order import RankOrder
from autoshard.errors import UsageError, nearest

#: how much more an axis is assumed to send than the one outside of it, where traffic is not given
INNER_WEIGHT = 4.0
#: weight of the mean over the groups of an axis beside its slowest group. It leads the search out of plains
#: where no swap changes the slowest group
_MEAN_SHARE = 0.01
#: first and last temperature of the annealing, as shares of the cost at its start
_HOT, _COLD = 0.3, 1e-3
#: times the annealing is begun again from the best so far
_ROUNDS = 8
_MOVES_PER_DEVICE, _MOST_MOVES = 500, 20_000
_Index = npt.NDArray[np.int64]


def assign_ranks(
    mesh: Mesh,
    links: Links,
    traffic: Mapping[str, float] | None = None,
    *,
    seed: int = 0,
    moves: int | None = None,
    kinds: Sequence[int] = (),
) -> RankOrder:
    """The order of ranks that makes `order_seconds` small, never larger than for rank r on device r.

    traffic: bytes per step of each axis on one rank; axes that are left out send none. Without it, an axis
    counts 4 times the one outside of it. seed: of the swaps; the same one gives the same order. moves: swaps
    to try (default: 500 per device, at most 20,000). Devices without a rank are the worst placed. kinds: of
    every device; one only takes the place of another of its own kind. Raises UsageError if the mesh has more
    ranks than there are devices, or if traffic is of no axis.
    """
    weights = _weights(mesh, traffic)
    _check_devices(mesh, links)
    cost = _Cost(mesh, links, weights)
    identity = np.arange(links.devices)
    if not cost.axes or links.devices == 1:
        return RankOrder.identity(mesh.world_size)
    starts = [identity]
    if len(set(kinds)) < 2:
        starts.append(_greedy(mesh, cost.inverse))
    start = min(starts, key=cost.of)
    if moves is None:
        moves = min(_MOVES_PER_DEVICE * links.devices, _MOST_MOVES)
    if moves < 0:
        raise UsageError(f"the number of moves is {moves}", hint="give 0 or more")
    order = _anneal(mesh, cost, start, moves, np.random.default_rng(seed), np.array(kinds))
    best = min((identity, order), key=cost.of)
    return RankOrder(tuple(int(device) for device in best[: mesh.world_size]))


def order_seconds(
    mesh: Mesh, links: Links, order: RankOrder | None = None, traffic: Mapping[str, float] | None = None
) -> float:
    """Summed over axes: bytes of the axis over the bandwidth of its slowest link, in seconds.

    That link is the slowest between neighbours in a ring through any group of the axis, in the order of its
    ranks: groups work at once, and a step waits for the last one. order: default rank r on device r.
    """
    _check_devices(mesh, links)
    order = order or RankOrder.identity(mesh.world_size)
    order.check(mesh.world_size, links.devices)
    return _Cost(mesh, links, _weights(mesh, traffic)).of(np.array(order.devices))[0]


def _check_devices(mesh: Mesh, links: Links) -> None:
    if mesh.world_size > links.devices:
        what = f"{mesh.world_size} ranks do not fit on {links.devices} devices"
        raise UsageError(what, where=f"mesh {mesh}", hint="make the mesh smaller")


def _weights(mesh: Mesh, traffic: Mapping[str, float] | None) -> tuple[float, ...]:
    """Bytes per axis."""
    if traffic is None:
        return tuple(INNER_WEIGHT**position for position in range(len(mesh.axes)))
    for name, nbytes in traffic.items():
        if name not in mesh.names:
            raise UsageError(
                f"traffic of {name!r}, which is no axis", where=str(mesh), hint=nearest(name, mesh.names)
            )
        if not (nbytes >= 0 and isfinite(nbytes)):
            raise UsageError(f"traffic of {name} is {nbytes}", where=str(mesh), why="it is bytes per step")
    return tuple(float(traffic.get(name, 0.0)) for name in mesh.names)


@dataclass(frozen=True)
class _Rings:
    """The groups of one axis: ranks by row, and the next rank of the ring. of: the group of each rank."""

    weight: float
    ranks: _Index
    following: _Index
    of: _Index


class _Cost:
    """What an order costs: (slowest groups, groups in the mean), summed over axes; compared in this order."""

    def __init__(self, mesh: Mesh, links: Links, weights: tuple[float, ...]) -> None:
        safe = links.bandwidth + np.eye(links.devices)
        self.inverse: Matrix = np.where(links.bandwidth > 0, 1.0 / safe, 0.0)
        sized = [axis for axis in range(len(mesh.axes)) if mesh.sizes[axis] > 1]
        self.axes = tuple(_rings(mesh, axis, weights[axis]) for axis in sized if weights[axis] > 0)

    def groups(self, axis: _Rings, order: _Index, which: _Index | slice = slice(None)) -> Matrix:
        """Seconds of some groups of an axis."""
        pairs = self.inverse[order[axis.ranks[which]], order[axis.following[which]]]
        return axis.weight * pairs.max(axis=1)

    def of(self, order: _Index) -> tuple[float, float]:
        groups = [self.groups(axis, order) for axis in self.axes]
        return sum(float(g.max()) for g in groups), sum(float(g.mean()) for g in groups)


def _rings(mesh: Mesh, axis: int, weight: float) -> _Rings:
    ranks = np.array(mesh.groups(axis))
    of = np.empty(mesh.world_size, dtype=np.int64)
    of[ranks] = np.arange(len(ranks))[:, None]
    return _Rings(weight, ranks, np.roll(ranks, -1, axis=1), of)


def _greedy(mesh: Mesh, inverse: Matrix) -> _Index:
    """All devices in an order that gives inner axes the fastest links: chains of nearest neighbours of
    devices, then of those chains, axis by axis. Devices left over come last."""
    units = np.arange(len(inverse))[:, None]
    for size in reversed(mesh.sizes):
        # ranks of two neighbouring units talk pair by pair
        apart = np.zeros((len(units), len(units)))
        for member in units.T:
            np.maximum(apart, inverse[np.ix_(member, member)], out=apart)
        units = np.array([units[chain].reshape(-1) for chain in _chains(apart, size)])
    used = units[0]
    idle = np.setdiff1d(np.arange(len(inverse)), used)
    return np.concatenate([used, idle])


def _chains(apart: Matrix, size: int) -> list[_Index]:
    """As many disjoint chains of ``size`` units as there are, each from unit to nearest unit."""
    free = np.ones(len(apart), dtype=np.bool_)
    others = apart + np.diag(np.full(len(apart), np.inf))
    reach = np.partition(others, size - 2, axis=1)[:, size - 2] if size > 1 else np.zeros(len(apart))
    chains: list[_Index] = []
    for seed in np.argsort(reach, kind="stable"):
        if not free[seed] or len(chains) == len(apart) // size:
            continue
        chain = [int(seed)]
        free[seed] = False
        while len(chain) < size:
            chain.append(int(np.argmin(np.where(free, others[chain[-1]], np.inf))))
            free[chain[-1]] = False
        chains.append(np.array(chain))
    return chains


def _anneal(
    mesh: Mesh, cost: _Cost, start: _Index, moves: int, rng: np.random.Generator, kinds: _Index
) -> _Index:
    """The best order met on a walk of ``moves`` swaps; only groups that a swap touches are priced again.

    kinds: by device, () if all are of one kind.
    """
    order, best = start.copy(), start.copy()
    costs = [cost.groups(axis, order) for axis in cost.axes]
    now = _energy(costs)
    least, hot = cost.of(best), _HOT * now
    strides = sorted({mesh.stride(axis) for axis in range(len(mesh.axes)) if mesh.sizes[axis] > 1})
    touched = {stride: _touched(mesh, cost, stride) for stride in strides}
    picks = rng.random((moves, 4))
    length = max(1, -(-moves // _ROUNDS))
    for number, (pick, one, two, luck) in enumerate(picks):
        if number and number % length == 0:
            order = best.copy()
            costs = [cost.groups(axis, order) for axis in cost.axes]
            now = _energy(costs)
        heat = hot * (_COLD / _HOT) ** ((number % length) / length)
        stride = strides[int(pick * len(strides))]
        first = int(one * (mesh.world_size // stride))
        second = int(two * (len(order) // stride))
        if first == second or not _alike(order, kinds, stride, first, second):
            continue
        _swap(order, stride, first, second)
        renewed = [values.copy() for values in costs]
        for place, axis in enumerate(cost.axes):
            for block in (first, second):
                if block < len(touched[stride]):  # else its devices are idle
                    which = touched[stride][block][place]
                    renewed[place][which] = cost.groups(axis, order, which)
        then = _energy(renewed)
        if then > now and luck >= exp((now - then) / heat):
            _swap(order, stride, first, second)
            continue
        costs, now = renewed, then
        reached = _value(costs)
        if reached < least:
            best, least = order.copy(), reached
    return best


def _alike(order: _Index, kinds: _Index, stride: int, first: int, second: int) -> bool:
    """Whether two blocks of devices are of the same kinds."""
    if not len(kinds):
        return True
    one, two = (kinds[order[k * stride : (k + 1) * stride]] for k in (first, second))
    return bool((one == two).all())


def _swap(order: _Index, stride: int, first: int, second: int) -> None:
    one = slice(first * stride, (first + 1) * stride)
    two = slice(second * stride, (second + 1) * stride)
    order[one], order[two] = order[two].copy(), order[one].copy()


def _touched(mesh: Mesh, cost: _Cost, stride: int) -> list[list[_Index]]:
    """[block of ``stride`` ranks][axis] -> groups that have a rank in the block."""
    blocks = range(0, mesh.world_size, stride)
    return [[np.unique(axis.of[at : at + stride]) for axis in cost.axes] for at in blocks]


def _value(costs: list[Matrix]) -> tuple[float, float]:
    return sum(float(g.max()) for g in costs), sum(float(g.mean()) for g in costs)


def _energy(costs: list[Matrix]) -> float:
    worst, mean = _value(costs)
    return worst + _MEAN_SHARE * mean
