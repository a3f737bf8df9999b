"""Does what a rank holds at its fullest fit its device, by the simulated step of the program."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.cluster import Cluster, usable_memory
from autoshard.program.program import Program
from autoshard.report.units import bytes_text
from autoshard.simulate.step import estimate_step
from autoshard.verify.result import At, Finding


@dataclass(frozen=True)
class Fit:
    """peak: bytes on the fullest rank. room: bytes that a device has for them. rank: of the pipeline."""

    peak: float
    room: float
    rank: int

    @property
    def finding(self) -> Finding | None:
        if self.peak <= self.room:
            return None
        return Finding(
            "memory",
            f"the fullest rank holds {bytes_text(self.peak)}",
            At(rank=self.rank),
            f"a device has {bytes_text(self.room)}",
        )


def fit(program: Program, cluster: Cluster) -> Fit:
    """What the fullest rank holds on a cluster, simulated."""
    fullest = estimate_step(program, cluster).fullest
    return Fit(fullest.peak, usable_memory(cluster.device), fullest.rank)
