"""Started by torchrun: one parallel model, called in many ways, equal to eager in each of them.

``calls_worker.py Llama,T5 "dp=2,tp=2;fsdp=4"`` makes every call of `calls`; with ``--sizes 20``, calls of
random batch sizes and lengths instead; with ``--also-sizes 20``, both. A line for each: ok or BAD.
"""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from architectures import ARCHITECTURES
from sampling import sampled
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard

V = 64
SIZES: dict[str, dict[str, Any]] = {
    "Llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "Bert": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "Mixtral": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    },
    "T5": {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8},
}
HEADS = {"Bert": "BertForMaskedLM", "T5": "T5ForConditionalGeneration", "GPT2": "GPT2LMHeadModel"}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=V, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=0, **SIZES[name]
    )
    if name == "GPT2":
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    if name == "Bert":
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    if name == "T5":
        config.dropout_rate = 0.0
    model: nn.Module = getattr(transformers, HEADS.get(name, f"{name}ForCausalLM"))(config)
    return model


def batch(rows: int, length: int, seed: int = 1, **more: Any) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, V, (rows, length), generator=g)
    return {"input_ids": ids, "labels": ids.clone(), **more}


def backward(model: nn.Module, kwargs: dict[str, Any]) -> float:
    """Forward and backward of a step, of a pipeline too; its loss."""
    if getattr(model, "is_pipeline", False):
        return float(model.train_step(kwargs))  # type: ignore[operator]
    loss = model(**kwargs).loss
    loss.backward()
    return float(full(loss.detach()))


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def trained(parallel: nn.Module, plain: nn.Module, **kwargs: Any) -> float:
    """Largest relative difference of loss and gradients of a call."""
    worst = 0.0
    losses = []
    for model in (parallel, plain):
        model.zero_grad()
        loss = model(**kwargs).loss
        loss.backward()
        losses.append(loss.detach())
    worst = float((losses[0] - losses[1]).abs() / losses[1].abs().clamp_min(1e-6))
    theirs = dict(plain.named_parameters())
    for name, p in parallel.named_parameters():
        a, b = p.grad, theirs[name].grad
        assert (a is None) == (b is None), name
        if a is not None and b is not None:
            worst = max(worst, float((full(a) - b).norm() / b.norm().clamp_min(1e-4)))
    return worst


def outputs(parallel: nn.Module, plain: nn.Module, key: str = "logits", **kwargs: Any) -> float:
    with torch.no_grad():
        a, b = (getattr(m(**kwargs), key) for m in (parallel, plain))
    a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
    return max(float((x + 0 - y).abs().max() / y.abs().max()) for x, y in zip(a, b, strict=True))


def calls(name: str) -> dict[str, Callable[[nn.Module, nn.Module], float]]:
    states = "hidden_states" if name != "T5" else "decoder_hidden_states"
    found: dict[str, Callable[[nn.Module, nn.Module], float]] = {
        "as planned": lambda p, m: trained(p, m, **batch(8, 16)),
        "3 rows": lambda p, m: trained(p, m, **batch(3, 16)),
        "16 rows": lambda p, m: trained(p, m, **batch(16, 16)),
        "1 row": lambda p, m: trained(p, m, **batch(1, 16)),
        "48 tokens": lambda p, m: trained(p, m, **batch(8, 48)),
        "17 tokens": lambda p, m: trained(p, m, **batch(8, 17)),
        "6 rows": lambda p, m: trained(p, m, **batch(6, 16)),
        "a mask": lambda p, m: trained(p, m, **batch(8, 16, attention_mask=mask(8, 16))),
        "as planned after all": lambda p, m: trained(p, m, **batch(8, 16, seed=5)),
        "int32": lambda p, m: trained(p, m, **ints(batch(8, 16))),
        "hidden states": lambda p, m: outputs(p, m, states, **batch(8, 16), output_hidden_states=True),
        "eval": lambda p, m: evaluated(p, m, lambda: outputs(p, m, **batch(8, 16))),
        "no labels": lambda p, m: outputs(p, m, **no_labels(name, batch(8, 16))),
        "logits": lambda p, m: own_loss(p, m, **batch(8, 16)),
        "argmax": lambda p, m: float((guess(p) != guess(m)).sum()),
        "embeddings": lambda p, m: embedded(p, m),
        "submodule": lambda p, m: submodule(p, m, name),
    }
    if name in ("Llama", "GPT2", "Mixtral"):
        for value in (128, 100, 77):
            found[f"{value} items"] = lambda p, m, n=value: trained(
                p, m, **batch(8, 16, num_items_in_batch=n)
            )
    if name != "Bert":
        found["generate"] = lambda p, m: generated(p, m, name, use_cache=True)
        found["generate without cache"] = lambda p, m: generated(p, m, name, use_cache=False)
    found["training goes on"] = lambda p, m: trained(p, m, **batch(8, 16, seed=9))
    return found


def mask(rows: int, length: int) -> torch.Tensor:
    made = torch.ones(rows, length, dtype=torch.int64)
    made[0, length - 3 :] = 0
    return made


def ints(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": kwargs["input_ids"].int(), "labels": kwargs["labels"]}


def no_labels(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    ids = kwargs["input_ids"]
    return {"input_ids": ids, "decoder_input_ids": ids} if name == "T5" else {"input_ids": ids}


def evaluated(parallel: nn.Module, plain: nn.Module, run: Callable[[], float]) -> float:
    parallel.eval(), plain.eval()
    try:
        return run()
    finally:
        parallel.train(), plain.train()


def own_loss(parallel: nn.Module, plain: nn.Module, **kwargs: Any) -> float:
    grads = []
    for model in (parallel, plain):
        model.zero_grad()
        logits = model(**kwargs).logits
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), kwargs["labels"].flatten()).backward()
        grads.append([full(p.grad).norm() for p in model.parameters() if p.grad is not None])
    return max(float((a - b).abs() / b.clamp_min(1e-4)) for a, b in zip(*grads, strict=True))


def guess(model: nn.Module) -> torch.Tensor:
    kwargs = batch(8, 16)
    out = model(**kwargs)
    right = out.logits.argmax(-1) == kwargs["labels"]
    assert isinstance(out.logits.detach().cpu().numpy().sum().item(), float)
    return right


def embedded(parallel: nn.Module, plain: nn.Module) -> float:
    ids = batch(8, 16)["input_ids"]
    grads = []
    for model in (parallel, plain):
        model.zero_grad()
        table = model.get_input_embeddings()  # type: ignore[operator]
        table(ids).square().sum().backward()
        grads.append(full(table.weight.grad))
    return float((grads[0] - grads[1]).abs().max())


def submodule(parallel: nn.Module, plain: nn.Module, name: str) -> float:
    inner = {"GPT2": "transformer", "Bert": "bert", "T5": "encoder"}.get(name, "model")
    ids = batch(4, 16)["input_ids"]
    error = 0.0
    for factor in (1.0, 1.5, 1 / 1.5):  # what `.data` changes raises no version
        for model in (parallel, plain):
            for p in model.parameters():
                p.data.mul_(factor)
        a, b = (getattr(m, inner)(ids).last_hidden_state for m in (parallel, plain))
        error = max(error, float((a - b).abs().max()))
    return error


def generated(parallel: nn.Module, plain: nn.Module, name: str, **kwargs: Any) -> float:
    ids = batch(2, 8)["input_ids"]
    a, b = (
        evaluated(parallel, plain, lambda m=m: m.generate(ids, max_new_tokens=5, do_sample=False, **kwargs))
        for m in (parallel, plain)
    )
    return float((a != b).sum())


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model and inputs: one of `SIZES`, or any of `architectures.ARCHITECTURES`."""
    if name in SIZES:
        return build(name), batch(8, 16)
    return next(a for a in ARCHITECTURES if a.name == name).make()


def resized(inputs: dict[str, Any], rows: int, length: int) -> dict[str, Any]:
    """Inputs of other sizes, from the values that there are; lengths of texts alone differ."""

    def of(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.dim():
            return x
        x = torch.cat([x.roll(k, -1) for k in range(-(-rows // x.shape[0]))])[:rows]
        if x.dim() != 2 or x.is_floating_point() or "pixel_values" in inputs or "input_ids" not in inputs:
            return x
        return torch.cat([x] * -(-length // x.shape[1]), 1)[:, :length].contiguous()

    return {k: of(v) for k, v in inputs.items()}


def random_sizes(
    parallel: nn.Module, plain: nn.Module, inputs: dict[str, Any], count: int
) -> tuple[float, list[float]]:
    """(largest difference, seconds of each first call) over random batch sizes and lengths."""
    draw = random.Random(1)
    worst, seconds = 0.0, []
    longest = min(40, getattr(getattr(plain, "config", None), "max_position_embeddings", 40))
    for _ in range(count):
        kwargs = resized(inputs, draw.randint(1, 16), draw.randint(3, longest))
        begun = time.perf_counter()
        with torch.no_grad():
            parallel(**kwargs)
        seconds.append(time.perf_counter() - begun)
        worst = max(worst, trained(parallel, plain, **kwargs))
    return worst, seconds


def show_calls(mesh: str, name: str, parallel: nn.Module, plain: nn.Module) -> None:
    # a script that is started by hand calls in all ways
    chosen = sampled(list(calls(name)), 2) if "--some" in sys.argv else list(calls(name))
    for label, run in ((label, calls(name)[label]) for label in chosen):
        begun = time.perf_counter()
        try:
            error: Any = run(parallel, plain)
        except Exception as problem:  # told of below
            error = f"{type(problem).__name__}: {problem}"
        if dist.get_rank() == 0:
            good = isinstance(error, float) and error < 1e-4
            took = time.perf_counter() - begun
            print("ok " if good else "BAD", f"{mesh} {name} {label}: {error} ({took:.1f} s)", flush=True)


def show_sizes(
    mesh: str, name: str, parallel: nn.Module, plain: nn.Module, inputs: dict[str, Any], count: int
) -> None:
    worst, seconds = random_sizes(parallel, plain, inputs, count)
    if dist.get_rank() == 0:
        family: Any = parallel._autoshard_family
        took = " ".join(f"{x:.2f}" for x in seconds)
        print("ok " if worst < 1e-4 else "BAD", f"{mesh} {name} {count} sizes: {worst}", flush=True)
        print(f"{len(family.programs)} programs, first calls: {took} s", flush=True)


def main() -> None:
    names, meshes = sys.argv[1].split(","), sys.argv[2].split(";")
    for mesh in meshes:
        for name in names:
            plain, inputs = made(name)
            parallel = autoshard.parallelize(copy.deepcopy(plain), mesh, example_inputs=inputs)
            if "--sizes" not in sys.argv:
                show_calls(mesh, name, parallel, plain)
            for flag in ("--sizes", "--also-sizes"):
                if flag in sys.argv:
                    count = int(sys.argv[sys.argv.index(flag) + 1])
                    show_sizes(mesh, name, parallel, plain, inputs, count)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
