"""Predicted steps against measured ones, run by run and study by study."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from autoshard.validate.counted import counted, fits, unit_of
from autoshard.validate.rebuild import Rebuilt


@dataclass(frozen=True)
class Scored:
    """One run. seconds: of a step; gib: on the fullest rank, in the unit of what was measured (`counted`);
    None where nothing was measured.

    oom: whether the run ran out of memory, and predicted_oom whether it should have. notes: see `Rebuilt`.
    """

    id: str
    study: str
    measured_s: float | None
    predicted_s: float
    measured_gib: float | None
    predicted_gib: float
    oom: bool
    predicted_oom: bool
    notes: tuple[str, ...] = ()

    @property
    def pct_error(self) -> float | None:
        """Predicted over measured seconds, less 1, in per cent."""
        return _pct(self.predicted_s, self.measured_s)

    @property
    def memory_pct_error(self) -> float | None:
        """The same of memory; None for a run that did not fit, whatever it had reached."""
        return None if self.oom else _pct(self.predicted_gib, self.measured_gib)


@dataclass(frozen=True)
class ScoreSummary:
    """Errors in per cent over some runs, None where none was measured.

    rows: with a measured step. oom_predicted, oom_missed: runs that ran out of memory and were, or were not,
    predicted to. rank_correlation: Spearman's, of predicted with measured steps; None for fewer than three
    runs or equal ones.
    """

    rows: int
    mean_abs_pct_error: float | None
    worst_abs_pct_error: float | None
    memory_rows: int
    memory_mean_abs_pct_error: float | None
    oom_predicted: int
    oom_missed: int
    rank_correlation: float | None


def scored(rebuilt: Rebuilt, seconds: float, peak_bytes: float) -> Scored:
    """A run with what was predicted for it."""
    run = rebuilt.run
    memory = rebuilt.cluster.device.memory_bytes
    axes = sum(degree > 1 for degree in (run.tensor, run.pipeline, run.data))
    return Scored(
        run.id,
        run.study,
        None if run.oom else run.seconds,
        seconds,
        None if run.offload else run.gib,
        counted(peak_bytes, run.memory_kind, axes, memory) / unit_of(run.memory_kind),
        run.oom,
        not (run.offload or fits(peak_bytes, memory, axes)),
        rebuilt.notes,
    )


def summary(runs: Iterable[Scored]) -> ScoreSummary:
    """The errors of some runs together."""
    rows = list(runs)
    timed = [r for r in rows if r.measured_s is not None]
    errors = [abs(r.pct_error) for r in timed if r.pct_error is not None]
    memory = [abs(e) for r in rows if (e := r.memory_pct_error) is not None]
    lost = [r for r in rows if r.oom]
    right = sum(r.predicted_oom for r in lost)
    return ScoreSummary(
        len(timed),
        mean(errors) if errors else None,
        max(errors, default=None),
        len(memory),
        mean(memory) if memory else None,
        right,
        len(lost) - right,
        _rank_correlation(timed),
    )


def by_study(runs: Sequence[Scored]) -> dict[str, ScoreSummary]:
    """The errors within every study, in the order of its first run."""
    names = dict.fromkeys(r.study for r in runs)
    return {name: summary(r for r in runs if r.study == name) for name in names}


def _rank_correlation(timed: Sequence[Scored]) -> float | None:
    """Spearman's coefficient of predicted and measured steps."""
    from scipy.stats import spearmanr

    measured, predicted = [r.measured_s for r in timed], [r.predicted_s for r in timed]
    if len(timed) < 3 or len(set(measured)) < 2 or len(set(predicted)) < 2:
        return None
    return float(spearmanr(measured, predicted).statistic)


def _pct(predicted: float, measured: float | None) -> float | None:
    return None if measured is None else 100 * (predicted / measured - 1)
