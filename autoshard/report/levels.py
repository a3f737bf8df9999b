"""What the pipeline ranks hold over a step, with the peak inside every action."""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.simulate.stage_costs import StagePrices
from autoshard.simulate.step import StepEstimate
from autoshard.simulate.transients import Transients


class MemoryCurves:
    """Curves of bytes that agree with the peaks of a simulated step (`simulate.step.RankRow.peak`).

    Gradients are there from the first backward of their stage on, unless they lie in buffers.
    """

    def __init__(self, estimate: StepEstimate, prices: StagePrices) -> None:
        self.estimate, self.prices = estimate, prices
        self.transients = Transients(prices.program, prices.sheets)

    def of(self, rank: int) -> Iterator[tuple[float, float, float, float]]:
        """(start, end, bytes held as it begins, bytes at its own peak) of every action of a rank, in order.

        Seconds; the last one is the reduction and update at the end of the step.
        """
        timeline = self.estimate.timeline
        buffers = self.prices.behaviour.gradient_buffers
        missing = {} if buffers else dict(self.prices.gradients_of[rank])
        before, end = self.prices.states[rank].total, 0.0
        for span, (_, after) in zip(timeline.spans[rank], timeline.curve[rank][1:], strict=True):
            held = before - sum(missing.values())
            yield span.start, span.end, held, held + self.transients.course(span.action).peak
            if span.action.kind in "BW":
                missing.pop(span.action.stage, None)
            before, end = after, span.end
        held = before - sum(missing.values())
        yield end, timeline.makespan, held, held + self.transients.end(rank)
