"""The API on four gloo processes that torchrun starts: see `gloo_api_worker`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ranks import HERE, told


def torchrun(arguments: list[str], timeout: float = 600) -> str:
    """Run a script on four processes, which end with this call whatever happens."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    process = subprocess.Popen(
        [*command, *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    assert process.returncode == 0, told(output)
    return output


def test_api_on_four_processes(tmp_path: Path) -> None:
    """DeviceMesh, decorator, lazy form, kinds of inputs, dropout, checkpoint, wrong worlds."""
    assert "all ways work" in torchrun([str(HERE / "gloo_api_worker.py"), str(tmp_path)])
