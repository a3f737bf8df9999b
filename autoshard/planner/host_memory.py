"""Whether what is offloaded fits the memory of a node, and how much goes there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from autoshard.cluster.cluster import Device, host_of
from autoshard.cluster.mesh import Mesh
from autoshard.errors import InfeasibleError
from autoshard.program.program import Program
from autoshard.search.solve.memory_text import bytes_up
from autoshard.simulate.host_bytes import HostHeld, host_bytes
from autoshard.simulate.peaks import Peaks
from autoshard.simulate.stage_costs import StagePrices

#: programs with a share of the activations stored that are tried, and how near to the least share is enough
_TRIALS, _NEAR = 4, 1 / 16
_Build: TypeAlias = Callable[[float, bool], Program]


class HostFullError(InfeasibleError):
    """The memory of a node does not hold what waits there. missing: bytes that a rank must hold itself."""

    missing: float = 0.0


@dataclass(frozen=True)
class HostNeed:
    """The node that holds most. held: bytes of its fullest rank. devices: ranks on the node."""

    held: HostHeld
    devices: int

    @property
    def bytes(self) -> float:
        """Of the node; every rank counts as the fullest."""
        return self.held.total * self.devices


def need_of(prices: StagePrices) -> HostNeed:
    """What a program takes of the memory of a node."""
    world = Mesh.parse(prices.program.full_mesh).world_size
    fullest = max(host_bytes(prices), key=lambda held: held.total)
    return HostNeed(fullest, min(host_of(prices.cluster.device).devices, world))


def check_host(prices: StagePrices) -> None:
    """HostFullError if what is offloaded does not fit the memory of a node."""
    if not prices.program.offload:
        return
    need, capacity = need_of(prices), host_of(prices.cluster.device).memory_bytes
    if need.bytes <= capacity:
        return
    held = need.held
    failure = HostFullError(
        f"what is offloaded takes {bytes_up(need.bytes)} of host memory, a node has {bytes_up(capacity)}",
        where=f"{need.devices} ranks on a node, each with parameters {bytes_up(held.parameters)}, gradients "
        f"{bytes_up(held.gradients)}, optimizer {bytes_up(held.optimizer)}, activations "
        f"{bytes_up(held.activations)}",
        hint="offload less, or use more ranks on fsdp or tp",
    )
    failure.smallest_bytes = need.bytes
    failure.missing = (need.bytes - capacity) / need.devices
    raise failure


def check_states(nbytes: float, device: Device, ranks: int) -> None:
    """InfeasibleError if states of so many bytes do not fit the hosts of so many ranks, however divided."""
    host = host_of(device)
    nodes = max(1.0, ranks / host.devices)
    if nbytes <= nodes * host.memory_bytes:
        return
    failure = InfeasibleError(
        f"what is offloaded takes {bytes_up(nbytes / nodes)} of host memory, a node has "
        f"{bytes_up(host.memory_bytes)}",
        why=f"it is {bytes_up(nbytes)} in all, and {ranks} ranks fill {nodes:g} node{'s' * (nodes > 1)}",
        hint="offload less, or use more ranks",
    )
    failure.smallest_bytes = nbytes / nodes
    raise failure


def least_offload(build: _Build, prices_of: Callable[[Program], StagePrices], budget: int | None) -> Peaks:
    """The program whose activations wait in host memory where the device need not wait for them, and beyond
    that as few of them as fit the memory; if nothing else fits, all of them, loaded when they are needed, not
    a call ahead. It comes with its prices and its peaks.

    build: the program, given what share is stored of the activations that the device has to wait for, and
    whether they are loaded ahead. Raises HostFullError if the host has too little memory.
    """

    def made(share: float, ahead: bool) -> Peaks:
        return Peaks(prices_of(build(share, ahead)))

    peaks = made(0.0, True)
    stores = peaks.prices.program.offload.activations
    if budget is not None and stores and peaks.fullest[1] > budget:
        peaks = _fewest(made, budget, peaks)
    check_host(peaks.prices)
    return peaks


def _fewest(made: Callable[[float, bool], Peaks], budget: int, none: Peaks) -> Peaks:
    """The smallest share that fits, by secants, then by false position: peaks fall about evenly with it, and
    by no more than what is there to store. Where none does, the program of the lowest peak, loading ahead or
    not. none: with none of them."""
    low, high, over, under = 0.0, 1.0, none.fullest[1] - budget, 0.0
    falls = none.fullest[0].activations
    best: Peaks | None = None
    for left in reversed(range(_TRIALS)):
        least = low + ((high - low) * over / (over - under) if best else over / falls if falls > 0 else 1.0)
        if best and high - least <= _NEAR:
            return best
        share = min(1.0, least + _NEAR / 2) if left or best else 1.0
        tried = made(share, True)
        more = tried.fullest[1] - budget
        if more <= 0:
            high, under, best = share, more, tried
        elif share == 1.0:
            return min(none, tried, made(share, False), key=lambda peaks: peaks.fullest[1])
        else:
            falls, low, over = (over - more) / (share - low), share, more
    assert best is not None  # the last share is all of them
    return best
