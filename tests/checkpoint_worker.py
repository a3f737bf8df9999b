"""Started by `ranks`: parallel models between checkpoints and other parts of torch; any failed assertion ends it."""

from __future__ import annotations

import copy
import io
import sys
import tempfile
from collections.abc import Callable
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


def parallel(name: str, mesh: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model, _, inputs = eager(name, seed, 0)
    made = autoshard.parallelize(model, mesh, example_inputs=inputs)
    return made, adamw(made), inputs


def from_eager(name: str, mesh: str, folder: Path) -> None:
    """A checkpoint of a plain model goes on in a parallel one."""
    reference, plain, inputs = eager(name, 1, 2)
    if dist.get_rank() == 0:
        weights, moments = get_state_dict(reference, plain)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=True)
    dist.barrier()
    model, optimizer, _ = parallel(name, mesh, 2)
    check(all(type(p.data) is DTensor for p in model.parameters()), "parameters are plain DTensors")
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    wanted = [step(reference, plain, inputs) for _ in range(2)]
    close([step(model, optimizer, inputs) for _ in range(2)], wanted, f"{name} {mesh} from eager")


def to_eager(name: str, mesh: str, folder: Path) -> None:
    """And the other way, saved at once and while training goes on."""
    model, optimizer, inputs = parallel(name, mesh, 3)
    for _ in range(2):
        step(model, optimizer, inputs)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.save(state, checkpoint_id=folder / "sync")
    saving = dcp.async_save(state, checkpoint_id=folder / "async")
    wanted = [step(model, optimizer, inputs) for _ in range(2)]
    saving.result()  # type: ignore[union-attr]
    dist.barrier()
    for kind in ("sync", "async"):
        reference, plain, _ = eager(name, 4, 0)
        weights, moments = get_state_dict(reference, plain)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / kind, no_dist=True)
        set_state_dict(reference, plain, model_state_dict=weights, optim_state_dict=moments)
        close([step(reference, plain, inputs) for _ in range(2)], wanted, f"{name} {mesh} {kind} to eager")


def torch_state(name: str, mesh: str, folder: Path) -> None:
    """state_dict() of model and optimizer, without torch's helpers, into another mesh."""
    model, optimizer, inputs = parallel(name, mesh, 5)
    step(model, optimizer, inputs)
    dcp.save({"m": model.state_dict(), "o": optimizer.state_dict()}, checkpoint_id=folder)
    wanted = step(model, optimizer, inputs)
    model, optimizer, inputs = parallel(name, "fsdp=4", 6)
    step(model, optimizer, inputs)
    state = {"m": model.state_dict(), "o": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["m"])
    optimizer.load_state_dict(state["o"])
    close([step(model, optimizer, inputs)], [wanted], f"{name} {mesh} to fsdp=4")


def full_states(name: str, mesh: str, folder: Path) -> None:
    """Whole tensors in and out."""
    reference, plain, inputs = eager(name, 7, 2)
    weights = {k: v.clone() for k, v in reference.state_dict().items()}
    moments = copy.deepcopy(get_optimizer_state_dict(reference, plain))
    wanted = [step(reference, plain, inputs) for _ in range(2)]
    model, optimizer, _ = parallel(name, mesh, 8)
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
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(moments), options=FULL)
    close([step(model, optimizer, inputs) for _ in range(2)], wanted, f"{name} {mesh} full")
    for key, p in twin.named_parameters():
        check(torch.equal(whole(p), weights[key]), f"twin {key}")
    state = {"model": twin.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    if dist.get_rank() == 0:
        found = {"model": {k: torch.zeros_like(v) for k, v in weights.items()}}
        dcp.load(found, checkpoint_id=folder, no_dist=True)
        check(all(torch.equal(v, weights[k]) for k, v in found["model"].items()), "twin through a checkpoint")
    from_rank0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    raises(
        autoshard.UsageError,
        lambda: set_model_state_dict(model, dict(weights), options=from_rank0),
        "several blocks",
    )


CASES: tuple[Callable[[str, str, Path], None], ...] = (from_eager, to_eager, torch_state, full_states)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    for case in CASES:
        for name, mesh in BLOCKED:
            case(name, mesh, folder / case.__name__ / f"{name}-{mesh}")
            if dist.get_rank() == 0:
                print(f"{case.__name__} {name} {mesh} works", flush=True)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
