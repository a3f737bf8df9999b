"""Start torchrun from a script, so that nothing it started outlives the script."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

_PR_SET_PDEATHSIG = 1


def torchrun(
    arguments: Sequence[str], ranks: int, *, env: Mapping[str, str] | None = None, stdout: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``torchrun ... arguments`` (a script, or ``-m`` and a module) on loopback and a free port.

    One thread per rank. The processes end with the caller: on its Ctrl-C, its errors, and (on Linux) its
    sudden death. stdout: ``subprocess.PIPE`` to get the output back.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost"),
        *arguments,
    ]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    process = subprocess.Popen(
        command, env=surroundings, stdout=stdout, text=True, preexec_fn=_die_with_parent()
    )
    try:
        out, _ = process.communicate()
    finally:
        _end(process)
    return subprocess.CompletedProcess(command, process.returncode, out)


def _end(process: subprocess.Popen[str]) -> None:
    """torchrun ends its ranks when it is asked to end; killed outright, it could not."""
    if process.poll() is not None:
        return
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=20)
        return
    process.kill()
    process.wait()


def _die_with_parent() -> Callable[[], object] | None:
    """What a child runs first on Linux: ask for SIGTERM when its parent dies."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
