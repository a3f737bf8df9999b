"""One rank compiles for all, on four processes; programs are kept on disk."""

from __future__ import annotations

from pathlib import Path

from ranks import HERE, run_ranks


def test_one_rank_compiles_for_all_and_the_cache_for_the_next_start(tmp_path: Path) -> None:
    assert "one compiles, all run" in run_ranks([str(HERE / "compile_once_worker.py"), str(tmp_path)])
