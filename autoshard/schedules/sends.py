"""What joins the actions of a pipeline schedule while it is played: what is there, what is on its way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autoshard.schedules.schedule import Action, Schedule
from autoshard.schedules.steps import ScheduledAction


class Send(NamedTuple):
    """What `action` gives to the next stage (F) or to the one before (B, I), on its way between two ranks."""

    action: Action
    source: int
    target: int
    start: float
    end: float


class SendState:
    """What is there and what is over, by the numbers of `schedules.steps`.

    seconds: of actions, as `ScheduledAction.costs` counts them. messages: seconds of these, as
    `ScheduledAction.link` counts them; those from one rank to another take turns. sends: gets every message,
    None to forget them. there: seconds at which what has a number is there, below zero while that is not
    known. over: what is over. free: seconds at which the messages of a pair of ranks are through.
    """

    def __init__(
        self,
        schedule: Schedule,
        seconds: Sequence[float],
        messages: Sequence[float],
        sends: list[Send] | None,
    ) -> None:
        m = schedule.microbatches * schedule.slices
        every = schedule.stages * m
        self.spent, self.messages, self.sends = seconds, messages, sends
        # seconds; below zero: not known yet. The first stage and the loss have nothing to wait for.
        self.there = [-1.0] * (2 * every) + [0.0]
        self.there[:m] = self.there[2 * every - m : 2 * every] = [0.0] * m
        self.over = bytearray(2 * every) + b"\1"
        self._ranks = schedule.ranks
        self.free = [0.0] * self._ranks**2  # when the sends from one rank to another are through

    def seconds(self, step: ScheduledAction) -> float:
        """Of computing an action."""
        return self.spent[step.costs]

    def ready(self, step: ScheduledAction) -> float:
        """Seconds at which what an action needs is there, below zero while that is not known."""
        return self.there[step.needs] if self.over[step.behind] else -1.0

    def made(self, step: ScheduledAction, now: float) -> int:
        """Told of what has ended, and when; the other rank that gets something of it, -1 if none does."""
        _, _, _, over, gives, receiver, pair, link, action = step
        self.over[over] = 1
        if receiver < 0:
            if gives >= 0:
                self.there[gives] = now
            return -1
        leaves = self.free[pair]
        if leaves < now:
            leaves = now
        self.there[gives] = self.free[pair] = arrives = leaves + self.messages[link]
        if self.sends is not None:
            self.sends.append(Send(action, pair // self._ranks, receiver, leaves, arrives))
        return receiver
