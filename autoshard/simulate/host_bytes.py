"""What a program keeps in host memory, per device of a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, log2

from autoshard.ir.boundaries import ends_of
from autoshard.schedules.timeline import in_flight_bytes
from autoshard.simulate.stage_costs import StagePrices


@dataclass(frozen=True)
class HostHeld:
    """Bytes of one rank in the memory of its node, with Adam. activations: of all microbatches in flight."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations


def host_bytes(prices: StagePrices) -> tuple[HostHeld, ...]:
    """Of every pipeline rank."""
    stored = _stored(prices)
    return tuple(_of(prices, rank, stored) for rank in range(prices.schedule.ranks))


def _of(prices: StagePrices, rank: int, stored: Mapping[int, float]) -> HostHeld:
    wanted = prices.program.offload
    flying = 0.0
    if wanted.activations:
        shares = prices.slice_shares
        held = tuple(stored[s] * share for s in range(prices.schedule.stages) for share in shares)
        costs = replace(prices.held, held=held, held_weight=held, made_weight=())
        flying = max(in_flight_bytes(prices.schedule, prices.schedule.actions[rank], costs), default=0.0)
    if not wanted.states:
        return HostHeld(activations=flying)
    # the optimizer alone keeps copies of what it trains, and of the gradients of that
    trained = prices.shard_bytes(rank, trained=True)
    parameters = prices.shard_bytes(rank) if wanted.parameters else trained
    return HostHeld(parameters, trained, prices.optimizer_bytes(rank), flying)


def _stored(prices: StagePrices) -> Mapping[int, float]:
    """Stage -> bytes that its forward stores for one microbatch. torch's allocator of pinned memory rounds
    every tensor up to a power of two (`CachingHostAllocator`)."""
    pinned = bool(prices.cluster.device.kernels.multiprocessors)
    lowered = prices.program.lowered
    hosted = lowered.hosted
    result = {part.stage: 0.0 for part in lowered.parts}
    for part in lowered.parts:
        if part.phase == "forward":
            sizes = (prices.size(v) for v in ends_of(lowered, part).makes if v in hosted)
            result[part.stage] += sum(2.0 ** ceil(log2(size)) if pinned and size else size for size in sizes)
    return result
