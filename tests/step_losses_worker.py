"""Started by torchrun on 4: losses and gradients of steps, and gradients that ranks scale unlike."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo_api_worker import check
from leaving import leave
from lockstep_check import relative_error
from pipelines import model_and_batch
from step_losses import Counted, Net, batch
from torch import nn

import autoshard
from autoshard.runtime.train import accumulate

CASES = (
    ("labels", "pp=2,dp=2", "1f1b", 4),
    ("several", "pp=2,dp=2", "1f1b", 2),
    ("class weights", "pp=2,tp=2", "zb-h1", 4),
    ("all elements", "pp=4", "1f1b", 4),
    ("own weights", "pp=2,dp=2", "interleaved", 2),
    ("samples", "pp=2,fsdp=2", "gpipe", 2),
)


def parallel(model: nn.Module, mesh: str, schedule: str, microbatches: int, inputs: dict[str, Any]) -> Any:
    return autoshard.parallelize(
        model, mesh, example_inputs=inputs, schedule=schedule, microbatches=microbatches
    )


def error(wanted: nn.Module, found: Any, inputs: dict[str, Any]) -> float:
    """Of the loss and of the gradients that this rank has."""
    expected = wanted(**inputs)
    expected.backward()
    loss = accumulate(found, ((), inputs))
    reference = dict(wanted.named_parameters())
    errors = [abs(float(loss) - float(expected.detach())) / abs(float(expected.detach()))]
    for name, p in found.named_parameters():
        if p.grad is not None:
            errors.append(relative_error(p.grad.full_tensor(), reference[name].grad))  # type: ignore[arg-type]
    return max(errors)


def scaled(scale: Callable[[Any, int], object]) -> str:
    """What two steps say whose gradients are scaled between."""
    model, inputs = model_and_batch("llama-deep", 4)
    model = autoshard.load(sys.argv[2], model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        for step in range(3):
            model.train_step(inputs)
            scale(model, step)
            optimizer.step()
            optimizer.zero_grad()
    except autoshard.UsageError as raised:
        return str(raised)
    return ""


def unlike_scales() -> None:
    told = scaled(lambda model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    check("autoshard.clip_grad_norm_" in told, f"torch's clipping: {told!r}")
    plain: dict[str, Callable[[Any, int], object]] = {
        "nothing": lambda model, _: None,
        "ours": lambda model, _: autoshard.clip_grad_norm_(model, 0.1),
        "elements": lambda model, _: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3),
        "all alike": lambda model, _: [p.grad.mul_(0.25) for p in model.parameters()],
        "none": lambda model, _: model.zero_grad(),
        "zeros": lambda model, _: model.zero_grad(set_to_none=False),
        "some of a rank": lambda model, _: next(iter(model.parameters())).grad.mul_(dist.get_rank() + 1),
        "large": lambda model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6),
    }
    for name, scale in plain.items():
        told = scaled(scale)
        check(not told, f"{name}: {told}")


def main() -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for loss, mesh, schedule, microbatches in CASES:
        found = parallel(Net(loss), mesh, schedule, microbatches, batch())
        rows.append({"case": [loss, mesh, schedule], "error": error(Net(loss), found, batch())})
    for items in (45, torch.tensor(45)):
        given = {**batch(), "num_items_in_batch": items}
        found = parallel(Counted("sum"), "pp=2,dp=2", "1f1b", 4, given)
        rows.append({"case": ["items", str(items)], "error": error(Counted("sum"), found, given)})
    for row in rows:
        worst = torch.tensor(row["error"])
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        row["error"] = float(worst)
    unlike_scales()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(rows))
    leave()


if __name__ == "__main__":
    main()
