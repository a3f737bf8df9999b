"""Started by `benchmarks.saving` on 4 processes: how long saving a checkpoint keeps training from going on.

Argument: the file that the first rank writes its figures to, as JSON. Ways take turns; a figure is that of
the slowest rank.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard
from autoshard.runtime.optim.optimizer_hooks import local
from autoshard.runtime.training_state import training_state
from benchmarks.ranks import worst_of

ROUNDS = 5
CONFIG = {"vocab_size": 8192, "hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 8}


def main(out: Path) -> None:
    torch.set_num_threads(1)
    autoshard.init_process_group()
    torch.manual_seed(0)
    batch = dict.fromkeys(("input_ids", "labels"), torch.randint(512, (4, 8)))
    model = autoshard.parallelize(
        LlamaForCausalLM(LlamaConfig(**CONFIG, num_attention_heads=10)), "fsdp=4", example_inputs=batch
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    held = [*model.parameters(), *(x for s in optimizer.state.values() for x in s.values())]
    nbytes = sum(local(x).nbytes for x in held)
    with TemporaryDirectory() as own:
        folder: list[Any] = [own]
        dist.broadcast_object_list(folder, 0)
        checkpoints = autoshard.Checkpoints(Path(folder[0]), model, optimizer, keep=1)
        times = _measured(checkpoints, Path(folder[0]) / "raw", step)
    if dist.get_rank() == 0:
        seconds = {name: median(each) for name, each in times.items()}
        device = next(model.parameters()).device.type
        out.write_text(json.dumps({"bytes": nbytes, "device": device, "seconds": seconds}))
    dist.barrier()
    dist.destroy_process_group()


def _measured(
    checkpoints: autoshard.Checkpoints, raw: Path, step: Callable[[], None]
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    group = dist.new_group(backend="gloo")
    writing: list[Future[Any]] = []

    def torchs(number: int) -> None:
        state = training_state(checkpoints.model, checkpoints.optimizer)
        saving = async_save(state, storage_writer=FileSystemWriter(raw / str(number)), process_group=group)
        assert isinstance(saving, Future)
        writing.append(saving)

    def timed(name: str, call: Callable[[], None], keep: bool) -> None:
        dist.barrier()
        begin = time.perf_counter()
        call()
        took = worst_of(time.perf_counter() - begin)
        if keep:
            found.setdefault(name, []).append(took)

    for number in range(1, ROUNDS + 2):  # the first makes kept memory, and does not count
        keep = number > 1
        timed("step", step, keep)
        timed("save", partial(checkpoints.save, 10 * number), keep)
        timed("async_save", partial(checkpoints.save, 10 * number + 1, wait=False), keep)
        timed("step while writing", step, keep)
        timed("rest of the writing", checkpoints.wait, keep)
        timed("dcp.async_save", partial(torchs, number), keep)
        writing.pop().result()
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
