"""What a process takes of a GPU: segments of the caching allocator, the CUDA context, buffers of NCCL."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from autoshard.cluster.mesh import Mesh
from autoshard.ir import Call, Node
from autoshard.ir.collectives import axes_of, is_message, kind_of
from autoshard.simulate.allocations import allocations, reserved
from autoshard.simulate.peaks import Peaks

_MIB = 2**20
#: a context with the kernels of torch and of the libraries for products, loaded as they are needed: 0.4 to
#: 0.6 GiB of what the driver shows as used
CONTEXT_BYTES = 600 * _MIB
#: of one connection of a channel, the buffers of its protocols (NCCL, src/init.cc: DEFAULT_BUFFSIZE, 4 MiB,
#: DEFAULT_LL_BUFFSIZE and DEFAULT_LL128_BUFFSIZE of src/include/device.h). Over NVLink they lie with the
#: receiver (src/transport/p2p.cc), over a network with both (src/transport/net.cc).
CONNECTION_BYTES = 4 * _MIB + 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8
#: channels within and between nodes of 8 GPUs, as NCCL_DEBUG=INFO shows them on DGX A100 and H100. Assumed.
_CHANNELS, _CHANNELS_BETWEEN, _CHANNELS_P2P = 24, 16, 8

#: ``fits``; ``flushes``: only by giving cached segments back to the device in every step, which is slow;
#: ``expandable``: only with ``expandable_segments:True``; ``over``: not at all
Verdict: TypeAlias = Literal["fits", "flushes", "expandable", "over"]


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the pipeline rank whose tensors take most.

    allocated: the most in blocks in use; reserved: the most in segments; expandable: the same with
    ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``. context, communicators: beside that. capacity: of
    the device.
    """

    rank: int
    allocated: int
    reserved: int
    expandable: int
    context: int
    communicators: int
    capacity: int
    verdict: Verdict

    @property
    def headroom(self) -> int:
        return self.context + self.communicators

    @property
    def total(self) -> int:
        """What nvidia-smi shows at most."""
        return self.reserved + self.headroom

    @property
    def fits(self) -> bool:
        """Whether it runs as it is."""
        return self.verdict in ("fits", "flushes")

    @property
    def missing(self) -> int:
        """Bytes that tensors have to be fewer for all of it to fit without giving segments back."""
        return max(0, min(self.reserved, self.expandable) + self.headroom - self.capacity)


def device_memory(peaks: Peaks) -> DeviceMemory | None:
    """Of the rank whose tensors take most. None for a cluster whose devices have another allocator."""
    prices = peaks.prices
    if prices.cluster.collectives != "nccl":
        return None
    rank = max(range(len(peaks.all)), key=lambda r: peaks.all[r][1])
    buffers = communicator_bytes(peaks)
    capacity = prices.device(rank).memory_bytes
    room = capacity - CONTEXT_BYTES - buffers
    events = tuple(allocations(peaks, rank))
    native, growing = reserved(events), reserved(events, expandable=True)
    verdict: Verdict = "fits"
    if native.reserved > room:
        if reserved(events, limit=room).fits:
            verdict = "flushes"
        else:
            verdict = "expandable" if growing.reserved <= room else "over"
    return DeviceMemory(
        rank, native.allocated, native.reserved, growing.reserved, CONTEXT_BYTES, buffers, capacity, verdict
    )


def communicator_bytes(peaks: Peaks) -> int:
    """Buffers of NCCL on a rank: of a communicator for all axes that a program sends over, and of pipelines.

    Only what is used is connected (NCCL_RUNTIME_CONNECT): rings, and for all-reduces trees (a parent and a
    child) as well.
    """
    mesh, levels = peaks.prices.whole, peaks.prices.cluster.levels
    node = levels[0].size if levels else None
    total = 0
    for axes, kinds in _used(peaks).items():
        between = node is not None and _extent(mesh, axes) > node
        channels = _CHANNELS_BETWEEN if between else _CHANNELS
        connections = 3 if "all_reduce" in kinds else 1
        total += channels * connections * (2 if between else 1) * CONNECTION_BYTES
    if peaks.schedule.ranks > 1:  # one neighbour sends forward, the other backward
        total += 2 * _CHANNELS_P2P * CONNECTION_BYTES
    return total


def _used(peaks: Peaks) -> dict[tuple[str, ...], set[str]]:
    """Axes of a communicator -> kinds of collectives over it."""
    lowered = peaks.prices.program.lowered
    called = dict.fromkeys(item.segment for item in lowered.main if isinstance(item, Call))
    nodes = [item for item in lowered.main if isinstance(item, Node)]
    nodes += [node for name in called for node in lowered.segments[name].graph.nodes]
    result: dict[tuple[str, ...], set[str]] = {}
    for node in filter(is_message, nodes):
        if axes := tuple(axes_of(node)):
            result.setdefault(axes, set()).add(kind_of(node))
    return result


def _extent(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Ranks from the first to behind the last of a communicator."""
    outermost = min(mesh.names.index(name) for name in axes)
    return prod(mesh.sizes[outermost:])
