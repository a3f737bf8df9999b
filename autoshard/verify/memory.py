"""Does what a rank holds at its fullest fit its device, by the simulated step of the program."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.cluster import Cluster, usable_memory
from autoshard.cluster.cluster import host_of
from autoshard.ir.units import bytes_text
from autoshard.planner.host_memory import need_of
from autoshard.program.program import Program
from autoshard.simulate.stage_costs import StagePrices
from autoshard.simulate.step import estimate_step
from autoshard.verify.result import Finding, ProgramLocation


@dataclass(frozen=True)
class Fit:
    """peak: bytes on the fullest rank. room: bytes that a device has for them. rank: of the pipeline. holder:
    of the bytes, and place: that has them."""

    peak: float
    room: float
    rank: int
    holder: str = "the fullest rank"
    place: str = "a device"

    @property
    def finding(self) -> Finding | None:
        if self.peak <= self.room:
            return None
        return Finding(
            "memory",
            f"{self.holder} holds {bytes_text(self.peak)}",
            ProgramLocation(rank=self.rank),
            f"{self.place} has {bytes_text(self.room)}",
        )


def fit_host(program: Program, cluster: Cluster) -> Fit:
    """What the ranks of a node keep in its memory. Raises UsageError if the cluster does not know it."""
    need = need_of(StagePrices(program, cluster))
    room = host_of(cluster.device).memory_bytes
    return Fit(need.bytes, float(room), -1, "what is offloaded on a node", "its host memory")


def fit(program: Program, cluster: Cluster) -> Fit:
    """What the fullest rank holds on a cluster, simulated."""
    fullest = estimate_step(program, cluster).fullest
    return Fit(fullest.peak, usable_memory(cluster.device), fullest.rank)
