"""Started by `peers` on some processes: scripts under one tool, compared with what one plain process found.

``peers_worker.py TOOL FOLDER SECONDS SCRIPT ...`` writes a file for each script: what came of it. An error
ends the worker, as it leaves ranks in unlike states; so does a script that takes longer than SECONDS.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from autoshard.errors import AutoshardError
from benchmarks.peers_rows import SCRIPTS, Found
from benchmarks.peers_tools import TOOLS, NotOffered, Tool

#: (losses, weights) of a script -> largest difference that counts as none
TOLERANCE = (1e-4, 1e-3)
#: what is computed in bfloat16, by Muon itself too
TOLERANCES = {"bf16 autocast": (1e-2, 1e-1), "Muon": (1e-2, 1e-1)}
#: losses under other random draws are this close
DRAWS = 5e-2
#: of messages that say in words of the script what there is not or what to do; chosen by hand
CLEAR = ("FSDP does not support deepcopy", "For shared/tied parameters, use", "has no `tp_plan`")


def differences(found: Found, wanted: Found, first: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Of losses, relative; of all weights, relative to how far one process has moved them."""
    if found["weights"].keys() != wanted["weights"].keys():
        return float("inf"), float("inf")
    pairs = zip(found["losses"], wanted["losses"], strict=False)
    losses = max(abs(a - b) / abs(b) if a == a else float("inf") for a, b in pairs)
    apart = sum(float((found["weights"][k] - x).norm() ** 2) for k, x in wanted["weights"].items())
    moved = sum(float((x - first[k]).norm() ** 2) for k, x in wanted["weights"].items() if k in first)
    return losses, (apart / moved) ** 0.5


def verdict(name: str, found: Found, wanted: Found) -> dict[str, Any]:
    apart = differences(found, wanted, wanted["first"])
    said = {"losses": apart[0], "weights": apart[1]}
    close = all(a <= b for a, b in zip(apart, TOLERANCES.get(name, TOLERANCE), strict=True))
    if found.get("same") != wanted.get("same"):
        return said | {"outcome": "wrong number", "same": [str(found["same"]), str(wanted["same"])]}
    if close and len(found["losses"]) == len(wanted["losses"]):
        return said | {"outcome": "works"}
    return said | {"outcome": "other draws" if name == "dropout" and apart[0] < DRAWS else "wrong number"}


def run(tool: Tool, name: str, folder: Path, plain: Path) -> None:
    """One script; its outcome is in a file."""
    torch.manual_seed(0)
    out = folder / f"{name}.json"
    try:
        tool.begin()
        found = SCRIPTS[name](tool)
    except NotOffered:
        out.write_text(json.dumps({"outcome": "not offered"}))
        return
    except Exception as error:  # told of in the table
        said: dict[str, Any] = {
            "type": type(error).__name__,
            "message": str(error),
            "trace": traceback.format_exc(),
        }
        said["clear"] = isinstance(error, AutoshardError) or any(words in str(error) for words in CLEAR)
        told = folder / f"{name}.error.{dist.get_rank()}"
        told.write_text(json.dumps(said | {"time": time.time()}))
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if dist.get_rank() == 0:
        if folder == plain:
            torch.save(found | {"first": tool.first}, folder / f"{name}.pt")
            out.write_text(json.dumps({"outcome": "works"}))
        else:
            out.write_text(json.dumps(verdict(name, found, torch.load(plain / f"{name}.pt"))))
    dist.barrier()


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name, folder, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group("gloo")
    here = folder / name
    here.mkdir(exist_ok=True)
    tool = TOOLS[name](here)
    for script in sys.argv[4:]:
        (here / f"{script}.begun").touch()
        faulthandler.dump_traceback_later(seconds, exit=True)
        run(tool, script, here, folder / "one process")
        faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as `leaving` does, and what a tool left open may not hold it up


if __name__ == "__main__":
    main()
