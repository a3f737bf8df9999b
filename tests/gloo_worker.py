"""Started by torchrun: train every given program three steps beside the eager model.

Arguments: a JSON file with a list of ``{"family", "mesh", "program", "steps_of"}``, and where to write the
results. steps_of: ``call``, one call of the model a step, or ``microbatches``.
"""

from __future__ import annotations

import functools
import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from families import family
from leaving import leave
from lockstep_check import relative_error
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.runtime.train import accumulate

STEPS = 3
#: large enough that gradients which are zero in exact arithmetic do not become full Adam steps
ADAM = {"lr": 1e-2, "eps": 1e-4}


def train(
    model: nn.Module, inputs: dict[str, torch.Tensor], clip: bool, pieces: bool, own: bool = False
) -> list[float]:
    """Losses of a few AdamW steps, with the gradients clipped by their global norm.

    pieces: whether the batch is that of all microbatches of the program. own: whether the optimizer is
    autoshard's, which clips on the way.
    """
    make = partial(autoshard.AdamW, clip_norm=0.5 if clip else None) if own else torch.optim.AdamW
    optimizer = make(model.parameters(), **ADAM)
    losses = []
    for _ in range(STEPS):
        if pieces:
            loss = accumulate(model, ((), inputs))
        else:
            loss = model(**inputs).loss
            loss.backward()
        if clip and not own:
            autoshard.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def made(name: str, pieces: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model and its batch; pieces: whether that is divided into microbatches."""
    model, inputs = family(name).make()
    if pieces:
        # no ignored labels: the mean over microbatches is then that of the whole batch
        inputs["labels"] = inputs["labels"].clamp(min=3)
    return model, inputs


@functools.cache
def eager(name: str, pieces: bool) -> tuple[nn.Module, list[float]]:
    """The trained model of one device, and its losses."""
    wanted, inputs = made(name, pieces)
    return wanted, train(wanted, inputs, clip=True, pieces=False)


def run_case(case: dict[str, str]) -> dict[str, float]:
    """Relative errors of losses and of all parameters after training."""
    pieces = case["steps_of"] == "microbatches"
    wanted, expected = eager(case["family"], pieces)
    model, inputs = made(case["family"], pieces)
    parallel = autoshard.load(case["program"], model)
    found = train(parallel, inputs, clip=True, pieces=pieces, own=pieces)
    return errors_of(parallel, wanted, found, expected)


def errors_of(
    parallel: nn.Module, wanted: nn.Module, found: list[float], expected: list[float]
) -> dict[str, float]:
    """Relative errors of losses and of the parameters that this rank holds, against the eager model's."""
    errors = {"loss": max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))}
    reference = dict(wanted.named_parameters())
    for name, parameter in parallel.named_parameters():
        assert isinstance(parameter, DTensor)
        errors[name] = relative_error(parameter.detach().full_tensor(), reference[name].detach())
    return errors


def main() -> None:
    torch.set_num_threads(1)
    cases = json.loads(Path(sys.argv[1]).read_text())
    results = []
    for case in cases:
        errors = run_case(case)
        worst = max(errors, key=lambda k: errors[k])
        results.append({**case, "worst": worst, "error": errors[worst], "loss": errors["loss"]})
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
