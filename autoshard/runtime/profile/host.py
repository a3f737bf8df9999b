"""The memory of a node and the link to it, measured from a device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from autoshard.cluster.host import Host
from autoshard.runtime.host import pinned_like

if TYPE_CHECKING:
    from autoshard.runtime.profile.device import CallTimer

#: bytes of a copy whose speed counts, and of one that shows what every copy takes
_LARGE, _SMALL = 256 * 2**20, 64


def measure_host(clock: CallTimer, sharing: int, bandwidth: float, overhead: float) -> tuple[Host, str]:
    """(host, where its figures come from). All devices of a node copy at once.

    sharing: devices of the node. bandwidth, overhead: bytes/s of the device's memory and seconds per op; on
    the CPU, whose host memory is its own, they are all there is to know.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if clock.device.type != "cuda":
        host = Host(bandwidth / 2, overhead, total, bandwidth * sharing, sharing)
        return host, "the memory of the device: a copy reads and writes every byte; size by the system"
    link = min(_copied(clock, _LARGE, down) for down in (True, False))
    latency = max(_SMALL / _copied(clock, _SMALL, down) for down in (True, False))
    source = torch.ones(_LARGE // 4)
    target = torch.empty_like(source)
    memory = 2 * _LARGE / clock.seconds(lambda: target.copy_(source)) * sharing
    text = (
        f"measured: copies of {_LARGE >> 20} MiB and {_SMALL} bytes from and to pinned memory, the slower "
        f"direction, {clock.how}; memory_bandwidth: the same within host memory by every process at once; "
        "memory_bytes by the system"
    )
    return Host(link, latency, total, memory, sharing), text


def _copied(clock: CallTimer, nbytes: int, down: bool) -> float:
    """Bytes/s between pinned memory and the device."""
    own = torch.ones(nbytes // 4, device=clock.device)
    host = pinned_like(own)
    target, source = (host, own) if down else (own, host)
    return nbytes / clock.seconds(lambda: target.copy_(source, non_blocking=True))
