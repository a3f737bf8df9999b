"""Triton decides at import whether it interprets, so what needs it runs in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
Worker = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    """Runs a script of this folder with arguments; the JSON documents that it prints, line by line."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")

    def run(script: str, *arguments: str) -> list[dict[str, Any]]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
            "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, str(HERE / script), *arguments], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run
