"""Which of several parts of a program that run as one goes on where they stop (`rules.stops`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from autoshard.errors import VerificationError
from autoshard.program.manifest import RECOMPILE


class Stop(NamedTuple):
    """Where a part may let another go on. ready: seconds at which what it needs next is there. ahead: seconds
    of computing before its next exchange of tokens."""

    ready: float
    ahead: float


#: which of the parts that are not done goes on: given the time, where each has stopped, and the turns so far
Turns: TypeAlias = "Callable[[float, Mapping[int, Stop], Sequence[int]], int]"


def one_after_the_other(now: float, stops: Mapping[int, Stop], taken: Sequence[int]) -> int:
    return next(iter(stops))


def soonest_message(now: float, stops: Mapping[int, Stop], taken: Sequence[int]) -> int:
    """Of those that can go on the one that is next to send tokens, else the one that can go on first."""
    return min(stops, key=lambda k: (max(0.0, stops[k].ready - now), stops[k].ahead, k))


def as_said(said: Sequence[int]) -> Turns:
    """In an order that is given. Raises VerificationError when it is over before the parts are."""

    def turns(now: float, stops: Mapping[int, Stop], taken: Sequence[int]) -> int:
        if len(taken) >= len(said) or said[len(taken)] not in stops:
            raise VerificationError("the turns of a pair are not those of its stops", hint=RECOMPILE)
        return said[len(taken)]

    return turns
