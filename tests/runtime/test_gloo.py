"""The API on four gloo processes: see `gloo_api_worker`."""

from __future__ import annotations

from pathlib import Path

from ranks import HERE, run_ranks


def test_api_on_four_processes(tmp_path: Path) -> None:
    """DeviceMesh, decorator, lazy form, kinds of inputs, dropout, checkpoint, wrong worlds."""
    assert "all ways work" in run_ranks([str(HERE / "gloo_api_worker.py"), str(tmp_path)])
