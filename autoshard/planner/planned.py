"""A plan and the analysed model it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autoshard.cluster import Cluster
from autoshard.errors import VerificationError
from autoshard.planner.analysis import Analysis
from autoshard.planner.memory_fit import Peak
from autoshard.planner.source import Progress, Source
from autoshard.planner.stage_partition import Staging
from autoshard.search.plan.plan import Plan
from autoshard.search.problem.problem import batch_of
from autoshard.search.select.request import CandidateSolution, Incumbent
from autoshard.simulate.device_memory import DeviceMemory
from autoshard.simulate.peaks import Peaks

#: share of a step by which one has to be shorter than another, more than simulated steps may be off
WORTH = 5e-3


@dataclass(frozen=True)
class Planned:
    """A plan and the analysed model it is for.

    The plan alone is what is stored. analysis: of the model with the batch it was captured with, which
    saves `compile` from capturing it again if that is the plan's microbatch. solution: what the plan is
    thought to cost, None for a plan that was read from a file. source: what to capture again, if need be.
    several: what meshes were searched with, where the microbatch's analysis, of one sequence, came after.
    staging: how its pipeline was cut, None without one. peak: what the fullest rank holds, simulated, None
    where no limit was set. peaks: makes its program anew and looks at all ranks. device: what a process takes
    of its device, see `planned_for_device`. width: times the memory that the search was given, more than one
    where activations go to host memory.
    """

    plan: Plan
    analysis: Analysis = field(repr=False)
    cluster: Cluster = field(repr=False)
    solution: CandidateSolution | None = field(default=None, repr=False)
    source: Source | None = field(default=None, repr=False)
    staging: Staging | None = field(default=None, repr=False)
    peak: Peak | None = field(default=None, repr=False)
    peaks: Callable[[], Peaks] | None = field(default=None, repr=False)
    width: float = 1.0
    device: DeviceMemory | None = None
    several: Analysis | None = field(default=None, repr=False)

    def of_microbatch(self, say: Progress) -> Planned:
        """The same, with the analysis of one microbatch of the plan: captured again if need be.

        Raises VerificationError without a source to capture.
        """
        batch, captured = self.plan.batch, batch_of(self.analysis.folded)
        if batch in (0, captured):
            return self
        if self.source is None:
            raise VerificationError(
                f"the plan is for microbatches of {batch} sequences, the capture has {captured}",
                hint="compile with example inputs of one microbatch",
            )
        source = self.source.with_batch(self.analysis, batch)
        return replace(self, analysis=source.analysed(say), source=source)

    @property
    def searched(self) -> Analysis:
        """Of a batch that other meshes can be searched with."""
        return self.several or self.analysis

    @property
    def step(self) -> float:
        """Seconds of a step, simulated where that was done."""
        assert self.solution is not None
        step = None if self.peak is None else self.peak.step
        return self.solution.placements.seconds if step is None else step

    @property
    def incumbent(self) -> Incumbent:
        """What other plans have to be faster than."""
        assert self.solution is not None
        seconds = self.solution.placements.seconds if self.staging is None else self.staging.seconds
        waits = 0.0 if self.peak is None else self.peak.waits
        return Incumbent(self.solution, seconds + waits, self.step if self.simulated else None)

    @property
    def simulated(self) -> bool:
        """Whether its program was simulated."""
        return self.peak is not None and self.peak.step is not None

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange the tokens of experts."""
        rules, nodes = self.analysis.rules, self.plan.nodes
        return any(rules[k].exchanged(s.inputs, s.outputs) is not None for k, s in nodes.items())

    def is_faster(self, other: Planned) -> bool:
        """Whether its step is shorter by more than it may be off."""
        return self.step < (1 - WORTH) * other.step
