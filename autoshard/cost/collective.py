"""What a collective costs: latency-bandwidth formulas over the level of wiring that a mesh axis crosses.

With p ranks, n bytes, latency a (seconds per message) and bandwidth b (bytes/s), a message costs a + n / b.
The launch of the operation is not included.

NCCL (graph/tuning.cc) gathers and scatters by rings of p - 1 steps, each with the latency of the level that
it crosses; over nodes with one rank each also by PAT, ceil(log2 p) steps (NCCL 2.23, device/all_gather.h). It
all-reduces by rings, or by a double tree over nodes with a chain inside each. Each has three protocols, which
trade latency for bandwidth; the fastest counts.

Elsewhere each kind has a ring form (long messages) and a tree form (short ones, ceil(log2 p) steps):
R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA
19(1), 2005, without the term for the arithmetic of reductions; the tree for all-reduce is the pipelined
double tree of P. Sanders, J. Speck, J. L. Träff, Parallel Computing 35(12), 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt

from autoshard.cluster.measured import KINDS
from autoshard.cost.link import AxisLink, link_of
from autoshard.errors import UsageError, nearest

__all__ = ["KINDS", "AxisLink", "link_of", "seconds"]

#: of NCCL's Simple, LL128 and LL: parts of a message's latency, and of the bandwidth (graph/tuning.cc, hwLat
#: of rings: NVLink 3.4, 1.9, 0.6 us, network 14, 4.0, 2.7 us; 120 of 128 and 4 of 8 bytes are data)
_PROTOCOLS = ((1.0, 1.0), (0.45, 0.92), (0.2, 0.5))

Array: TypeAlias = npt.NDArray[np.float64]
Bytes = TypeVar("Bytes", float, Array)


@overload
def seconds(kind: str, nbytes: float, link: AxisLink) -> float: ...
@overload
def seconds(kind: str, nbytes: Array, link: AxisLink) -> Array: ...
def seconds(kind: str, nbytes: float | Array, link: AxisLink) -> float | Array:
    """Seconds of one collective over a link; 0 for no bytes, or for one rank.

    nbytes is the size on one rank of the full tensor: all_gather: of the gathered result; reduce_scatter:
    of the input; all_reduce and broadcast: of the tensor; all_to_all: of the local input; send: of the
    message; hop: of what a rank passes on to the next of a ring; level_hop: the same where there is a ring in
    each node, and one across them beside it (`runtime.ring_attention`). It may be an array. A kind that was
    timed on the link costs what was measured.
    """
    formula = HOPS.get(kind) or _FORMULAS.get(kind)
    if formula is None:
        raise UsageError(f"there is no collective {kind!r}", hint=nearest(kind, _FORMULAS))
    timed = next((table.at for table in link.measured if table.kind == kind), None)
    if timed is None and not isinstance(nbytes, np.ndarray):
        return formula(float(nbytes), link) if nbytes > 0 and link.size > 1 else 0.0
    n = np.asarray(nbytes, dtype=np.float64)
    seconds_ = formula(n, link) if timed is None else timed(n)
    result = np.where(n > 0, seconds_, 0.0) if link.size > 1 else np.zeros_like(n)
    return result if isinstance(nbytes, np.ndarray) else float(result)


def _less(a: Bytes, b: Bytes) -> Bytes:
    """Of two numbers, or of each pair in two arrays; arrays of one number are slow."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.minimum(a, b)
    return min(a, b)


def _more(a: Bytes, b: Bytes) -> Bytes:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return max(a, b)


def _steps(link: AxisLink) -> int:
    """ceil(log2 p)"""
    return (link.size - 1).bit_length()


def _wire(n: Bytes, link: AxisLink) -> Bytes:
    """Bytes that a rank must send at least: all but its own 1/p of the tensor."""
    return n * ((link.size - 1) / link.size)


def _gather_or_scatter(n: Bytes, link: AxisLink) -> Bytes:
    """All-gather (ring; recursive doubling) and its mirror image reduce-scatter (ring; recursive halving).

    ring: (p - 1) a + (p - 1)/p n/b. tree: ceil(log2 p) a + (p - 1)/p n/b; its partners are far apart, so
    that each rank is alone on its link.
    """
    wire = _wire(n, link)
    tree = _steps(link) * link.latency + wire / link.alone
    if not link.nccl:
        return _less((link.size - 1) * link.latency + wire / link.bandwidth, tree)
    ring = _fastest(link.round, wire / link.bandwidth)
    return _less(ring, tree) if link.parts == link.size else ring


def _fastest(latency: float, transfer: Bytes) -> Bytes:
    """Seconds by the best of NCCL's protocols."""
    times = [latency * waits + transfer / share for waits, share in _PROTOCOLS]
    return _less(_less(times[0], times[1]), times[2])


def _all_reduce(n: Bytes, link: AxisLink) -> Bytes:
    """Reduce-scatter then all-gather (ring; Rabenseifner), or a double tree: 2 ceil(log2 p) a + 2 n/b."""
    if not link.nccl:
        tree = 2 * _steps(link) * link.latency + 2 * n / link.bandwidth
        return _less(2 * _gather_or_scatter(n, link), tree)
    ring = _fastest(2 * link.round, 2 * _wire(n, link) / link.bandwidth)
    depth = link.inside + (link.parts - 1).bit_length() * link.latency
    return _less(ring, _fastest(2 * depth, 2 * n / link.bandwidth))


def _all_to_all(n: Bytes, link: AxisLink) -> Bytes:
    """Pairwise: (p - 1) a + (p - 1)/p n/b. Bruck: ceil(log2 p) (a + n/2b).

    Pairs do not profit from rings: what leaves the side of the slowest level, (p - local)/p n, goes over
    the link of the rank alone.
    """
    leaving = n * ((link.size - link.local) / link.size)
    transfer = _more(_wire(n, link) / link.bandwidth, leaving / link.alone)
    pairwise = (link.size - 1) * link.latency + transfer
    bruck = _steps(link) * (link.latency + n / (2 * link.alone))
    return _less(pairwise, bruck)


def _broadcast(n: Bytes, link: AxisLink) -> Bytes:
    """Binomial tree: ceil(log2 p) (a + n/b). Long: scatter by a tree, ceil(log2 p) a + (p - 1)/p n/b, then
    all-gather."""
    binomial = _steps(link) * (link.latency + n / link.alone)
    scatter = _steps(link) * link.latency + _wire(n, link) / link.alone
    return _less(binomial, scatter + _gather_or_scatter(n, link))


def _send(n: Bytes, link: AxisLink) -> Bytes:
    """One message: a + n/b."""
    return link.latency + n / link.alone


def _hop(n: Bytes, link: AxisLink) -> Bytes:
    """One step of a ring, all ranks at once: a + n/b, b of a rank alone where the axis leaves a node, as one
    ring crosses there over one card. Never below its share, 1/(p - 1), of an all-gather of all that goes
    round."""
    return _more(link.latency + n / min(link.bandwidth, link.alone), _share(n, link))


def _level_hop(n: Bytes, link: AxisLink) -> Bytes:
    """One step of the ring in each node, beside which a step across nodes takes as long as all of a node
    together: a + n/b, and never below its share of an all-gather, either."""
    return _more(link.latency + n / link.bandwidth, _share(n, link))


def _share(n: Bytes, link: AxisLink) -> Bytes:
    """Of an all-gather of all that goes round, one step's."""
    return seconds("all_gather", n * link.size, link) / max(1, link.size - 1)


#: steps of rings, which have no full tensor
HOPS: Mapping[str, Callable[[Any, AxisLink], Any]] = {"hop": _hop, "level_hop": _level_hop}
#: what sends to one rank after another, each over its own link, not round a ring
PAIRWISE = ("all_to_all", "send", "hop")
_FORMULAS: Mapping[str, Callable[[Any, AxisLink], Any]] = {
    "all_reduce": _all_reduce,
    "all_gather": _gather_or_scatter,
    "reduce_scatter": _gather_or_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send": _send,
}
