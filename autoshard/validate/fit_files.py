"""Cluster files with calibrated figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autoshard.cluster import load_cluster
from autoshard.cluster.write import cluster_text
from autoshard.validate.figures import applied
from autoshard.validate.fit import Fitted
from autoshard.validate.machine import catalog_name
from autoshard.validate.rebuild import Rebuilt

_FITTED = ("matmul_efficiency", "overlap")


def cluster_files(runs: Sequence[Rebuilt], fitted: Fitted, folder: Path) -> dict[Path, str]:
    """Per entry of the catalog that runs were measured on, its file with the fitted figures.

    runs: those that were fitted.
    """
    studies = len({r.run.study for r in runs})
    error = held_out(runs, fitted)
    why = f"autoshard validate --fit: {len(runs)} runs of {studies} studies, {error:.1f} % held out"
    found: dict[Path, str] = {}
    for name in sorted({n for r in runs if (n := catalog_name(r.run.gpu)) is not None}):
        made = applied(load_cluster(name), fitted.figures)
        text = cluster_text(
            replace(made, name=f"{name}-fitted"),
            f"{name} with figures fitted to measured training runs; the rest as in the catalog",
            {figure: why for figure in _FITTED},
            [{"efficiency": why} for _ in made.levels],
        )
        found[folder / f"{name}-fitted.toml"] = text
    return found


def held_out(runs: Sequence[Rebuilt], fitted: Fitted) -> float:
    """Mean absolute error in per cent of runs predicted without their own study."""
    errors = [
        abs(seconds / run.run.seconds - 1)
        for run, seconds in zip(runs, fitted.held_out, strict=True)
        if run.run.seconds
    ]
    return 100 * sum(errors) / len(errors)
