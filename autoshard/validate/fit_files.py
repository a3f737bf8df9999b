"""Cluster files with calibrated figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from autoshard.cluster import load_cluster
from autoshard.cluster.write import cluster_text
from autoshard.validate.figures import applied
from autoshard.validate.fit import FittedFigures
from autoshard.validate.machine import catalog_name
from autoshard.validate.rebuild import Rebuilt

_FITTED = ("matmul_efficiency", "overlap")


def cluster_files(runs: Sequence[Rebuilt], fitted: FittedFigures, folder: Path) -> dict[Path, str]:
    """Per entry of the catalog that runs were measured on, its file with the fitted figures.

    runs: those that were fitted.
    """
    studies = len({r.run.study for r in runs})
    error = errors_by_study(runs, fitted)["all"].held_out
    why = f"autoshard validate --fit: {len(runs)} runs of {studies} studies, {error:.1f} % held out"
    texts: dict[Path, str] = {}
    for name in sorted({n for r in runs if (n := catalog_name(r.run.gpu)) is not None}):
        cluster = applied(load_cluster(name), fitted.figures)
        text = cluster_text(
            replace(cluster, name=f"{name}-fitted"),
            f"{name} with figures fitted to measured training runs; the rest as in the catalog",
            {figure: why for figure in _FITTED},
            [{"efficiency": why} for _ in cluster.levels],
        )
        texts[folder / f"{name}-fitted.toml"] = text
    return texts


@dataclass(frozen=True)
class StudyErrors:
    """Absolute errors in per cent of a study's steps.

    fitted: mean, with figures fitted to all runs. held_out, held_out_worst: with figures fitted to others.
    """

    rows: int
    fitted: float
    held_out: float
    held_out_worst: float


def errors_by_study(runs: Sequence[Rebuilt], fitted: FittedFigures) -> dict[str, StudyErrors]:
    """The errors of every study, and of all runs under ``all``."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for run, seconds, without in zip(runs, fitted.seconds, fitted.held_out, strict=True):
        if run.run.seconds:
            pair = tuple(100 * abs(s / run.run.seconds - 1) for s in (seconds, without))
            for name in (run.run.study, "all"):
                rows.setdefault(name, []).append((pair[0], pair[1]))
    rows["all"] = rows.pop("all", [])
    return {
        name: StudyErrors(len(p), mean(a for a, _ in p), mean(b for _, b in p), max(b for _, b in p))
        for name, p in rows.items()
    }
