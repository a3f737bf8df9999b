"""Started by `ranks`: parallel models between checkpoints and other parts of torch; any failed assertion ends it."""

from __future__ import annotations

import copy
import io
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from families import family
from gloo_api_worker import check, raises
from leaving import leave
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import autoshard

#: models with weights of which a rank holds several blocks; of the Llama and Mixtral, more ranks than kv heads
BLOCKED = (("gpt2", "dp=2,tp=2"), ("gpt2", "fsdp=2,tp=2"), ("llama", "tp=4"), ("mixtral", "tp=4"))
FULL = StateDictOptions(full_state_dict=True)


def whole(x: Any) -> torch.Tensor:
    found: torch.Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return found.detach()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> float:
    loss = model(**inputs).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def close(found: list[float], wanted: list[float], what: str) -> None:
    check(max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 2e-5, f"{what}: {found}, {wanted}")


def eager(name: str, seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model, inputs = family(name).make(seed)
    _, inputs = family(name).make(0)
    optimizer = adamw(model)
    for _ in range(steps):
        step(model, optimizer, inputs)
    return model, optimizer, inputs


def parallel(name: str, mesh: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _, inputs = eager(name, seed, 0)
    made = autoshard.parallelize(model, mesh, example_inputs=inputs)
    return made, adamw(made)


def done(what: str) -> None:
    if dist.get_rank() == 0:
        print(f"{what} works, {time.perf_counter():.1f}", flush=True)


def through_files(name: str, mesh: str, folder: Path) -> None:
    """Checkpoints of a plain model go on in a parallel one, and the other way; whole tensors in and out."""
    reference, plain, inputs = eager(name, 1, 2)
    weights = {k: v.clone() for k, v in reference.state_dict().items()}
    moments = copy.deepcopy(get_optimizer_state_dict(reference, plain))
    if dist.get_rank() == 0:
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "eager", no_dist=True)
    wanted = [step(reference, plain, inputs) for _ in range(2)]
    dist.barrier()
    model, optimizer = parallel(name, mesh, 2)
    check(all(type(p.data) is DTensor for p in model.parameters()), "parameters are plain DTensors")
    load(model, optimizer, folder / "eager")
    close([step(model, optimizer, inputs) for _ in range(2)], wanted, f"{name} {mesh} from eager")
    to_eager(model, optimizer, inputs, name, folder)
    whole_states(model, optimizer, weights, folder)
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(moments), options=FULL)
    close([step(model, optimizer, inputs) for _ in range(2)], wanted, f"{name} {mesh} whole")
    if mesh != "fsdp=2,tp=2":
        to_another_mesh(model, optimizer, inputs, name, folder / "torch")


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, alone: bool = False) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=alone)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def to_eager(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any, name: str, folder: Path
) -> None:
    """Saved at once, and while training goes on."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.save(state, checkpoint_id=folder / "sync")
    saving: Any = dcp.async_save(state, checkpoint_id=folder / "async")
    wanted = [step(model, optimizer, inputs) for _ in range(2)]
    saving.result()
    dist.barrier()
    for kind in ("sync", "async"):
        reference, plain, _ = eager(name, 4, 0)
        load(reference, plain, folder / kind, alone=True)
        close([step(reference, plain, inputs) for _ in range(2)], wanted, f"{name} {kind} to eager")


def whole_states(
    model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, torch.Tensor], folder: Path
) -> None:
    """Whole tensors in and out, and copies."""
    before = copy.deepcopy(model.state_dict())
    set_model_state_dict(model, dict(weights), options=FULL)
    for key, value in get_model_state_dict(model, options=FULL).items():
        check(torch.equal(value, weights[key]), f"full {key}")
    file = io.BytesIO()
    torch.save({k: whole(v) for k, v in model.state_dict().items()}, file)
    torch.save(model.state_dict(), io.BytesIO())
    file.seek(0)
    model.load_state_dict(before)
    model.load_state_dict(torch.load(file, weights_only=True))
    twin = copy.deepcopy(model)
    average = {k: p.detach().clone() for k, p in twin.named_parameters()}
    state = {"model": twin.state_dict(), "average": {k: 0.5 * p + 0.5 * p for k, p in average.items()}}
    dcp.save(state, checkpoint_id=folder / "twin")
    for part in ("model", "average"):
        found = {part: {k: torch.zeros_like(v) for k, v in weights.items() if k in state[part]}}
        dcp.load(found, checkpoint_id=folder / "twin", no_dist=True)
        check(all(torch.equal(v, weights[k]) for k, v in found[part].items()), f"{part} of a twin")
    from_rank0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    raises(
        autoshard.UsageError,
        lambda: set_model_state_dict(model, dict(weights), options=from_rank0),
        "several blocks",
    )


def to_another_mesh(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any, name: str, folder: Path
) -> None:
    """state_dict() of model and optimizer, without torch's helpers, after whole states were loaded."""
    dcp.save({"m": model.state_dict(), "o": optimizer.state_dict()}, checkpoint_id=folder)
    wanted = step(model, optimizer, inputs)
    other, fresh = parallel(name, "fsdp=4", 6)
    step(other, fresh, inputs)
    state = {"m": other.state_dict(), "o": fresh.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["m"])
    fresh.load_state_dict(state["o"])
    close([step(other, fresh, inputs)], [wanted], f"{name} to fsdp=4")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    for name, mesh in BLOCKED:
        through_files(name, mesh, folder / f"{name}-{mesh}")
        done(f"{name} on {mesh}")
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
