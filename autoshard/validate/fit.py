"""Calibration: the figures of devices and links with which measured runs are predicted best.

Least squares of log(predicted / measured) by Gauss-Newton steps in the logarithms of the figures. Every
study has the weight of the square root of its runs, large errors count linearly (Huber's weights), and each
figure is held near its start by a prior, so that what the runs do not show stays as it was. No figure belongs
to a run or to a study. A few runs of every study steer the first steps, and all runs the last one, as single
measurements are off by more than what is looked for. Every study is also predicted by figures that were
fitted to all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from autoshard.errors import UsageError
from autoshard.schedules.timeline import step_seconds
from autoshard.simulate.stage_costs import StagePrices
from autoshard.validate.figures import SPREAD, Figures, applied, moved, names_of, value_of
from autoshard.validate.rebuild import Rebuilt

Array: TypeAlias = npt.NDArray[np.float64]
Name: TypeAlias = tuple[str, str]
Progress = Callable[[str], None]

ROUNDS = 3
#: runs of a study that steer all rounds but the last
STEERING = 10
#: step of a logarithm for a slope, and the most that a figure moves in a round
_NUDGE, _MOST = 0.04, 0.4
#: noise of a measurement, and the error from which on it counts linearly
_NOISE, _LARGE = 0.05, 0.10


@dataclass(frozen=True)
class FittedFigures:
    """figures: fitted to all runs. seconds: predicted with them, in the order of the runs. held_out:
    predicted with figures that were fitted without the run's own study."""

    figures: Figures
    seconds: tuple[float, ...]
    held_out: tuple[float, ...]


def fit(runs: Sequence[Rebuilt], progress: Progress = lambda _: None) -> FittedFigures:
    """Raises UsageError where there is nothing to fit: fewer than two studies with measured steps."""
    if len({r.run.study for r in runs}) < 2:
        raise UsageError(
            "calibration needs two studies or more",
            why="every study is predicted by figures that were fitted to the others",
            hint="give more rows, with `study` in each",
        )
    return _Fit(runs, progress).fitted()


class _Fit:
    def __init__(self, runs: Sequence[Rebuilt], progress: Progress) -> None:
        self.runs, self.progress = runs, progress
        devices = [r.cluster.device for r in runs]
        self.start = Figures({d.name: d.kernels.best or d.matmul_efficiency for d in devices})
        self.names = names_of(self.start)
        self.measured = np.array([_measured(r) for r in runs])
        self.prices = [StagePrices(r.program, r.cluster, behaviour=r.behaviour) for r in runs]
        self._steer(_spread_out(runs))

    def _steer(self, which: Sequence[int]) -> None:
        """From now on these runs steer."""
        counts = Counter(self.runs[k].run.study for k in which)
        self.steering = which
        self.weights = np.array([counts[self.runs[k].run.study] ** -0.25 for k in which]) / _NOISE

    def fitted(self) -> FittedFigures:
        figures = self.start
        everything = range(len(self.runs))
        slopes = np.zeros((len(self.runs), len(self.names)))
        for number in range(ROUNDS):
            if number == ROUNDS - 1:
                self._steer(everything)
            seconds = self._seconds(figures, self.steering)
            errors = np.log(seconds / self.measured[self.steering])
            self.progress(
                f"round {number + 1}: mean error {100 * float(np.abs(np.expm1(errors)).mean()):.1f} %"
            )
            slopes = self._slopes(figures, seconds)
            figures = moved(figures, self._step(figures, errors, slopes, None))
        at = self._seconds(figures, everything)
        errors = np.log(at / self.measured)
        held_out = np.zeros(len(self.runs))
        for study in dict.fromkeys(r.run.study for r in self.runs):
            own = [k for k in everything if self.runs[k].run.study == study]
            held_out[own] = self._seconds(moved(figures, self._step(figures, errors, slopes, study)), own)
            error = float(np.abs(held_out[own] / self.measured[own] - 1).mean())
            self.progress(f"{study} by the others: mean error {100 * error:.1f} %")
        return FittedFigures(figures, tuple(at), tuple(held_out))

    def _seconds(self, figures: Figures, which: Sequence[int]) -> Array:
        """Steps of some runs."""
        seconds = []
        for k in which:
            prices = self.prices[k].repriced(applied(self.runs[k].cluster, figures))
            seconds.append(step_seconds(prices.schedule, prices.costs, prices.behaviour.steps_overlap))
        return np.array(seconds)

    def _slopes(self, figures: Figures, seconds: Array) -> Array:
        """[run, figure]: change of log seconds with the log of the figure."""
        slopes = np.zeros((len(self.steering), len(self.names)))
        for column, name in enumerate(self.names):
            rows = [
                row
                for row, k in enumerate(self.steering)
                if name[1] in ("", self.runs[k].cluster.device.name)
            ]
            lower = moved(figures, {name: -_NUDGE})
            nudged = self._seconds(lower, [self.steering[row] for row in rows])
            change = log(value_of(lower, name) / value_of(figures, name))
            slopes[rows, column] = (np.log(nudged) - np.log(seconds[rows])) / change
        return slopes

    def _step(
        self, figures: Figures, errors: Array, slopes: Array, without: str | None
    ) -> Mapping[Name, float]:
        """The Gauss-Newton step from the errors of all studies but one."""
        used = np.array([self.runs[k].run.study != without for k in self.steering])
        weights = self.weights[used] / np.sqrt(np.maximum(1.0, np.abs(errors[used]) / _LARGE))
        spread = np.array([SPREAD[figure] for figure, _ in self.names])
        away = np.array([log(value_of(figures, n) / value_of(self.start, n)) for n in self.names])
        left = np.vstack([slopes[used] * weights[:, None], np.diag(1 / spread)])
        right = np.concatenate([-errors[used] * weights, -away / spread])
        step = np.clip(np.linalg.lstsq(left, right, rcond=None)[0], -_MOST, _MOST)
        return dict(zip(self.names, map(float, step), strict=True))


def _measured(rebuilt: Rebuilt) -> float:
    seconds = rebuilt.run.seconds
    if seconds is None:
        raise UsageError("a run without a measured step cannot be fitted", where=rebuilt.run.id)
    return seconds


def _spread_out(runs: Sequence[Rebuilt]) -> list[int]:
    """Of every study as many runs as steer, from its shortest step to its longest."""
    chosen: list[int] = []
    for study in dict.fromkeys(r.run.study for r in runs):
        own = sorted(
            (k for k, r in enumerate(runs) if r.run.study == study), key=lambda k: _measured(runs[k])
        )
        count = min(STEERING, len(own))
        places = {round(j * (len(own) - 1) / max(1, count - 1)) for j in range(count)}
        chosen += [own[p] for p in sorted(places)]
    return chosen
