"""From sums over a program to the time of a full step: microbatches, and what overlaps with what.

Collectives of parameters (gathers before use, reductions of gradients) do not depend on the activations
beside them, so they run behind computing. Collectives of activations stand in its way, but for those of
backward, beside which gradients of parameters are computed (`passes.overlap.schedule_ops`). The first
microbatch of a step also gathers what is kept for the full step, the last one also reduces what waited,
so those two take longer than the ones between (Zhu et al., "Mist", EuroSys 2025, section 4, keep the same
distinction).

In a pipeline every rank has its share of all of it, and waits while the pipeline fills and drains for as
long as some more microbatches would take.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter


@dataclass(frozen=True)
class StepSums:
    """Seconds on the fullest rank, of one microbatch unless said otherwise.

    work: computing, in forward and in backward (which holds what is recomputed). talk: collectives of
    activations, of forward and what else is in their way, and of backward. gather: of parameters, before each
    use. reduce: of gradients in every microbatch. first: gathers that last for the full step. last:
    reductions of gradients once a step. update: of the optimizer, once a step. once: collectives once a step
    beside which nothing is computed.
    """

    work_forward: float = 0.0
    work_backward: float = 0.0
    talk: float = 0.0
    talk_backward: float = 0.0
    gather_forward: float = 0.0
    gather_backward: float = 0.0
    reduce: float = 0.0
    first: float = 0.0
    last: float = 0.0
    update: float = 0.0
    once: float = 0.0

    def __add__(self, other: StepSums) -> StepSums:
        return StepSums(
            self.work_forward + other.work_forward,
            self.work_backward + other.work_backward,
            self.talk + other.talk,
            self.talk_backward + other.talk_backward,
            self.gather_forward + other.gather_forward,
            self.gather_backward + other.gather_backward,
            self.reduce + other.reduce,
            self.first + other.first,
            self.last + other.last,
            self.update + other.update,
            self.once + other.once,
        )


_VALUES = attrgetter(*(f.name for f in fields(StepSums)))


def mixed(low: StepSums, high: StepSums, t: float) -> StepSums:
    """Between two, at t of 0 to 1 from the one to the other."""
    return StepSums(*((1 - t) * a + t * b for a, b in zip(_VALUES(low), _VALUES(high), strict=True)))


@dataclass(frozen=True)
class StepTime:
    """One step in seconds. exposed: communication that nothing hides; hidden: what computing hides.

    bubble: waiting for other stages.
    """

    total: float
    compute: float
    exposed: float
    hidden: float
    update: float
    bubble: float = 0.0


@dataclass(frozen=True)
class Overlap:
    """How a step of ``microbatches`` is pieced together.

    share: of the time in which collectives and computing are under way at once that is gained by it, as each
    slows the other (0: nothing overlaps). edge: share of the parameter collectives with nothing to hide
    behind: those of the first layer, before, and of the last, after. beside: share of the computing of
    backward that may hide collectives of activations: of gradients of parameters, none where these are
    computed apart. stages: pipeline ranks among which everything is divided; one that is twice as fast counts
    for two. filling: microbatches that a rank could compute while it waits for others. hops: seconds that a
    microbatch is on its way between stages.
    """

    microbatches: int = 1
    share: float = 0.0
    edge: float = 0.0
    beside: float = 0.0
    stages: float = 1
    filling: float = 0.0
    hops: float = 0.0


@dataclass(frozen=True)
class Exposure:
    """Which overlaps are bound by communication (1) or by computing (0), or between.

    forward, backward: of all microbatches but the first, or but the last. first, last: of those.
    talk_backward: of collectives of activations in backward, whether they outlast what may hide them.
    """

    forward: float = 1.0
    backward: float = 1.0
    first: float = 1.0
    last: float = 1.0
    talk_backward: float = 1.0


def step_time(sums: StepSums, overlap: Overlap) -> StepTime:
    """Seconds of a step: m (work + talk), what communication is exposed, and the update.

    Of the parameter collectives c beside computing w of the same phase, ``c - share * min(c, w)`` is exposed,
    as in a simulated step (`simulate.streams`). Those of activations in backward come first of all that runs
    beside it.
    """
    compute, exposed, hidden = _spent(sums, overlap)
    p = overlap.stages
    bubble = overlap.filling * slot_seconds(sums, overlap) / p + overlap.hops
    total = (compute + exposed + sums.update) / p + bubble
    return StepTime(total, compute / p, exposed / p, hidden / p, sums.update / p, bubble)


def busy_seconds(sums: StepSums, overlap: Overlap) -> float:
    """Of a step, but for its bubble: however long a rank waits for others, it is busy as long."""
    compute, exposed, _ = _spent(sums, overlap)
    return (compute + exposed + sums.update) / overlap.stages


def slot_seconds(sums: StepSums, overlap: Overlap) -> float:
    """Of one microbatch on all ranks, neither the first nor the last: with what its collectives of parameters
    take that computing does not hide. Ranks wait for others as long while a pipeline fills and drains."""
    ahead, behind, _, _ = _windows(sums, overlap)
    beside = _talk_beside(sums, overlap)
    moved, both = ahead[0] + behind[0] - beside, min(ahead) + min(behind)
    edges = overlap.edge / (1 - overlap.edge) * moved if overlap.edge < 1 else 0.0
    work, talk = sums.work_forward + sums.work_backward, sums.talk + sums.talk_backward
    return work + talk + moved + edges - overlap.share * both


def _talk_beside(sums: StepSums, overlap: Overlap) -> float:
    """Of collectives of activations beside which backward computes, in one microbatch on all ranks."""
    return min(sums.talk_backward, overlap.beside * sums.work_backward)


def _spent(sums: StepSums, overlap: Overlap) -> tuple[float, float, float]:
    """(computing, communication that nothing hides, communication that computing hides) of all ranks."""
    m, others = overlap.microbatches, overlap.microbatches - 1
    ahead, behind, first, last = _windows(sums, overlap)
    compute = m * (sums.work_forward + sums.work_backward)
    beside = m * _talk_beside(sums, overlap)
    talk = m * (sums.talk + sums.talk_backward) - beside
    moved = others * (ahead[0] + behind[0]) + first[0] + last[0]
    both = others * (min(ahead) + min(behind)) + min(first) + min(last)
    hidden = overlap.share * both
    edges = overlap.edge / (1 - overlap.edge) * (moved - beside) if overlap.edge < 1 else 0.0
    return compute, talk + moved - hidden + sums.once + edges, hidden


def exposure_of(sums: StepSums, overlap: Overlap) -> Exposure:
    """Which overlaps are bound by communication at these sums."""
    forward, backward, first, last = (float(comm > work) for comm, work in _windows(sums, overlap))
    talk = float(sums.talk_backward > overlap.beside * sums.work_backward)
    return Exposure(forward, backward, first, last, talk)


def between(a: Exposure, b: Exposure) -> Exposure:
    """The middle of two exposures."""
    return Exposure(*((getattr(a, f.name) + getattr(b, f.name)) / 2 for f in fields(Exposure)))


def _windows(sums: StepSums, overlap: Overlap) -> tuple[tuple[float, float], ...]:
    """(collectives, computing beside them) of forward, backward, first forward, last backward."""
    inner = 1 - overlap.edge
    ahead = inner * sums.gather_forward
    behind = inner * (sums.gather_backward + sums.reduce) + _talk_beside(sums, overlap)
    return (
        (ahead, sums.work_forward),
        (behind, sums.work_backward),
        (ahead + inner * sums.first, sums.work_forward),
        (behind + inner * sums.last, sums.work_backward),
    )


def weights(overlap: Overlap, bound: Exposure) -> StepSums:
    """The step as a weighted sum, with what is exposed of collectives c beside computing w replaced by
    ``bound * (c - share * w) + (1 - bound) * (1 - share) * c``, and the same of collectives of activations
    beside the computing that may hide them.

    For any exposure in [0, 1] that is at most the step itself, which has the larger of the two, so the least
    weighted sum is a lower bound; it is equal to the step where the exposure is right (`exposure_of`).
    """
    run, p, inner = overlap.microbatches + overlap.filling, overlap.stages, 1 - overlap.edge
    share, slow = overlap.share, 1 - overlap.share
    forward = (run - 1) * bound.forward + bound.first
    backward = (run - 1) * bound.backward + bound.last
    ahead, behind = run * slow + share * forward, run * slow + share * backward
    free = run - backward
    return StepSums(
        work_forward=(run - share * forward) / p,
        work_backward=(run - share * (backward + free * bound.talk_backward * overlap.beside)) / p,
        talk=run / p,
        talk_backward=(run - share * free * (1 - bound.talk_backward)) / p,
        gather_forward=(run * overlap.edge + inner * ahead) / p,
        gather_backward=(run * overlap.edge + inner * behind) / p,
        reduce=(run * overlap.edge + inner * behind) / p,
        first=(overlap.edge + inner * (slow + share * bound.first)) / p,
        last=(overlap.edge + inner * (slow + share * bound.last)) / p,
        update=1.0 / p,
        once=1.0 / p,
    )


def dot(weight: StepSums, sums: StepSums) -> float:
    """The weighted sum."""
    return float(sum(getattr(weight, f.name) * getattr(sums, f.name) for f in fields(StepSums)))
