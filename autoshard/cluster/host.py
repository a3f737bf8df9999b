"""The memory of a node, and the link over which a device reaches it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.ir.decode import Count, NotNegative, Positive, check_fields


@dataclass(frozen=True)
class Host:
    """What a device finds in its node.

    bandwidth: bytes/s between device and host memory in one direction, while the other devices of the node
    do the same. latency: seconds per copy. memory_bytes: of a node. memory_bandwidth: bytes/s of a node's
    memory, all its processors together. devices: of a node, which share both.
    """

    bandwidth: Positive
    latency: NotNegative
    memory_bytes: Count
    memory_bandwidth: Positive
    devices: Count = 1

    def __post_init__(self) -> None:
        check_fields(self, "host")

    def seconds(self, nbytes: float) -> float:
        """A copy in one direction."""
        return self.latency + nbytes / self.bandwidth if nbytes else 0.0

    def update_seconds(self, nbytes: float) -> float:
        """Reading and writing so many bytes per device, all devices of a node at once."""
        return nbytes * self.devices / self.memory_bandwidth


def bounding_host(hosts: Sequence[Host | None]) -> Host | None:
    """The host that is as slow and as small as the worst of these; None if one of them is not known."""
    hosts_ = [host for host in hosts if host is not None]
    if not hosts_ or len(hosts_) < len(hosts):
        return None
    most = max(host.devices for host in hosts_)
    return Host(
        min(host.bandwidth for host in hosts_),
        max(host.latency for host in hosts_),
        int(min(host.memory_bytes / host.devices for host in hosts_) * most),
        min(host.memory_bandwidth / host.devices for host in hosts_) * most,
        most,
    )
