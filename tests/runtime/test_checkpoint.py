"""Checkpoints of parallel models on four gloo processes: see `checkpoint_worker`."""

from __future__ import annotations

from pathlib import Path

from ranks import HERE, run_ranks
from sampling import all_cases


def test_checkpoints_of_parallel_models(tmp_path: Path) -> None:
    output = run_ranks([str(HERE / "checkpoint_worker.py"), str(tmp_path)])
    assert output.count(" works") == (8 if all_cases() else 5), output[-4000:]
