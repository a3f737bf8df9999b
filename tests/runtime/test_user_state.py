"""What users do to a model around its calls, on four processes."""

from __future__ import annotations

from pathlib import Path

from ranks import HERE, run_ranks


def test_hooks_losses_attributes_optimizers_and_batches(tmp_path: Path) -> None:
    assert "all is as it is" in run_ranks([str(HERE / "user_state_worker.py"), str(tmp_path / "program")])
