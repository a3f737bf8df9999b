"""What the slices of a microbatch cost, from what all of it costs."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.schedules.timeline import StageCosts


def in_slices(
    costs: StageCosts, forward: Sequence[float], backward: Sequence[float], latency: float, slices: int
) -> StageCosts:
    """The costs of stages, for slices of the sequence.

    forward, backward: the seconds of causal attention among those of every stage. The queries of slice c
    see c + 1/2 of slices / 2 times as many keys as there are on average, so that its share is (2c + 1) / k^2
    (Li et al., "TeraPipe", ICML 2021, section 3.3); everything else is divided evenly. latency: seconds of
    every message, however short.
    """
    shares = [(2 * c + 1) / slices**2 for c in range(slices)]

    def computing(seconds: Sequence[float], attention: Sequence[float]) -> tuple[float, ...]:
        pairs = zip(seconds, attention, strict=True)
        return tuple((all_ - own) / slices + own * share for all_, own in pairs for share in shares)

    def even(amounts: Sequence[float]) -> tuple[float, ...]:
        return tuple(x / slices for x in amounts for _ in range(slices))

    def sent(seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(min(x, latency) + max(0.0, x - latency) / slices for x in seconds for _ in range(slices))

    nothing = (0.0,) * len(costs.backward_weight)
    return StageCosts(
        forward=computing(costs.forward, forward),
        backward=computing(costs.backward, backward),
        backward_input=computing(costs.backward_input, backward),
        backward_weight=computing(costs.backward_weight, nothing),
        send_forward=sent(costs.send_forward),
        send_backward=sent(costs.send_backward),
        held=even(costs.held),
        held_weight=even(costs.held_weight),
        base=costs.base,
        update=costs.update,
        made_weight=even(costs.made_weight),
    )
