"""Training under torchrun with ranks killed at random moments: the losses are those of a run in peace.

``python tests/kills.py --kills 20 --mesh dp=2,tp=2`` kills that often, over as many starts as it takes, and
prints what of them is left in /dev/shm and of processes. With ``--stop`` ranks are stopped (SIGSTOP): those
that wait for one name it and end within AUTOSHARD_TIMEOUT.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESTARTS = 3
#: AUTOSHARD_TIMEOUT where ranks are stopped: more than a first step takes
PATIENCE = 12


def free_port() -> int:
    """A TCP port of this machine that nothing listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def losses_of(folder: Path) -> dict[int, float]:
    """Of every step, what was written last."""
    path = folder / "losses"
    if not path.is_file():
        return {}
    return {step: loss for step, loss in map(json.loads, path.read_text().splitlines())}


def written(folder: Path) -> int:
    """Steps that were made, some of them several times."""
    path = folder / "losses"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def start(
    folder: Path, mesh: str, ranks: int, steps: int, waiting: str, nodes: int, how: signal.Signals
) -> list[subprocess.Popen[str]]:
    """torchrun, once for each node, all of them on this machine."""
    port = free_port()
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    if how == signal.SIGSTOP:
        env["AUTOSHARD_TIMEOUT"] = str(PATIENCE)
    jobs = []
    for node in range(nodes):
        words = ["-m", "torch.distributed.run", "--nnodes", nodes, "--node-rank", node]
        words += ["--nproc-per-node", ranks // nodes, "--max-restarts", RESTARTS]
        words += ["--master-addr", "127.0.0.1", "--master-port", port, HERE / "restart_worker.py"]
        command = [sys.executable, *map(str, [*words, folder, mesh, steps, waiting])]
        with (folder / "log").open("a") as log:
            jobs.append(
                subprocess.Popen(
                    command, env=env, stdout=log, stderr=subprocess.STDOUT, text=True, cwd=folder
                )
            )
    return jobs


def pids(folder: Path, ranks: int) -> list[int]:
    """Of the ranks that train; empty while they start."""
    files = [folder / f"pid-{k}" for k in range(ranks)]
    return [int(f.read_text()) for f in files] if all(f.is_file() for f in files) else []


def killed(
    folder: Path,
    mesh: str,
    ranks: int,
    steps: int,
    kills: int,
    seed: int,
    waiting: str = "wait",
    nodes: int = 1,
    how: signal.Signals = signal.SIGKILL,
) -> int:
    """Train to the end, with ranks killed on the way. Returns how often one was."""
    draw, done = random.Random(seed), 0
    # before the first step, or once there are more
    early, seen = False, 0
    deadline = time.monotonic() + 240 * (kills + 1)
    jobs = start(folder, mesh, ranks, steps, waiting, nodes, how)
    try:
        while time.monotonic() < deadline:
            if all(job.poll() is not None for job in jobs):
                ended = all(job.returncode == 0 for job in jobs)
                if ended and max(losses_of(folder), default=-1) == steps - 1:
                    return done
                # all restarts are used up, as a scheduler would see it
                jobs = start(folder, mesh, ranks, steps, waiting, nodes, how)
            there = pids(folder, ranks)
            if there and done < kills and (early or written(folder) > seen):
                time.sleep(draw.uniform(0.0, 3.0 if early else 1.0))
                victim = draw.choice(there)
                early, seen = draw.random() < 0.25, written(folder)
                for k in range(ranks):
                    (folder / f"pid-{k}").unlink(missing_ok=True)
                try:
                    os.kill(victim, how)
                    done += 1
                except ProcessLookupError:
                    pass  # the run came to its end
            time.sleep(0.05)
        raise TimeoutError((folder / "log").read_text()[-4000:])
    finally:
        for job in jobs:
            if job.poll() is None:
                job.terminate()
                job.wait(60)


def named(folder: Path) -> int:
    """How often a rank that stood still was named."""
    return (folder / "log").read_text().count("not been heard of: stopped, or gone")


def left_of(folder: Path) -> list[str]:
    """Processes that belong to a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if str(folder).encode() in words:
            found.append(path.parent.name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--mesh", default="dp=2,tp=2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=1, help="that torchrun is started for, here")
    parser.add_argument("--go-on", action="store_true", help="while checkpoints are written")
    parser.add_argument("--stop", action="store_true", help="ranks instead of killing them")
    given = parser.parse_args()
    how, memory = signal.SIGSTOP if given.stop else signal.SIGKILL, set(os.listdir("/dev/shm"))
    waiting = "go on" if given.go_on else "wait"
    with tempfile.TemporaryDirectory() as peace, tempfile.TemporaryDirectory() as war:
        killed(Path(peace), given.mesh, 4, given.steps, 0, given.seed)
        done = killed(
            Path(war), given.mesh, 4, given.steps, given.kills, given.seed, waiting, given.nodes, how
        )
        left = sorted(set(os.listdir("/dev/shm")) - memory), left_of(Path(war)), named(Path(war))
        one, other = losses_of(Path(peace)), losses_of(Path(war))
        runs = sum(1 for _ in (Path(war) / "losses").open())
    same = sum(one[k] == other[k] for k in one)
    print(f"{done} kills, {runs} steps for {given.steps}; {same} of {len(one)} losses equal to the bit")
    print(f"left in /dev/shm {left[0]}, processes {left[1]}; stopped ranks named {left[2]} times")
    raise SystemExit(one != other or bool(left[0] or left[1]))


if __name__ == "__main__":
    main()
