"""Calibration: figures that made runs up are found again, and are written as cluster files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from test_validate import rebuilt_of, row, run_of
from typer.testing import CliRunner

from autoshard.cli.main import app
from autoshard.cluster import load_cluster
from autoshard.errors import UsageError
from autoshard.simulate.step import estimate_step
from autoshard.validate.figures import Figures, applied, moved, names_of, value_of
from autoshard.validate.fit import fit
from autoshard.validate.fit_files import cluster_files, errors_by_study
from autoshard.validate.rebuild import Rebuilt

DEVICE = "NVIDIA A100 SXM4 80GB"
TRUE = Figures({DEVICE: 0.6}, sustained=0.8, traffic=0.6, inside=0.5, outside=0.6, dispatch=1e-6)
SHAPES = [
    {"study": "a", "t": 1, "p": 1, "d": 8},
    {"study": "a", "t": 8, "p": 1, "d": 1},
    {"study": "a", "t": 2, "p": 2, "d": 2},
    {"study": "b", "t": 4, "p": 1, "d": 2, "recompute": "none"},
    {"study": "b", "t": 1, "p": 1, "d": 8, "mbs": 1},
]


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> list[Rebuilt]:
    """Runs whose measured step is what other figures predict."""
    folder = tmp_path_factory.mktemp("rows")
    found: list[Rebuilt] = []
    for number, shape in enumerate(SHAPES):
        run = run_of(folder, id=f"r-{number}", **{**LARGE, **shape})
        made = rebuilt_of(run)
        step = estimate_step(made.program, applied(made.cluster, TRUE), behaviour=made.behaviour)
        found.append(replace(made, run=msgspec.structs.replace(run, seconds=step.seconds)))
    return found


LARGE = {"hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 8192, "seq": 512, "gbs": 64}


def test_figures_are_found_again(made_up: list[Rebuilt], tmp_path: Path) -> None:
    said: list[str] = []
    fitted = fit(made_up, said.append)
    errors = errors_by_study(made_up, fitted)
    assert list(errors) == ["a", "b", "all"]
    assert errors["all"].rows == 5 and errors["all"].fitted < 3
    before = [
        estimate_step(r.program, r.cluster, behaviour=r.behaviour).seconds / (r.run.seconds or 0)
        for r in made_up
    ]
    assert max(abs(ratio - 1) for ratio in before) > 0.1
    assert errors["all"].held_out < 15 and errors["b"].held_out_worst >= errors["b"].held_out
    figures = fitted.figures
    parts = [name for name in names_of(figures) if name[0] not in ("depth", "dispatch")]
    assert all(0 < value_of(figures, name) <= 1 for name in parts)
    assert any("by the others" in text for text in said)
    files = cluster_files(made_up, fitted, tmp_path)
    (path,) = files
    path.write_text(files[path])
    cluster = load_cluster(path)
    nominal = load_cluster("a100-selene")
    assert cluster.device.peak_flops == nominal.device.peak_flops
    assert cluster.device.kernels.multiprocessors == 108
    assert all(a.bandwidth == b.bandwidth for a, b in zip(cluster.levels, nominal.levels, strict=True))
    assert cluster.levels[0].efficiency == pytest.approx(figures.inside, rel=1e-3)


def test_parts_of_a_whole_stay_parts() -> None:
    start = Figures({DEVICE: 0.9})
    high = moved(start, dict.fromkeys(names_of(start), 5.0))
    assert high.efficiency[DEVICE] == 1.0 and high.inside == 1.0 and high.depth > start.depth
    assert moved(start, {("depth", ""): -0.1}).depth == pytest.approx(start.depth * 0.9048374)


def test_devices_of_more_flops_per_watt_sustain_less() -> None:
    def part(name: str, **more: float) -> float:
        cluster = load_cluster(name)
        figures = replace(Figures({cluster.device.name: 0.8}, sustained=0.9), **more)
        return applied(cluster, figures).device.matmul_efficiency

    assert part("a100-selene", throttle=0.2) == part("a100-selene", throttle=0.4) == pytest.approx(0.72)
    # 989 TFLOP/s in 700 W, 312 in 400
    assert part("h100-dgx", throttle=0.2) == pytest.approx(0.72 * (989 / 700 / (312 / 400)) ** -0.2)
    assert part("h100-dgx", throttle=0.4) < part("h100-dgx", throttle=0.2) < 0.72
    assert part("v100-dgx2", throttle=2.0) == 1.0  # no more than the peak


def test_tiles_begin_and_end_by_the_memory() -> None:
    def depth(name: str) -> float:
        cluster = load_cluster(name)
        return applied(cluster, Figures({cluster.device.name: 0.8}, depth=200.0)).device.kernels.depth

    assert depth("a100-selene") == pytest.approx(200.0)
    # 989 TFLOP/s and 3.35 TB/s, of 312 and 2.039
    assert depth("h100-dgx") == pytest.approx(200.0 * (989 / 3.35) / (312 / 2.039))


def test_one_study_is_not_enough(made_up: list[Rebuilt]) -> None:
    with pytest.raises(UsageError, match="two studies"):
        fit(made_up[:3])


def test_the_command_writes_cluster_files(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([row(id=f"r-{k}", study=s) for k, s in enumerate("ab")]))
    alone = CliRunner().invoke(app, ["validate", str(rows), "--fit"])
    assert alone.exit_code == 2 and "--out" in alone.stderr
    out = tmp_path / "clusters"
    result = CliRunner().invoke(app, ["validate", str(rows), "--fit", "-o", str(out), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["schema"] == 2 and set(found["studies"]) == {"a", "b", "all"}
    assert [Path(p) for p in found["written"]] == list(out.iterdir())
    assert load_cluster(out / "a100-selene-fitted.toml").name == "a100-selene-fitted"
