"""Messages of several mesh axes that cross the same links at once share their bandwidth.

A collective is priced as if it had the links of its axis to itself (`cost.link`). Where those of two axes are
on their way, the channels of both send in turn: processor sharing, in which all that cross a level go on at
the same part of their rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.cost.collective import PAIRWISE, AxisLink, seconds


@dataclass(frozen=True)
class Message:
    """start, seconds: with its links to itself. stream: messages of one run one after the other. demand:
    level of wiring -> part of its bandwidth that the message takes meanwhile."""

    start: float
    seconds: float
    stream: int
    demand: Mapping[str, float]


def demand(kind: str, nbytes: float, link: AxisLink) -> dict[str, float]:
    """Level that a collective crosses -> part of its bandwidth that it takes.

    That is less than all where other levels are slower, and as much less as waiting for latency takes.
    """
    cost = seconds(kind, nbytes, link)
    moving = 1.0 - float(seconds(kind, 1.0, link)) / cost if cost > 0 else 0.0
    if moving <= 0 or not link.crossed:
        return {}
    if kind in PAIRWISE:
        times = {each.name: (link.size - each.local) / each.bandwidth for each in link.crossed}
    else:
        times = {each.name: 1.0 / (each.bandwidth * each.local) for each in link.crossed}
    longest = max(times.values())
    return {name: moving * time / longest for name, time in times.items()}


def delays(messages: Sequence[Message]) -> list[float]:
    """Seconds that each of some messages takes longer because of the others, in their order."""
    result = [0.0] * len(messages)
    coming = sorted((k for k, m in enumerate(messages) if m.seconds > 0), key=lambda k: -messages[k].start)
    left: dict[int, float] = {}  # message on its way -> seconds that it would take on its own
    queues: dict[int, list[int]] = {}  # stream -> messages that have come, of which the first is on its way
    now = 0.0
    while left or coming:
        rates = _rates(messages, left)
        arrivals = {n: now + seconds_ / rates[n] for n, seconds_ in left.items()}
        until = min([*arrivals.values(), *(max(now, messages[k].start) for k in coming[-1:])])
        for n, rate in rates.items():
            left[n] -= (until - now) * rate
            result[n] += (until - now) * (1.0 - rate)
            if arrivals[n] <= until:
                del left[queues[messages[n].stream].pop(0)]
        now = until
        while coming and messages[coming[-1]].start <= now:
            new = coming.pop()
            queues.setdefault(messages[new].stream, []).append(new)
        for queue in queues.values():
            if queue:
                left.setdefault(queue[0], messages[queue[0]].seconds)
    return result


def _rates(messages: Sequence[Message], under_way: Mapping[int, float]) -> dict[int, float]:
    """Of each message that is on its way, the part of its rate at which it goes on."""
    if len(under_way) == 1:
        return dict.fromkeys(under_way, 1.0)
    asked: dict[str, float] = {}
    for n in under_way:
        for level, part in messages[n].demand.items():
            asked[level] = asked.get(level, 0.0) + part
    return {n: 1.0 / max([1.0, *(asked[level] for level in messages[n].demand)]) for n in under_way}
