"""Errors that people read: what, where in their code, why, and what to try."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class AutoshardError(Exception):
    """Base of all errors of autoshard.

    what: one sentence. where: the user's source line or the name of the thing. why: the cause.
    hint: what to try.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", why: str = "", hint: str = "") -> None:
        self.what, self.where, self.why, self.hint = what, where, why, hint
        lines = [what]
        if where:
            lines.append(f"  where: {where}")
        if why:
            lines.append(f"  why:   {why}")
        if hint:
            lines.append(f"  try:   {hint}")
        super().__init__("\n".join(lines))


class UsageError(AutoshardError):
    """A wrong argument: unknown axis, wrong world size, batch too small to shard."""

    exit_code = 2


class BatchError(UsageError):
    """A model cannot be planned with another batch than it was captured with."""


class CaptureError(AutoshardError):
    """The model cannot be captured as a graph."""

    exit_code = 3


class NoRuleError(AutoshardError):
    """An op has no sharding rule."""

    exit_code = 3


class InfeasibleError(AutoshardError):
    """No plan meets the memory budget. smallest_bytes: what the least demanding plan holds on a rank."""

    exit_code = 4
    smallest_bytes: float = 0.0


class CollectiveError(AutoshardError):
    """A collective of a running program failed: a rank was late, in another one, or gone."""

    exit_code = 6


class AnomalyError(AutoshardError, RuntimeError):
    """A gradient is NaN, under ``torch.autograd.detect_anomaly()``."""

    exit_code = 5


class VerificationError(AutoshardError):
    """A program is not what it should be: wrong numbers, wrong types, or a damaged folder."""

    exit_code = 5


def nearest(word: str, options: Iterable[str]) -> str:
    """A hint: the option that looks most like ``word``, if any does, and all options."""
    names = list(options)
    close = get_close_matches(word, names, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(names)}"
