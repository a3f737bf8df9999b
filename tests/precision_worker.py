"""Started by torchrun: models in float32 that compute in 16 bits, beside one process that does.

``precision_worker.py "fsdp=4;dp=2,tp=2" [MODELS]`` prints a line per model and mesh: ok or BAD. The one
process gives the model its parameters cast (``torch.func.functional_call``), as FSDP2's
``MixedPrecisionPolicy(param_dtype=...)`` does.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from calls_worker import batch, build, full
from leaving import leave
from sampling import all_cases
from scaled_layers import FORMATS, by_hand, wide_llama, wide_mixtral
from slow_links import without_latency
from torch import nn
from torch.func import functional_call

import autoshard

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LR = 1e-3
MODELS = ("Llama", "GPT2", "T5", "Mixtral", "Convolutions")


class Convolutions(nn.Module):
    """Running statistics stay in float32; images come in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 64, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(images)).float(), labels)


def images(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"images": torch.randn(8, 3, 8, 8, generator=g), "labels": torch.randint(10, (8,), generator=g)}


def cast_loss(model: nn.Module, kwargs: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """What one process computes."""
    norms = {n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    cast = {n: p.to(dtype) for n, p in model.named_parameters() if n.rpartition(".")[0] not in norms}
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in kwargs.items()}
    return loss_of(functional_call(model, cast, (), given))


def loss_of(output: Any) -> torch.Tensor:
    found = output if isinstance(output, torch.Tensor) else output.loss
    assert isinstance(found, torch.Tensor)
    return found


def steps(
    model: nn.Module, made: Callable[[int], dict[str, Any]], step: Callable[[dict[str, Any]], float]
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for number in range(4):
        losses.append(step(made(number)))
        # that of torch sees the stages of one rank of a pipeline alone
        autoshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compared(name: str, mesh: str, precision: str, **options: Any) -> None:
    model = Convolutions() if name == "Convolutions" else build(name)
    made: Callable[[int], Any] = images if name == "Convolutions" else lambda seed: batch(8, 16, seed=seed)
    plain, dtype = copy.deepcopy(model), DTYPES[precision]
    parallel = autoshard.parallelize(model, mesh, example_inputs=made(0), precision=precision, **options)
    assert all(p.dtype == torch.float32 for p in parallel.parameters())

    def alone(kwargs: dict[str, Any]) -> float:
        loss = cast_loss(plain, kwargs, dtype)
        loss.backward()
        return float(loss)

    def together(kwargs: dict[str, Any]) -> float:
        if getattr(parallel, "is_pipeline", False):
            loss = parallel.train_step(kwargs)
        else:
            loss = loss_of(parallel(**kwargs))
            loss.backward()
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in parallel.parameters())
        return float(full(loss.detach()))

    first = [(full(p).detach().clone()) for p in plain.parameters()]
    ours, theirs = steps(parallel, made, together), steps(plain, made, alone)
    off = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    moved, apart = 0.0, 0.0
    own = dict(parallel.named_parameters())
    for (key, p), before in zip(plain.named_parameters(), first, strict=True):
        if key in own:
            moved += float((p - before).norm() ** 2)
            apart += float((full(own[key]) - p).norm() ** 2)
    share = (apart / moved) ** 0.5
    # T5 gives its loss in bf16; moments of Adam divide small by small
    good = off < (1e-2 if name == "T5" else 1e-3) and share < (0.2 if name == "T5" else 0.1)
    say(good, f"{name} {mesh} {precision} {options}", f"loss {off:.1e} updates {share:.1e}")
    if mesh == "fsdp=4" and name == "Llama":
        others(parallel, plain, dtype)


def others(parallel: nn.Module, plain: nn.Module, dtype: torch.dtype) -> None:
    """Calls that are not steps."""
    cast = copy.deepcopy(plain).to(dtype)
    plan = parallel.plan.precision  # type: ignore[union-attr]
    say(plan == {v: k for k, v in DTYPES.items()}[dtype], "plan", plan)
    parallel.load_state_dict(plain.state_dict())
    with torch.no_grad():
        a, b = parallel(**batch(6, 10)).logits, cast(**batch(6, 10)).logits
        a = full(a)
        say(a.dtype == dtype and close(a, b), "another size", str(a.dtype))
        ids = batch(2, 5)["input_ids"]
        a, b = full(parallel.model.embed_tokens(ids)), cast.model.embed_tokens(ids)  # type: ignore[union-attr,operator]
        say(a.dtype == dtype and torch.equal(a, b), "a submodule", str(a.dtype))
        a, b = (m.generate(ids, max_new_tokens=4, do_sample=False) for m in (parallel, cast))  # type: ignore[operator]
        say(torch.equal(full(a), b), "generate", str(full(a).tolist()))
    parallel.eval(), cast.eval()
    with torch.no_grad():
        say(close(full(parallel(**batch(8, 16)).logits), cast(**batch(8, 16)).logits), "eval", "")


def emptied(mesh: str) -> None:
    """A model on meta, whose parameters get memory in the model's type, and then their values."""
    plain, kwargs = build("Llama"), batch(8, 16)
    with torch.device("meta"):
        model = type(plain)(plain.config)  # type: ignore[arg-type]
    parallel = autoshard.parallelize(model, mesh, example_inputs=kwargs, precision="bf16")
    parallel.to_empty(device="cpu")
    assert all(p.dtype == torch.float32 for p in parallel.parameters())
    parallel.load_state_dict(plain.state_dict())
    with torch.no_grad():
        ours, theirs = float(full(parallel(**kwargs).loss)), float(cast_loss(plain, kwargs, DTYPES["bf16"]))
    say(abs(ours - theirs) < 1e-3 * theirs, f"to_empty {mesh}", f"{ours} {theirs}")


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).float().abs().max() < 3e-2 * b.float().abs().max())


def scaled(mesh: str) -> None:
    """fp16 with a GradScaler, of which the third step overflows."""
    model = build("Llama")
    plain = copy.deepcopy(model)
    parallel = autoshard.parallelize(model, mesh, example_inputs=batch(8, 16), precision="fp16")
    rows = []
    for each in (parallel, plain):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        losses = []
        for number in range(6):
            kwargs = batch(8, 16, seed=number)
            loss = each(**kwargs).loss if each is parallel else cast_loss(each, kwargs, torch.float16)
            scaler.scale(loss * (1e30 if number == 2 else 1.0)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(float(full(loss.detach())))
        rows.append((losses, scaler.get_scale()))
    (ours, scale), (theirs, other) = rows
    off = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
    say(off < 1e-3 and scale == other == 2.0**11, f"GradScaler {mesh}", f"{off:.1e} {scale} {other}")


def cast_products(mesh: str, how: str, model: nn.Module, **options: Any) -> None:
    """Products of 8-bit operands beside a model that makes the casts by hand."""
    plain = by_hand(model, how, lambda name: name != "lm_head")
    parallel = autoshard.parallelize(model, mesh, example_inputs=batch(8, 32), products=how, **options)
    rows = []
    for each in (parallel, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        losses = []
        for number in range(3):
            loss = each(**batch(8, 32, seed=number)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(full(loss.detach())))
        rows.append(losses)
    off = max(abs(a - b) / b for a, b in zip(*rows, strict=True))
    # sums in another order round some operands to other codes
    say(off < (5e-3 if how == "nvfp4" else 5e-4), f"{how} {mesh}", f"{off:.1e} {rows[0]}")


def say(good: bool, what: str, about: str) -> None:
    if dist.get_rank() == 0:
        print("ok " if good else "BAD", what, about, flush=True)


def main() -> None:
    dist.init_process_group()
    for mesh in sys.argv[1].split(";"):
        pipeline = "pp" in mesh
        names = sys.argv[2].split(",") if len(sys.argv) > 2 else MODELS
        for name in names:
            if name in (("Llama", "GPT2") if pipeline else MODELS[:-1] if "tp" in mesh else MODELS):
                compared(name, mesh, "bf16", **({"microbatches": 2} if pipeline else {}))
        if not pipeline:
            scaled(mesh)
            emptied(mesh)
    for how in FORMATS if all_cases() else FORMATS[:1]:
        cast_products("fsdp=2,tp=2", how, wide_llama())
        # tokens of experts travel as casts where they have one scale
        cast_products("fsdp=2,ep=2", how, wide_mixtral(), cluster=without_latency())
    for how in ("float8-rowwise", "mxfp8", "nvfp4") if all_cases() else ("nvfp4",):
        # with so little memory parameters are gathered twice, as casts
        cast_products("fsdp=4", how, wide_llama(), memory=13 << 19)
    leave()


if __name__ == "__main__":
    main()
