"""Started by `ranks`: checkpoints of parallel models, and other parts of torch; a failure ends it."""

from __future__ import annotations

import copy
import functools
import io
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from families import family
from gloo_api_worker import check, raises
from leaving import leave
from pipeline_api_worker import COUNT, bound, shared
from pipelines import model_and_batch, pipeline
from sampling import all_cases, sampled, unlike
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
from autoshard.errors import UsageError
from autoshard.runtime.optim.full_states import full_optimizer_state, load_full_optimizer_state
from autoshard.runtime.saving import full_state

#: models with weights of which a rank holds several blocks; of the last two, on more ranks than kv heads
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


def close(found: list[float], wanted: list[float], what: str, within: float = 2e-5) -> None:
    check(max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < within, f"{what}: {found}, {wanted}")


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
        print(f"{what} works, {time.process_time():.1f} s of its processor", flush=True)


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
    weights, moments = get_state_dict(model, optimizer, options=options_for(model))
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=alone)
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options_for(model)
    )


def options_for(model: nn.Module) -> StateDictOptions:
    """torch asks for it where ranks hold different parameters."""
    return StateDictOptions(flatten_optimizer_state_dict=bool(getattr(model, "is_pipeline", False)))


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


def piped(ranks: int, mesh: str, schedule: str, seed: int = 0) -> Any:
    program = shared(
        functools.partial(pipeline, "gpt2-dropout", ranks, mesh, schedule, COUNT),
        f"{ranks}-{mesh}-{schedule}",
    )
    return bound(program, family("gpt2-dropout").make(seed)[0], seed=3)


def states_of_one_process() -> None:
    """A pipeline, with shards of several blocks and a weight of two stages, goes on with what a plain
    optimizer has, and the other way round."""

    def groups(model: nn.Module) -> torch.optim.Optimizer:
        found = list(model.parameters())
        wide, narrow = [p for p in found if p.dim() > 1], [p for p in found if p.dim() == 1]
        made = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "lr": 2e-2}]
        return torch.optim.AdamW(made, lr=1e-2)

    def steps(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for _ in range(2):
            loss = model.train_step(inputs) if hasattr(model, "train_step") else model(**inputs).loss
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    plain, inputs = family("gpt2").make(0)
    model: Any = autoshard.parallelize(family("gpt2").make(0)[0], "pp=2,tp=2", example_inputs=inputs)
    optimizer, theirs = groups(model), groups(plain)
    close(steps(model, optimizer), steps(plain, theirs), "before")
    saved: list[Any] = [full_optimizer_state(model, optimizer), full_state(model)]
    state, weights = copy.deepcopy(theirs.state_dict()), copy.deepcopy(plain.state_dict())
    wanted = steps(plain, theirs)
    other, _ = family("gpt2").make(1)
    resumed: Any = autoshard.parallelize(other, "pp=2,tp=2", example_inputs=inputs)
    optimizer = groups(resumed)
    resumed.load_state_dict(weights, strict=False)
    load_full_optimizer_state(resumed, optimizer, state)
    close(steps(resumed, optimizer), wanted, "a pipeline after one process")
    dist.broadcast_object_list(saved, 0)
    alone, _ = family("gpt2").make(1)
    optimizer = groups(alone)
    alone.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[0])
    close(steps(alone, optimizer), wanted, "one process after a pipeline")
    del saved[0]["param_groups"][1]
    raises(UsageError, lambda: load_full_optimizer_state(resumed, groups(resumed), saved[0]), "groups")


def dropout_goes_on(folder: Path) -> None:
    """Masks go on after model and optimizer were loaded, on the same mesh and on another."""
    inputs = family("gpt2-dropout").make()[1]
    batch = model_and_batch("gpt2-dropout", COUNT)[1]

    def meshed(mesh: str) -> Any:
        model = family("gpt2-dropout").make()[0]
        return autoshard.parallelize(model, mesh, example_inputs=inputs, seed=3)

    def train(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(2):
            for _ in range(2):  # accumulates
                if model.is_pipeline:
                    loss = model.train_step(batch)
                else:
                    loss = model(**inputs).loss
                    loss.backward()
                losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    plain_keys = list(family("gpt2-dropout").make()[0].state_dict())
    kinds: dict[str, Sequence[Callable[[], Any]]] = {
        "mesh": (lambda: meshed("dp=2,tp=2"), lambda: meshed("fsdp=4")),
        "pipeline": (lambda: piped(2, "tp=2", "1f1b"), lambda: piped(4, "dp=1", "1f1b")),
    }
    for kind in unlike(list(kinds), 1):
        makes = kinds[kind]
        model = makes[0]()
        optimizer = adamw(model)
        train(model, optimizer)
        check(model.is_pipeline or list(model.state_dict()) == plain_keys, "no keys of our own")
        weights, moments = get_state_dict(model, optimizer, options=options_for(model))
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / kind)
        wanted = train(model, optimizer)
        for make in makes:
            again = make()
            fresh = adamw(again)
            load(again, fresh, folder / kind)
            found = train(again, fresh)
            check(make is not makes[0] or found == wanted, f"{kind}: {found} after, {wanted} before")
            close(found, wanted, kind)


def infinities() -> None:
    """One in one shard is known to every rank."""
    _, inputs = family("llama").make(0)
    model, optimizer = parallel("llama", "tp=4", 0)
    twin: Any = copy.deepcopy(model)
    for made, scaler in (
        (model, torch.amp.GradScaler("cpu", init_scale=1024.0)),
        (twin, autoshard.GradScaler("cpu", init_scale=1024.0)),
    ):
        for fused in (False, True):
            optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, fused=fused)
            for rank in (None, 2):
                before = [whole(p).clone() for p in made.parameters()]
                scaler.scale(made(**inputs).loss).backward()
                if dist.get_rank() == rank:
                    made.model.layers[1].mlp.down_proj.weight.grad.to_local()[0, 0] = float("inf")
                scale = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                same = all(torch.equal(whole(p), x) for p, x in zip(made.parameters(), before, strict=True))
                check(same == (rank is not None), f"{type(scaler)} {fused}: a step is left out")
                check(scaler.get_scale() == scale * (1.0 if rank is None else 0.5), "scale")


def infinities_in_a_pipeline() -> None:
    batch = model_and_batch("gpt2-dropout", COUNT)[1]
    model, plain = piped(2, "tp=2", "1f1b"), piped(2, "tp=2", "1f1b")
    scaler = autoshard.GradScaler("cpu", init_scale=1024.0)
    optimizer = adamw(model)
    wanted, found = plain.train_step(batch), scaler.train_step(model, batch)
    check(torch.equal(wanted, found), "the loss itself")
    scaler.unscale_(optimizer)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        check(torch.allclose(whole(p.grad), whole(q.grad), atol=1e-6), "gradients")
    if dist.get_rank() == 3:
        next(model.parameters()).grad.to_local().fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    check(scaler.get_scale() == 1024.0, "an infinity that comes after they were looked for")
    scaler.train_step(model, batch)
    if dist.get_rank() == 3:
        next(model.parameters()).grad.to_local().fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    check(scaler.get_scale() == 512.0, "an infinity in one stage")
    torchs = torch.amp.GradScaler("cpu")
    torchs.scale(torch.ones(()))
    raises(autoshard.UsageError, lambda: torchs.step(optimizer), "autoshard.GradScaler")


#: eps above what gradients that are zero on paper come to
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, fused=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, eps=1e-4),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-4),
    "Adadelta": torch.optim.Adadelta,
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "transformers' Adafactor": lambda p: transformers.Adafactor(p, lr=1e-3, relative_step=False),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-4, fused=True),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=1e-2),
}


def optimizers(folder: Path) -> None:
    """torch's optimizers, schedules, averages and compiler do the same to a plain model."""
    _, inputs = family("gpt2").make(0)
    model, _ = parallel("gpt2", "dp=2,tp=2", 0)
    weights = {k: v.clone() for k, v in family("gpt2").make(0)[0].state_dict().items()}
    for name in ("SGD", *sampled([n for n in OPTIMIZERS if n != "SGD"], 0)):
        make = OPTIMIZERS[name]
        found = []
        for subject in (family("gpt2").make(0)[0], model):
            subject.load_state_dict(weights)
            optimizer = make(list(subject.parameters()))
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
            average = torch.optim.swa_utils.AveragedModel(
                subject, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
            )
            run = torch.compile(subject) if all_cases() and name == "SGD" and subject is model else subject
            losses = []
            for _ in range(3):
                losses.append(step(run, optimizer, inputs))
                schedule.step()
                average.update_parameters(subject)
            found.append((losses, {k: whole(v) for k, v in average.module.state_dict().items()}, average))
        (wanted, plain, _), (losses, averaged, kept) = found
        within = 1e-3 if name == "Muon" else 2e-5  # in bfloat16 by itself
        close(losses, wanted, name, within)
        # the sign of a gradient that is zero on paper, of a bias of keys, is noise
        within = 5e-3 if name == "Rprop" else within
        for key, value in averaged.items():
            check(torch.allclose(value, plain[key], atol=within), f"{name}: average of {key}")
        if name == "SGD":
            # moments of several blocks that torch makes as copies of gradients
            dcp.save(
                {"o": get_optimizer_state_dict(model, optimizer), "a": kept.state_dict()},
                checkpoint_id=folder,
            )


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    for name, mesh in unlike(BLOCKED, 1) if len(sys.argv) < 3 else ():
        through_files(name, mesh, folder / f"{name}-{mesh}")
        done(f"{name} on {mesh}")
    optimizers(folder / "optimizers")
    done("optimizers")
    states_of_one_process()
    done("states of one process")
    dropout_goes_on(folder)
    done("dropout")
    infinities()
    infinities_in_a_pipeline()
    done("loss scaling")
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
