"""Started by `tests.ranks`: each rank runs the scripts of a file, one after the other, and writes what became
of them."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import traceback
import warnings
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from leaving import leave

from fuzz.case import Outcome
from fuzz.step_case import run

#: seconds in which the others must end a case once one rank has
LATE = 20.0
WAITED, DIFFER = 9, 8


def main() -> None:
    """Arguments: the folder with ``cases``, the first of them, and the seconds that each may take."""
    folder, first, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    cases = pickle.loads((folder / "cases").read_bytes())
    with (folder / f"rank{rank}").open("a") as out:
        for number in range(first, len(cases)):
            guard = threading.Timer(seconds, os._exit, (WAITED,))
            guard.start()
            try:
                outcome = run(*cases[number])
            except BaseException:
                outcome = Outcome("failed", "fuzzer", traceback.format_exc())
            out.write(json.dumps({"case": number, **asdict(outcome)}) + "\n")
            out.flush()
            store.set(f"{number}/{rank}", f"{outcome.kind} {outcome.failure}")
            others = [f"{number}/{r}" for r in range(ranks)]
            try:
                store.wait(others, timedelta(seconds=LATE))
            except Exception:
                os._exit(WAITED)
            guard.cancel()
            if len({store.get(key) for key in others}) > 1:
                os._exit(DIFFER)  # who knows what is on its way between them
    leave()


if __name__ == "__main__":
    main()
