"""The API of pipelines on four gloo processes: see `pipeline_api_worker`."""

from __future__ import annotations

from pathlib import Path

from ranks import HERE, run_ranks
from sampling import all_cases


def test_ways_to_train_a_pipeline(tmp_path: Path) -> None:
    output = run_ranks([str(HERE / "pipeline_api_worker.py"), str(tmp_path)])
    assert output.count(" works") == (10 if all_cases() else 5), output[-4000:]
