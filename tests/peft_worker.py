"""Started by torchrun: adapters of PEFT on a parallel model, as on one process.

``peft_worker.py FOLDER MESHES [CASE ...]`` prints a line for each case: ok, or what differs.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from calls_worker import backward, batch, build, full
from leaving import leave
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors import safe_open
from torch import nn

import autoshard

LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def adapted(config: Any = None, dtype: torch.dtype | None = None) -> nn.Module:
    """A Llama with an adapter whose values are not zero."""
    model = build("Llama")
    if dtype is not None:
        model.to(dtype)
    torch.manual_seed(1)
    model = get_peft_model(model, config or LoraConfig(**LORA, init_lora_weights=False))
    return model


class Pair:
    """The same model on one process and in parallel."""

    def __init__(self, mesh: str, plain: nn.Module) -> None:
        self.plain = plain
        self.parallel = autoshard.parallelize(copy.deepcopy(plain), mesh, example_inputs=batch(8, 16))

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.parallel, self.plain

    def losses(self, rows: int = 8, tolerance: float = 1e-5) -> None:
        """Losses are alike."""
        found = []
        for model in self.both:
            with torch.no_grad():
                found.append(full(model(**batch(rows, 16)).loss))
        torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)

    def train(self, steps: int = 2, tolerance: float = 1e-4) -> None:
        """Gradients and weights are alike after some steps; what is frozen has no gradient."""
        for model in self.both:
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            for k in range(steps):
                backward(model, batch(8, 16, seed=k))
                assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
            assert all(p.requires_grad for p in optimizer.state)
        theirs = dict(self.plain.named_parameters())
        for name, p in self.parallel.named_parameters():
            torch.testing.assert_close(
                full(p.detach()),
                theirs[name].detach(),
                rtol=tolerance,
                atol=tolerance / 10,
                msg=lambda m, n=name: f"{n}: {m}",
            )


def lora(mesh: str, folder: Path) -> None:
    pair = Pair(mesh, adapted())
    pair.train()
    counts = [m.get_nb_trainable_parameters() for m in pair.both]
    assert counts[0] == counts[1] or pair.parallel.is_pipeline, counts


def dora(mesh: str, folder: Path) -> None:
    Pair(mesh, adapted(LoraConfig(**LORA, use_dora=True, init_lora_weights=False))).train()


def ia3(mesh: str, folder: Path) -> None:
    config = IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    )
    Pair(mesh, adapted(config)).train()


def prompts(mesh: str, folder: Path) -> None:
    Pair(mesh, adapted(PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))).train()


def saved_modules(mesh: str, folder: Path) -> None:
    Pair(mesh, adapted(LoraConfig(**LORA, modules_to_save=["lm_head"]))).train()


def all_linear(mesh: str, folder: Path) -> None:
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", use_rslora=True, bias="all")
    Pair(mesh, adapted(config)).train()


def switched(mesh: str, folder: Path) -> None:
    """Adapters off and on, in evaluation and in training."""
    pair = Pair(mesh, adapted())
    pair.losses()
    with pair.parallel.disable_adapter(), pair.plain.disable_adapter():
        pair.losses()
    pair.losses()
    for model in pair.both:
        model.eval()
    pair.losses()
    for model in pair.both:
        model.base_model.disable_adapter_layers()
    pair.losses()
    for model in pair.both:
        model.base_model.enable_adapter_layers()
        model.train()
    pair.train()


def dropout(mesh: str, folder: Path) -> None:
    """In evaluation mode dropout of adapters does nothing."""
    pair = Pair(mesh, adapted(LoraConfig(**LORA, lora_dropout=0.5, init_lora_weights=False)))
    pair.parallel(**batch(8, 16)).loss.backward()
    for model in pair.both:
        model.eval()
    pair.losses()


def several(mesh: str, folder: Path) -> None:
    """Two adapters, of which one is active."""
    plain = adapted()
    torch.manual_seed(2)
    plain.add_adapter("other", LoraConfig(**{**LORA, "r": 2}, init_lora_weights=False))
    pair = Pair(mesh, plain)
    pair.losses()
    for model in pair.both:
        model.set_adapter("other")
    pair.losses()
    pair.train()
    for model in pair.both:
        model.set_adapter("default")
    pair.losses()
    pair.train()


def merged(mesh: str, folder: Path) -> None:
    pair = Pair(mesh, adapted())
    pair.losses()
    for model in pair.both:
        model.merge_adapter()
    pair.losses()
    for model in pair.both:
        model.unmerge_adapter()
    pair.losses()


def unloaded(mesh: str, folder: Path) -> None:
    pair = Pair(mesh, adapted())
    pair.losses()
    pair.parallel, pair.plain = (model.merge_and_unload() for model in pair.both)
    pair.losses()


def saved(mesh: str, folder: Path) -> None:
    """What save_pretrained writes, plain PEFT loads; it is the adapter alone."""
    pair = Pair(mesh, adapted())
    pair.train()
    pair.parallel.save_pretrained(folder / mesh)
    with safe_open(folder / mesh / "adapter_model.safetensors", "pt") as file:
        assert len(file.keys()) == 8 and all("lora_" in name for name in file.keys())  # noqa: SIM118
    loaded = PeftModel.from_pretrained(build("Llama"), folder / mesh)
    with torch.no_grad():
        here, there = (full(m(**batch(8, 16)).loss) for m in (loaded, pair.plain))
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)


def base_saved(mesh: str, folder: Path) -> None:
    """What save_pretrained of a model without adapters writes, transformers loads to the bit."""
    plain = build("Mixtral")
    parallel = autoshard.parallelize(copy.deepcopy(plain), mesh, example_inputs=batch(8, 16))
    parallel.save_pretrained(folder / f"base {mesh}", max_shard_size="20kB")
    loaded = type(plain).from_pretrained(folder / f"base {mesh}")
    theirs = dict(plain.named_parameters())
    for name, p in loaded.named_parameters():
        assert torch.equal(p, theirs[name]), name


def bf16_base(mesh: str, folder: Path) -> None:
    """A frozen base in half precision under adapters in float32."""
    plain = adapted(dtype=torch.bfloat16)
    assert {p.dtype for p in plain.parameters()} == {torch.bfloat16, torch.float32}
    Pair(mesh, plain).train(tolerance=3e-2)


def generated(mesh: str, folder: Path) -> None:
    pair = Pair(mesh, adapted())
    found = [
        m.eval().generate(**{"input_ids": batch(4, 8)["input_ids"]}, max_new_tokens=4, do_sample=False)
        for m in pair.both
    ]
    assert torch.equal(*found)


CASES: tuple[Callable[[str, Path], None], ...] = (
    lora,
    dora,
    ia3,
    prompts,
    saved_modules,
    all_linear,
    switched,
    dropout,
    several,
    merged,
    unloaded,
    saved,
    base_saved,
    bf16_base,
    generated,
)


def main() -> None:
    dist.init_process_group()
    folder, meshes, names = Path(sys.argv[1]), sys.argv[2].split(";"), sys.argv[3:]
    for mesh in meshes:
        for case in CASES:
            if names and case.__name__ not in names:
                continue
            try:
                case(mesh, folder)
                said = f"ok {mesh} {case.__name__}"
            except Exception as error:  # told of below
                said = f"BAD {mesh} {case.__name__} {type(error).__name__}: {str(error)[:600]}"
            if dist.get_rank() == 0:
                print(f"\n{said}", flush=True)  # not behind a progress bar
    leave()


if __name__ == "__main__":
    main()
