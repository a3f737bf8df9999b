"""Latency and bandwidth of a link from timed collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from autoshard.cost.collective import seconds
from autoshard.cost.link import AxisLink
from autoshard.errors import UsageError

#: kinds whose cost over a link that ranks do not share is a a + b n for all sizes
FITTED = ("all_reduce", "all_gather", "reduce_scatter")
#: of the predicted time, that latency needs in the shortest or bandwidth in the longest message to be known
_LEAST_SHARE = 0.01
_STEPS = 100
Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Timing:
    """One collective: its kind, bytes (as `autoshard.cost.seconds` counts them), ranks, and seconds."""

    kind: str
    nbytes: int
    ranks: int
    seconds: float


@dataclass(frozen=True)
class FittedLink:
    """latency: seconds per message. bandwidth: bytes/s in one direction. worst: the largest error of any
    timing, as a share of what was measured."""

    latency: float
    bandwidth: float
    worst: float


def fit_link(timings: Sequence[Timing], *, where: str) -> FittedLink:
    """The latency a and bandwidth b with which the formulas of the cost model fit all timings best.

    Each formula is linear in a and 1/b. The sum of squares of log(predicted / measured) is made least (by
    Levenberg-Marquardt steps in log a and log 1/b, which keep both positive), so that short messages count as
    much as long ones and too slow as much as too fast. Raises UsageError, naming ``where``, if there are too
    few timings, or if they show no latency or no bandwidth: less than 1 % of the shortest, or the longest.
    """
    lengths = [each.nbytes for each in timings]
    if len(set(lengths)) < 2:
        hint = "time two sizes or more"
        raise UsageError("one size of message has no latency and bandwidth", where=where, hint=hint)
    design = np.array([_terms(each, where) for each in timings])
    measured = np.array([each.seconds for each in timings])
    shortest, longest = (np.array(lengths) == end for end in (min(lengths), max(lengths)))
    start = np.array(
        [
            np.median(measured[shortest] / design[shortest, 0]),
            np.median(measured[longest] / design[longest, 1]),
        ]
    )
    latency, per_byte = (float(value) for value in _least_squares(design, measured, start))
    shares = design * (latency, per_byte) / (design @ np.array([latency, per_byte]))[:, None]
    if shares[shortest, 0].max() < _LEAST_SHARE or shares[longest, 1].max() < _LEAST_SHARE:
        pairs = ", ".join(f"{t.kind} of {t.nbytes} bytes {t.seconds:.3g} s" for t in timings)
        raise UsageError(
            f"the times do not fit a latency and a bandwidth: {latency:.3g} s, {1 / per_byte:.3g} bytes/s",
            where=where,
            why=pairs,
            hint="measure on an idle machine, with more --repeats or a larger --largest",
        )
    worst = float(np.abs(design @ np.array([latency, per_byte]) / measured - 1.0).max())
    return FittedLink(latency, 1.0 / per_byte, worst)


def _terms(timing: Timing, where: str) -> tuple[float, float]:
    """Messages and bytes on the wire that the formula of a collective counts."""
    if timing.kind not in FITTED:
        raise UsageError(f"{timing.kind} cannot be fitted", where=where, hint=f"use {', '.join(FITTED)}")
    if not 0 < timing.seconds < inf or timing.ranks < 2 or timing.nbytes < 1:
        raise UsageError(
            f"{timing} cannot be", where=where, why="all its numbers are positive, on 2 ranks or more"
        )
    messages = seconds(timing.kind, timing.nbytes, AxisLink(1.0, inf, timing.ranks))
    wire = seconds(timing.kind, timing.nbytes, AxisLink(0.0, 1.0, timing.ranks))
    return messages, wire


def _least_squares(design: Array, measured: Array, start: Array) -> Array:
    """Positive x near which the sum of squares of log(design @ x / measured) is least."""

    def residuals(at: Array) -> Array:
        return np.asarray(np.log(design @ np.exp(at) / measured))

    at, damping = np.log(start), 1e-3
    error = float((residuals(at) ** 2).sum())
    for _ in range(_STEPS):
        slopes = design * np.exp(at) / (design @ np.exp(at))[:, None]
        square = slopes.T @ slopes
        step = np.linalg.solve(square + damping * np.eye(2), -slopes.T @ residuals(at))
        tried = float((residuals(at + step) ** 2).sum())
        if tried < error:
            at, error, damping = at + step, tried, max(damping / 3, 1e-9)
        else:
            damping *= 3
    return np.exp(at)
