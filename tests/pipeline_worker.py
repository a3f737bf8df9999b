"""Started by torchrun: train every given pipeline three steps beside the eager model.

Arguments: a JSON file with a list of ``{"family", "program", "microbatches"}``, and where to
write the results.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from gloo_worker import ADAM, STEPS, errors_of, train
from leaving import leave
from pipelines import model_and_batch
from torch import nn

import autoshard

#: (family, microbatches) -> a model and the batch of a step
Make = Callable[[str, int], tuple[nn.Module, dict[str, torch.Tensor]]]


@functools.cache
def eager(make: Make, name: str, microbatches: int) -> tuple[nn.Module, list[float]]:
    """The trained model of one device, and its losses."""
    wanted, batch = make(name, microbatches)
    return wanted, train(wanted, batch, clip=True, pieces=False)


def run_case(case: dict[str, str], make: Make) -> dict[str, float]:
    """Relative errors of losses and of the parameters that this rank holds, after training."""
    name, microbatches = case["family"], int(case["microbatches"])
    wanted, expected = eager(make, name, microbatches)
    _, batch = make(name, microbatches)
    model, _ = make(name, 1)
    parallel = autoshard.load(case["program"], model)
    # some step with torch's optimizer, some with autoshard's, which clips on the way
    own = microbatches % 2 == 1
    optimizer: torch.optim.Optimizer
    if own:
        optimizer = autoshard.AdamW(parallel.parameters(), **ADAM, clip_norm=0.5)
    else:
        optimizer = torch.optim.AdamW(parallel.parameters(), **ADAM)
    found = []
    for _ in range(STEPS):
        loss = parallel.train_step(batch)
        if not own:
            autoshard.clip_grad_norm_(parallel, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return errors_of(parallel, wanted, found, expected)


def main(make: Make = model_and_batch) -> None:
    torch.set_num_threads(1)
    cases = json.loads(Path(sys.argv[1]).read_text())
    results = []
    for case in cases:
        start = time.perf_counter()
        errors = run_case(case, make)
        worst = max(errors, key=lambda k: errors[k])
        row = {**case, "worst": worst, "error": errors[worst], "held": sorted(errors)}
        rows: list[dict[str, object]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(rows, row)
        results.append(
            {
                **max(rows, key=lambda r: float(str(r["error"]))),
                "held": sorted({str(n) for r in rows for n in r["held"]}),  # type: ignore[attr-defined]
                "seconds": time.perf_counter() - start,
            }
        )
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
