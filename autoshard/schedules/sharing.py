"""A pipeline whose ranks share processors: whoever computes while others wait is faster.

This is processor sharing: of n ranks on a node, k compute at a time, and each of them runs at
min(alone, n / k) times the speed that it has while all n compute (L. Kleinrock, Queueing Systems, volume 2,
1976, section 4.4, with so many servers that one job alone cannot use all of them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from autoshard.schedules.sends import SendState
from autoshard.schedules.steps import ScheduledAction

#: of the time to the next event, by which what ends next may be off
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Sharing:
    """Who shares processors. alone: how many times as fast a rank computes while all others of its node wait.
    nodes: that of every pipeline rank."""

    alone: float
    nodes: tuple[int, ...]


@dataclass
class _Rank:
    row: Sequence[ScheduledAction]
    update: float
    at: int = 0
    #: seconds of what it computes that are left, at the speed of all computing; None: it waits
    left: float | None = None
    end: float = 0.0
    done: bool = False
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Shared:
    """What came of it.

    starts, ends: seconds, per rank and action. done: of every rank, with its update; inf if it waits forever.
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    done: tuple[float, ...]


def share(
    steps: Sequence[Sequence[ScheduledAction]], sharing: Sharing, updates: Sequence[float], wires: SendState
) -> Shared:
    """Play the steps of every rank. updates: seconds at the end of every rank's list."""
    ranks = [_Rank(row, update) for row, update in zip(steps, updates, strict=True)]
    now = 0.0
    while True:
        following = _start(ranks, wires, now)
        speeds = _speeds(ranks, sharing)
        running = [
            (rank.left / speed, k)
            for k, (rank, speed) in enumerate(zip(ranks, speeds, strict=True))
            if rank.left is not None
        ]
        step = min([following - now, *(left for left, _ in running)])
        if step == inf:
            break
        now += step
        over = {k for left, k in running if left <= step * (1 + _ROUNDING)}
        for k, rank in enumerate(ranks):
            if rank.left is None:
                continue
            if k not in over:
                rank.left -= step * speeds[k]
                continue
            rank.left = None
            if rank.at == len(rank.row):
                rank.end, rank.done = now, True
                continue
            rank.ends.append(now)
            rank.at += 1
            wires.made(rank.row[rank.at - 1], now)
    return Shared(
        tuple(tuple(rank.starts) for rank in ranks),
        tuple(tuple(rank.ends) for rank in ranks),
        tuple(rank.end if rank.done else inf for rank in ranks),
    )


def _start(ranks: Sequence[_Rank], wires: SendState, now: float) -> float:
    """Let all begin that can; when the next of the others can, inf if that is not known of any."""
    following = inf
    for rank in ranks:
        if rank.left is not None or rank.done:
            continue
        if rank.at == len(rank.row):
            rank.left = rank.update
            continue
        step = rank.row[rank.at]
        ready = wires.ready(step)
        if ready > now:
            following = min(following, ready)
        elif ready >= 0.0:
            rank.starts.append(now)
            rank.left = wires.seconds(step)
    return following


def _speeds(ranks: Sequence[_Rank], sharing: Sharing) -> list[float]:
    """Of every rank that computes, or would."""
    nodes = sharing.nodes
    busy = {node: 0 for node in nodes}
    for rank, node in zip(ranks, nodes, strict=True):
        busy[node] += rank.left is not None
    return [min(sharing.alone, nodes.count(node) / max(1, busy[node])) for node in nodes]
