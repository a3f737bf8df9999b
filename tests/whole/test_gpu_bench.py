"""`make gpu` at small sizes on the CPU: all that it does but the kernels, which tests of kernels run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from autoshard.cluster import load_cluster
from benchmarks import gpu, gpu_steps
from benchmarks.gpu_ranks import SMALL_RANK_CASES, rank_row
from benchmarks.gpu_steps import SMALL, step_rows

CPU = torch.device("cpu")


def test_a_rank_of_a_mesh_that_is_not_there() -> None:
    row = rank_row(SMALL_RANK_CASES[0], load_cluster("h100-dgx"), CPU, "interpreter")
    assert row.cells[0] == SMALL_RANK_CASES[0].text and row.cells[1].endswith(" ms")
    names = {name for _, name, *_ in row.parts}
    assert {"layers_fwd", "layers_bwd"} <= names


def test_steps_of_all_sides_make_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_steps, "ROUNDS", 1)
    monkeypatch.setattr(gpu_steps, "SIDES", ("eager", "interpreter, kernels", "interpreter, mxfp8"))
    rows = list(step_rows(SMALL, CPU))
    assert [row[0] for row in rows] == ["eager", "ours, interpreter, kernels", "ours, interpreter, mxfp8"]
    eager, kernels, casts = (row[-1] for row in rows)
    assert eager == kernels and abs(float(casts) - float(eager)) < 0.05


def test_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "docs" / "gpu.md"
    monkeypatch.setattr(sys, "argv", ["gpu", "kernels", "--small", "-o", str(out)])
    assert gpu.main() == 0
    assert "| rms_norm | 8192 x 8192 |" in out.read_text() and "# One GPU" in out.read_text()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 1 and "--small" in capsys.readouterr().err
