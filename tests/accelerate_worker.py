"""Started by `ranks`: a script with Accelerate, on one process or several; writes what it saw.

Arguments: a mesh, "" for one process with Accelerate's own Accelerator; a folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from calls_worker import batch, build, full
from leaving import leave
from torch.utils.data import DataLoader

import autoshard
from autoshard.errors import UsageError
from autoshard.interop.accelerator import ReplicatedAccelerator


def rows() -> list[dict[str, torch.Tensor]]:
    """One that is left over in the last batch."""
    given = batch(25, 16)
    return [{key: x[k] for key, x in given.items()} for k in range(25)]


def trained(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> list[Any]:
    found: list[Any] = []
    model.train()
    for inputs in loader:
        with accelerator.accumulate(model):
            loss = model(**inputs).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                found.append(["norm", float(full(accelerator.clip_grad_norm_(model.parameters(), 0.5)))])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found.append([float(full(loss.detach())), scheduler.get_last_lr()[0]])
    model.eval()
    rights = 0
    for inputs in loader:
        with torch.no_grad():
            guess = full(model(**inputs).logits).argmax(-1)
        guesses, labels = accelerator.gather_for_metrics((guess, inputs["labels"]))
        rights += int((guesses == labels).sum())
    found.append(["right", rights])
    return found


def refuses_other_types(mesh: str) -> None:
    """A model that computes in float32 while Accelerate is told bf16."""
    AcceleratorState._reset_state()
    accelerator = ReplicatedAccelerator(cpu=True, mixed_precision="bf16")
    model = autoshard.parallelize(build("Llama"), mesh, example_inputs=batch(4, 16))
    try:
        accelerator.prepare(model)
    except UsageError as error:
        assert 'precision="bf16"' in error.hint
    else:
        raise AssertionError("bf16 would have been left out")
    half = autoshard.parallelize(build("Llama"), mesh, example_inputs=batch(4, 16), precision="bf16")
    assert accelerator.prepare(half) is half


def main() -> None:
    mesh, folder = sys.argv[1], Path(sys.argv[2])
    kind = ReplicatedAccelerator if mesh else Accelerator
    accelerator = kind(gradient_accumulation_steps=2, cpu=True)
    model = build("Llama")
    if mesh:
        model = autoshard.parallelize(model, mesh, example_inputs=batch(4, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    loader = DataLoader(rows(), batch_size=4, shuffle=False)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    found = trained(accelerator, model, optimizer, scheduler, loader)
    accelerator.save_state(str(folder / "state"))
    found += trained(accelerator, model, optimizer, scheduler, loader)
    accelerator.load_state(str(folder / "state"))
    found.append("from the saved state")
    found += trained(accelerator, model, optimizer, scheduler, loader)
    accelerator.save_model(model, str(folder / "model"))
    if not mesh or dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    if mesh:
        refuses_other_types(mesh)
        leave()


if __name__ == "__main__":
    main()
