"""Started by torchrun: train every given program three steps beside the eager model, some of it offloaded.

Arguments: a JSON file with a list of ``{"family", "program", "microbatches"}``, and where to write the
results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from families import family
from gloo_worker import ADAM, STEPS, errors_of, train
from leaving import leave
from pipelines import model_and_batch
from torch import nn

import autoshard
from autoshard.runtime.module import ParallelModule


def adam(parallel: nn.Module) -> torch.optim.Optimizer:
    """AdamW in the memory that the program says; small buckets, so that there are several."""
    assert isinstance(parallel, ParallelModule)
    if not parallel._autoshard.program.offload.optimizer:
        return torch.optim.AdamW(parallel.parameters(), **ADAM)
    return autoshard.HostOptimizer(
        parallel.parameters(), lambda params: torch.optim.AdamW(params, **ADAM), bucket=8192
    )


def run_case(case: dict[str, str]) -> dict[str, float]:
    """Relative errors of losses and of the parameters that this rank holds, after training."""
    pieces = int(case["microbatches"])
    make = family(case["family"]).make
    wanted, batch = model_and_batch(case["family"], pieces) if pieces > 1 else make()
    expected = train(wanted, batch, clip=True, pieces=False)
    model, _ = make()
    parallel = autoshard.load(case["program"], model)
    optimizer = adam(parallel)
    found = []
    for _ in range(STEPS):
        if pieces > 1:
            loss = parallel.train_step(batch)
        else:
            loss = parallel(**batch).loss
            loss.backward()
        autoshard.clip_grad_norm_(parallel, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return errors_of(parallel, wanted, found, expected)


def main() -> None:
    torch.set_num_threads(1)
    cases = json.loads(Path(sys.argv[1]).read_text())
    results = []
    for case in cases:
        errors = run_case(case)
        worst = max(errors, key=lambda k: errors[k])
        row = {**case, "worst": worst, "error": errors[worst]}
        rows: list[dict[str, object]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(rows, row)
        results.append(max(rows, key=lambda r: float(str(r["error"]))))
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
