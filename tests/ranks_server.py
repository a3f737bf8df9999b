"""Started by `ranks`: forks processes that train together, as torchrun starts them.

Reads a job a line: ``{"arguments", "ranks", "timeout", "env", "log"}``; writes a line when it is done: what
went wrong, or "".
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

#: what workers need
MODULES = (
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch._dynamo",
    "autoshard.api",
    "benchmarks.estimates_worker",
    "gloo_worker",
    "pipelines",
)
MODELS = (
    "BertForMaskedLM",
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
)
#: seconds between looks at what has ended
PERIOD = 0.02


def run(job: dict[str, Any]) -> str:
    """Fork the processes of a job and wait for all of them; what went wrong, "" for nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    running = {_fork(job, rank, port, listener): rank for rank in range(job["ranks"])}
    # threads of the store begin when all have been forked
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    end = time.monotonic() + job["timeout"]
    failed = ""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank, code = running.pop(pid), os.waitstatus_to_exitcode(status)
            failed = failed or (f"rank {rank} ended with {code}" if code else "")
        elif time.monotonic() > end:
            failed = failed or f"not done after {job['timeout']} s"
        else:
            time.sleep(PERIOD)
        if failed:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
    del store
    return failed


def _fork(job: dict[str, Any], rank: int, port: int, listener: socket.socket) -> int:
    """The process that becomes a rank; it never comes back from here."""
    pid = os.fork()
    if pid:
        return pid
    listener.close()
    code = 1
    try:
        _become(job, rank, port)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(job: dict[str, Any], rank: int, port: int) -> None:
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job["ranks"]),
        LOCAL_WORLD_SIZE=str(job["ranks"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        **job["env"],
    )
    sys.argv = job["arguments"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    for name in MODULES:
        import_module(name)
    for name in MODELS:
        getattr(import_module("transformers"), name)
    # what has been imported is shared by all that are forked: nobody looks through it, and so writes to it
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
