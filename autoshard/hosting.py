"""Whether what is offloaded fits the memory of a node, and how much goes there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoshard.cluster.cluster import host_of
from autoshard.cluster.mesh import Mesh
from autoshard.errors import InfeasibleError
from autoshard.program.program import Program
from autoshard.search.amounts import bytes_up
from autoshard.simulate.host_bytes import HostHeld, host_bytes
from autoshard.simulate.peaks import Peaks
from autoshard.simulate.stage_costs import StagePrices


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
    world = Mesh.parse(prices.program.whole_mesh).world_size
    fullest = max(host_bytes(prices), key=lambda held: held.total)
    return HostNeed(fullest, min(host_of(prices.cluster.device).devices, world))


def check_host(prices: StagePrices) -> None:
    """InfeasibleError if what is offloaded does not fit the memory of a node."""
    if not prices.program.offload:
        return
    need, room = need_of(prices), host_of(prices.cluster.device).memory_bytes
    if need.bytes <= room:
        return
    held = need.held
    failure = InfeasibleError(
        f"what is offloaded takes {bytes_up(need.bytes)} of host memory, a node has {bytes_up(room)}",
        where=f"{need.devices} ranks on a node, each with parameters {bytes_up(held.parameters)}, gradients "
        f"{bytes_up(held.gradients)}, optimizer {bytes_up(held.optimizer)}, activations "
        f"{bytes_up(held.activations)}",
        hint="offload less, or use more ranks on fsdp or tp",
    )
    failure.smallest_bytes = need.bytes
    raise failure


def peak_of(prices: StagePrices) -> float:
    """Bytes of the fullest rank of a program on its device."""
    return max(most for _, most in Peaks(prices).all)


def least(
    build: Callable[[bool], Program], prices_of: Callable[[Program], StagePrices], budget: int | None
) -> Program:
    """The program whose activations wait in host memory only where nothing waits for them, or all of them,
    if only that fits the memory.

    build: the program, given whether all of them do. Raises InfeasibleError if the host has too little.
    """
    program = build(False)
    if not program.offload:
        return program
    prices = prices_of(program)
    if budget is not None and program.offload.activations and peak_of(prices) > budget:
        other = build(True)
        others = prices_of(other)
        if peak_of(others) < peak_of(prices):
            program, prices = other, others
    check_host(prices)
    return program
