"""Processes that train together, forked from one that has imported torch, transformers and autoshard.

Four interpreters that import these take 25 s of processor time before they do anything. Started by torchrun
itself, each with imports, hashes and random seeds of its own, are those of `test_launch`.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Forks:
    """The process that forks; it ends with the end of its standard input, and so with this process."""

    process: subprocess.Popen[str]

    def run(self, job: dict[str, object]) -> str:
        """What it says of a job that it did: "" if all went well."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the process that forks has ended"
        return str(json.loads(answer))


@functools.cache
def forks() -> Forks:
    """One for each process of the tests."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(HERE / "ranks_server.py")]
    return Forks(subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))


def run_ranks(arguments: list[str], *, ranks: int = 4, timeout: float = 600, **env: str) -> str:
    """Run a script on some processes, with torchrun's variables; what they printed, if none of them failed.

    timeout: seconds after which all of them are killed. env: further variables of theirs.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        job = {"arguments": arguments, "ranks": ranks, "timeout": timeout, "env": env, "log": str(log)}
        failed = forks().run(job)
        output = log.read_text(errors="replace")
    assert not failed, f"{failed}\n{told(output)}"
    return output


def told(output: str) -> str:
    """The end of what processes printed, and where one crashed, which stands before the reports of others."""
    crash = output.find("Fatal Python error")
    return (output[crash : crash + 4000] + "\n...\n" if crash >= 0 else "") + output[-4000:]
