"""The benchmark of kernels: its checks and its table, with a stopwatch that counts on a CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autoshard.kernels.registry import KernelSpec, specs
from benchmarks import kernels as bench
from benchmarks import kernels_rows
from benchmarks.kernels_measure import Stopwatch
from benchmarks.kernels_rows import GOALS, Row, check, rows

CPU = torch.device("cpu")


class Counted(Stopwatch):
    """Runs each call once; the first of a row takes one second, the second two, and so on."""

    def issue_seconds(self, call: Callable[[], object]) -> float:
        return 0.5

    def seconds(self, call: Callable[[], object]) -> float:
        call()
        CALLS.append(1.0)
        return float(len(CALLS))


CALLS: list[float] = []


@pytest.mark.parametrize("spec", specs().values(), ids=lambda s: s.name)
def test_check_runs_every_kernel(spec: KernelSpec) -> None:
    assert check(spec, 1, CPU) <= 1


def test_check_finds_a_wrong_kernel() -> None:
    """Results that are not the reference's are far beyond what is allowed."""
    spec = specs()["autoshard.rms_norm.default"]

    def wrong(*args: object) -> tuple[torch.Tensor, ...]:
        y, rstd = spec.reference(*args)
        return y * 1.05, rstd

    found = kernels_rows._results(spec, wrong, next(iter(spec.samples(None, torch.float32, CPU))))
    true = kernels_rows._results(spec, spec.reference, next(iter(spec.samples(None, torch.float32, CPU))))
    assert kernels_rows._error(spec, true[0], true[0], true[0].double()) <= 1
    assert kernels_rows._error(spec, found[0], true[0], true[0].double()) > 1


def test_rows_without_a_gpu_are_not_measured() -> None:
    found = list(rows(None, ["rms_norm", "adamw_shard"], compiled=False))
    assert {r.name for r in found} == {"rms_norm", "adamw_shard"}
    assert all(r.seconds is None and not r.others for r in found)
    assert next(r for r in found if r.name == "adamw_shard").cost.moved == 32 * 2**27 + 4


def test_a_row_is_timed_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = specs()["autoshard.dequantise_rows.default"]
    args = next(iter(spec.samples(torch.Generator().manual_seed(0), torch.bfloat16, CPU)))
    monkeypatch.setattr(sys.modules[__name__], "CALLS", [])
    row = kernels_rows._row(spec, args, Counted(CPU, torch.empty(0)), False)
    assert (row.seconds, row.issue) == (1.0, 0.5) and dict(row.others) == {
        "eager": 2.0,
        "compile": "-",
        "liger": "-",
    }

    def fails() -> Callable[[], object]:
        raise ValueError("no such thing\nmore")

    assert kernels_rows._timed(Counted(CPU, torch.empty(0)), fails) == "failed: no such thing"


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["kernels", "xent_stats", "--json", str(out)])
    assert bench.main() == 0
    assert "not measured" in capsys.readouterr().out
    document = json.loads(out.read_text())
    assert document["device"] is None and [r["name"] for r in document["rows"]] == ["xent_stats"]
    monkeypatch.setattr(sys, "argv", ["kernels", "xent"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "no kernel xent" in capsys.readouterr().err


def test_table_of_measured_rows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = specs()["autoshard.rms_norm.default"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    cost = next(iter(rows(None, ["rms_norm"], compiled=False))).cost
    row = Row(
        "rms_norm",
        "8192 x 8192",
        cost,
        cost.moved / 2e12,
        3e-5,
        (("eager", cost.moved / 1e12), ("compile", "-")),
    )
    bench._print([row], {"rms_norm": 0.25}, 4e12, 7)
    shown = capsys.readouterr().out
    assert "a copy moves 4.00 TB/s, seed 7" in shown and "50%" in shown and "2.00 x" in shown
    assert f"{GOALS[spec.name]:.0%}" in shown and "0.25" in shown and " 30 " in shown
