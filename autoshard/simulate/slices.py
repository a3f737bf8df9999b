"""What the slices of a microbatch cost, from what all of it costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf

from autoshard.ir.slices import Slices
from autoshard.schedules.timeline import StageCosts


def in_slices(
    costs: StageCosts, forward: Sequence[float], backward: Sequence[float], latency: float, slices: Slices
) -> StageCosts:
    """The costs of stages, for slices of the sequence.

    forward, backward: the seconds of causal attention among those of every stage. Queries between parts a and
    b of n of a sequence see (b^2 - a^2) / n^2 of all pairs of a query and a key (Li et al., "TeraPipe", ICML
    2021, section 3.3); everything else is divided as positions are. latency: seconds of every message,
    however short.
    """
    shares = slices.shares

    def computing(seconds: Sequence[float], attention: Sequence[float]) -> tuple[float, ...]:
        pairs, seen = zip(seconds, attention, strict=True), pairs_of(slices)
        return tuple(
            (all_ - own) * share + own * keys
            for all_, own in pairs
            for share, keys in zip(shares, seen, strict=True)
        )

    def divided(amounts: Sequence[float]) -> tuple[float, ...]:
        return tuple(x * share for x in amounts for share in shares)

    def sent(seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(min(x, latency) + max(0.0, x - latency) * share for x in seconds for share in shares)

    nothing = (0.0,) * len(costs.backward_weight)
    return StageCosts(
        forward=computing(costs.forward, forward),
        backward=computing(costs.backward, backward),
        backward_input=computing(costs.backward_input, backward),
        backward_weight=computing(costs.backward_weight, nothing),
        send_forward=sent(costs.send_forward),
        send_backward=sent(costs.send_backward),
        held=divided(costs.held),
        held_weight=divided(costs.held_weight),
        base=costs.base,
        update=costs.update,
        made_weight=divided(costs.made_weight),
    )


def pairs_of(slices: Slices) -> list[float]:
    """Of all pairs of a query and a key before it, those of each slice's queries."""
    edges = (0, *slices.cumulative)
    return [(b * b - a * a) / slices.units**2 for a, b in pairwise(edges)]


def of_equal_work(slices: int, units: int, attention: float) -> Slices:
    """Slices of which the one that takes longest takes least.

    units: equal parts of the sequence that they are made of, at least as many. attention: of all seconds,
    those of causal attention. By a dynamic programme over where each slice ends.
    """
    work = [(1 - attention) * k / units + attention * (k / units) ** 2 for k in range(units + 1)]
    # longest slice, and where the last begins, of so many slices up to a place
    best: list[tuple[float, int]] = [(w, 0) for w in work]
    starts: list[list[int]] = []
    for count in range(2, slices + 1):
        new = [(inf, 0)] * (units + 1)
        for end in range(count, units + 1):
            options = ((max(best[at][0], work[end] - work[at]), at) for at in range(count - 1, end))
            new[end] = min(options)
        starts.append([at for _, at in new])
        best = new
    edges = [units]
    for row in reversed(starts):
        edges.append(row[edges[-1]])
    edges = [0, *reversed(edges)] if slices > 1 else [0, units]
    return Slices(tuple(b - a for a, b in pairwise(edges)))
