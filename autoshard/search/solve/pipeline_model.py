"""What a pipeline does to a step and to memory, before anything is cut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autoshard.schedules.registry import default_chunks, lookup, tried
from autoshard.schedules.spec import PipeSize, ScheduleSpec


@dataclass(frozen=True)
class Pipe:
    """ranks: of the pp axis, 1 for no pipeline. schedule, chunks: as in `autoshard.schedules`.

    hop: seconds to send what one microbatch hands from stage to stage. slices: of its sequence. Where ranks
    or links are unlike, speeds: of every rank, as a multiple of what the search prices, () if all are so
    fast; slowest: seconds of a send over the slowest link, and hop the mean; ahead: ranks from that before
    the slowest link on; ends: seconds to add up gradients that the first and the last stage share.
    """

    ranks: int = 1
    schedule: str = ""
    chunks: int = 1
    hop: float = 0.0
    slices: int = 1
    speeds: tuple[float, ...] = ()
    slowest: float = 0.0
    ahead: int = 1
    ends: float = 0.0

    @cached_property
    def spec(self) -> ScheduleSpec:
        """Of the schedule; of 1F1B where there is no pipeline."""
        return lookup(self.schedule or "1f1b")

    def _size(self, microbatches: int) -> PipeSize:
        return PipeSize(self.ranks, microbatches, self.chunks, self.slices)

    @cached_property
    def pace(self) -> float:
        """How many times as fast as one rank alone all are together."""
        return sum(self.speeds) if self.speeds else self.ranks

    @property
    def stage_speeds(self) -> tuple[float, ...]:
        """Of the rank of every stage; () where all are alike."""
        turned = self.speeds[::-1] if self.spec.v_shaped else self.speeds
        return tuple(v for k in range(self.chunks) for v in (turned if k % 2 else self.speeds))

    def delayed(self, step: float, stage: float, microbatches: int) -> float:
        """Seconds of a step with what slow links add to it. stage: seconds of a microbatch on a rank.

        A rank before a slow link goes on with as many microbatches as it may have in flight, and then waits
        for the first to come back, unless it has gradients of parameters to make; a stage that is left almost
        empty gives the others time. What all microbatches take over a link, a step takes at least.
        """
        if not self.slowest:
            return step
        crossings = 2 if self.spec.v_shaped else 2 * self.chunks - 1
        flying = self.ahead if self.chunks == 1 else self.ranks
        spare = flying * stage / 3 if self.splits_backward else 0.0
        wait = max(0.0, 2 * crossings * self.slowest - spare) / flying
        if self.ranks > 2:
            wait = min(wait, stage / (self.ranks - 1))
        return max(step + microbatches * wait, microbatches * self.slowest) + self.ends

    @cached_property
    def splits_backward(self) -> bool:
        """Whether gradients of parameters are made apart from, and later than, what other stages wait for."""
        return self.spec.splits_backward

    @property
    def hops(self) -> float:
        """Seconds that the first microbatch is on its way, there and back; what follows is sent meanwhile."""
        return self.legs * self.hop

    @property
    def legs(self) -> int:
        """How often the first microbatch is sent, there and back."""
        return 2 * (self.ranks * self.chunks - 1)

    def filling(self, microbatches: int) -> float:
        """How many microbatches a rank could compute while it waits; see `autoshard.schedules.spec`.

        Stages are taken as alike, backward as twice forward and half of it for weights. With fewer
        microbatches than a schedule needs to fill its ranks, the first has to come down through all stages
        and the gradients of the last to go up again.
        """
        return self.spec.filling(self._size(microbatches))

    def in_flight(self, microbatches: int) -> float:
        """Microbatches that the rank which holds most of them keeps for backward, in full stages' worth."""
        return 1.0 if self.ranks == 1 else self.spec.in_flight(self._size(microbatches))

    def waiting(self, microbatches: int) -> tuple[float, float]:
        """(microbatches of which only gradients of parameters are still to be made, and others that are in
        flight then), in full stages' worth, on the rank with most of the first."""
        if not self.splits_backward:
            return 0.0, self.in_flight(microbatches)
        if self.chunks == 1:
            return self.in_flight(microbatches), 0.0
        # a rank puts them off only while it has other microbatches to go on with
        unit = 1 / self.chunks
        if microbatches <= self.ranks:
            return unit, self.in_flight(microbatches) - unit
        return min(self.ranks, microbatches - self.ranks + 2 * unit) - unit, 0.0

    def __str__(self) -> str:
        chunks = f" x {self.chunks}" if self.chunks > 1 else ""
        slices = f", {self.slices} slices" if self.slices > 1 else ""
        return f"pp={self.ranks} {self.schedule}{chunks}{slices}"


def pipes_of(
    ranks: int, layers: int, schedule: str = "", chunks: int | None = None, slices: int = 1
) -> list[Pipe]:
    """The pipelines worth trying on so many ranks; schedule, chunks, slices: what is decided already.

    layers: calls of layers; there are no more stages than those. [] if nothing is left.
    """
    if ranks == 1:
        return [Pipe()]
    if schedule:
        counts = [n for n in tried().get(schedule, ()) if ranks * n <= layers and chunks is None]
        counts = counts or [chunks or default_chunks(schedule)]
        return [Pipe(ranks, schedule, count, slices=slices) for count in counts]
    return [
        Pipe(ranks, name, count)
        for name, counts in tried().items()
        for count in counts
        if (chunks is None or count == chunks) and ranks * count <= max(layers, ranks)
    ]
