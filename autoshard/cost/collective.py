"""What a collective costs: latency-bandwidth formulas over the level of wiring that a mesh axis crosses.

With p ranks, n bytes, latency a (seconds per message) and bandwidth b (bytes/s), a message costs a + n / b.
Each kind has a ring form (long messages) and a tree form (short ones, ceil(log2 p) steps); the faster one
counts. Formulas: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations
in MPICH", IJHPCA 19(1), 2005, without the term for the arithmetic of reductions; the tree for all-reduce is
the pipelined double tree of P. Sanders, J. Speck, J. L. Träff, Parallel Computing 35(12), 2009, that NCCL
uses. The launch of the operation is not included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

from autoshard.cluster.cluster import Cluster, Level
from autoshard.cluster.load import nearest
from autoshard.cluster.mesh import Mesh
from autoshard.errors import UsageError

Array: TypeAlias = npt.NDArray[np.float64]
_Ranks: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AxisLink:
    """What one group of a mesh axis has for its collectives, all groups of the axis being active at once.

    latency: seconds per message. bandwidth: bytes/s in one direction between two neighbouring parts of a
    ring through the group. size: ranks in a group. device_bandwidth: bytes/s in one direction of one rank
    alone over the slowest level crossed (None: equal to ``bandwidth``). local: ranks of the group on the
    same side of that level, which together make up the bandwidth of the ring.
    """

    latency: float
    bandwidth: float
    size: int
    device_bandwidth: float | None = None
    local: int = 1

    @property
    def alone(self) -> float:
        """Bytes/s of one rank alone over the slowest level."""
        return self.bandwidth if self.device_bandwidth is None else self.device_bandwidth


def link_of(cluster: Cluster, mesh: Mesh, axis: int) -> AxisLink:
    """The link that the groups of a mesh axis have, with rank r on the r-th device of the cluster.

    Latency is that of the outermost level crossed, bandwidth that of the slowest. A group with m ranks in
    each node runs m rings at once, over the network cards of its m devices (as NCCL does), so that it has m
    times the share of one device; that is how the groups of an axis divide the links that they cross at once.
    """
    cluster.check_world_size(mesh.world_size)
    size = mesh.sizes[mesh.index(axis)]
    if size == 1:
        return AxisLink(0.0, inf, 1)
    ranks = _groups(cluster, mesh, axis)
    crossed: list[tuple[Level, int]] = []
    below = 1
    for level in cluster.levels:
        above = level.size or mesh.world_size
        if _crosses(ranks // below, ranks // above):
            crossed.append((level, _fewest_together(ranks // below)))
        below = above
    shares = [(_share(level, mesh), local) for level, local in crossed]
    share, local = min(shares, key=lambda pair: pair[0] * pair[1])
    return AxisLink(crossed[-1][0].latency, share * local, size, share, local)


@overload
def seconds(kind: str, nbytes: float, link: AxisLink) -> float: ...
@overload
def seconds(kind: str, nbytes: Array, link: AxisLink) -> Array: ...
def seconds(kind: str, nbytes: float | Array, link: AxisLink) -> float | Array:
    """Seconds of one collective over a link; 0 for no bytes, or for one rank.

    nbytes is the size on one rank of the whole tensor: all_gather: of the gathered result; reduce_scatter:
    of the input; all_reduce and broadcast: of the tensor; all_to_all: of the local input; send: of the
    message. It may be an array.
    """
    if kind not in _FORMULAS:
        raise UsageError(f"there is no collective {kind!r}", hint=nearest(kind, _FORMULAS))
    n = np.asarray(nbytes, dtype=np.float64)
    result = np.where(n > 0, _FORMULAS[kind](n, link), 0.0) if link.size > 1 else np.zeros_like(n)
    return result if isinstance(nbytes, np.ndarray) else float(result)


def _groups(cluster: Cluster, mesh: Mesh, axis: int) -> _Ranks:
    """Groups of the axis as rows of ranks; one row stands for all groups if they lie alike on the wiring."""
    size, stride = mesh.sizes[axis], mesh.stride(axis)
    lengths = (stride, size * stride)
    alike = all(g % length == 0 or length % g == 0 for g in cluster.group_sizes for length in lengths)
    if alike:
        return np.arange(0, size * stride, stride)[None, :]
    return np.arange(mesh.world_size).reshape(-1, size, stride).swapaxes(1, 2).reshape(-1, size)


def _crosses(below: _Ranks, above: _Ranks) -> bool:
    """Whether some group has ranks in two parts below a level that are in the same part above it."""
    # ranks ascend along a row, so ranks of the same part are neighbours
    return bool(np.any((np.diff(below) != 0) & (np.diff(above) == 0)))


def _fewest_together(below: _Ranks) -> int:
    """The smallest number of ranks that a group has in one part, among groups with more than one part."""
    rows = below[below[:, 0] != below[:, -1]]
    labels = np.arange(len(rows))[:, None] * (int(below.max()) + 1) + rows
    return int(np.unique(labels, return_counts=True)[1].min())


def _share(level: Level, mesh: Mesh) -> float:
    """Bytes/s of one device at a level while all devices of the mesh use it."""
    return level.bandwidth / min(level.shared_by, mesh.world_size)


def _steps(link: AxisLink) -> int:
    """ceil(log2 p)"""
    return (link.size - 1).bit_length()


def _wire(n: Array, link: AxisLink) -> Array:
    """Bytes that a rank must send at least: all but its own 1/p of the tensor."""
    return n * ((link.size - 1) / link.size)


def _gather_or_scatter(n: Array, link: AxisLink) -> Array:
    """All-gather (ring; recursive doubling) and its mirror image reduce-scatter (ring; recursive halving).

    ring: (p - 1) a + (p - 1)/p n/b. tree: ceil(log2 p) a + (p - 1)/p n/b; its partners are far apart, so
    that each rank is alone on its link.
    """
    wire = _wire(n, link)
    ring = (link.size - 1) * link.latency + wire / link.bandwidth
    tree = _steps(link) * link.latency + wire / link.alone
    return np.minimum(ring, tree)


def _all_reduce(n: Array, link: AxisLink) -> Array:
    """Reduce-scatter then all-gather (ring; Rabenseifner), or a double tree: 2 ceil(log2 p) a + 2 n/b."""
    tree = 2 * _steps(link) * link.latency + 2 * n / link.bandwidth
    return np.minimum(2 * _gather_or_scatter(n, link), tree)


def _all_to_all(n: Array, link: AxisLink) -> Array:
    """Pairwise: (p - 1) a + (p - 1)/p n/b. Bruck: ceil(log2 p) (a + n/2b).

    Pairs do not profit from rings: what leaves the side of the slowest level, (p - local)/p n, goes over
    the link of the rank alone.
    """
    leaving = n * ((link.size - link.local) / link.size)
    transfer = np.maximum(_wire(n, link) / link.bandwidth, leaving / link.alone)
    pairwise = (link.size - 1) * link.latency + transfer
    bruck = _steps(link) * (link.latency + n / (2 * link.alone))
    return np.minimum(pairwise, bruck)


def _broadcast(n: Array, link: AxisLink) -> Array:
    """Binomial tree: ceil(log2 p) (a + n/b). Long: scatter by a tree, ceil(log2 p) a + (p - 1)/p n/b, then
    all-gather."""
    binomial = _steps(link) * (link.latency + n / link.alone)
    scatter = _steps(link) * link.latency + _wire(n, link) / link.alone
    return np.minimum(binomial, scatter + _gather_or_scatter(n, link))


def _send(n: Array, link: AxisLink) -> Array:
    """One message: a + n/b."""
    return link.latency + n / link.alone


_FORMULAS: Mapping[str, Callable[[Array, AxisLink], Array]] = {
    "all_reduce": _all_reduce,
    "all_gather": _gather_or_scatter,
    "reduce_scatter": _gather_or_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send": _send,
}
KINDS = tuple(_FORMULAS)
