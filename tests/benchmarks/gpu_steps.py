"""Steps of a Llama on one device: eager mode, torch.compile, and our program op by op and compiled."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.options import PRODUCTS
from autoshard.runtime.profile.device import synchronize

#: steps of a side that are timed, and those before them after the first, which compiles; one side after the
#: other, as each has the memory for itself
ROUNDS, WARM = 9, 3
#: sides without us
PLAIN = ("torch.compile", "eager")
SIDES = (
    *("torch.compile", "eager", "interpreter", "inductor", "interpreter, kernels", "inductor, kernels"),
    "inductor, graphs",
    "inductor, kernels, graphs",
    "inductor, float8-tensorwise",
    "inductor, float8-rowwise",
)


@dataclass(frozen=True)
class StepCase:
    """A Llama and its batch."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    words: int
    batch: int
    length: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def text(self) -> str:
        return (
            f"Llama of {self.layers} layers, hidden {self.hidden}, {self.heads} heads, {self.kv_heads} of "
            f"keys, vocabulary {self.words:,}, batch {self.batch} x {self.length:,}"
        )

    def model(self, device: torch.device) -> nn.Module:
        """With the same weights each time."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.words,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.length,
            use_cache=False,
            attn_implementation="sdpa",
        )
        torch.manual_seed(0)
        with torch.device(device):
            made: nn.Module = LlamaForCausalLM(config).to(self.dtype)
        return made

    def inputs(self, device: torch.device) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(self.words, (self.batch, self.length), generator=generator).to(device)
        return {"input_ids": tokens, "labels": tokens}


STEPS = (
    StepCase(12, 768, 12, 12, 2048, 32000, 4, 512),
    StepCase(4, 2048, 16, 8, 5632, 32000, 4, 2048),
    StepCase(4, 4096, 32, 8, 14336, 128256, 1, 4096),
)
SMALL = StepCase(2, 64, 4, 2, 128, 128, 2, 32, torch.float32)


@contextmanager
def process_group(size: int) -> Iterator[None]:
    """This process as rank 0 of so many; the others do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget()


def forget() -> None:
    """Give memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak(device: torch.device, graphs: bool = False) -> float:
    """Most bytes in use since `forget`. graphs: what the allocator has, as it does not see what they use."""
    if device.type != "cuda":
        return 0.0
    most = torch.cuda.max_memory_reserved if graphs else torch.cuda.max_memory_allocated
    return float(most(device))


def stepper(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
    """One step with AdamW; it gives the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def step_rows(case: StepCase, device: torch.device) -> Iterator[tuple[str, ...]]:
    """(side, step, of torch.compile's, peak, first step, loss at the end); each side alone in memory."""
    taken: dict[str, float] = {}
    for name in SIDES:
        with process_group(1):
            row = _timed(case, device, name)
        taken[name] = row[0]
        seconds, first, bytes_, loss = row
        yield (
            name if name in PLAIN else f"ours, {name}",
            f"{seconds * 1e3:.2f} ms",
            f"{seconds / taken[SIDES[0]]:.2f}",
            f"{bytes_ / 2**30:.2f} GiB",
            f"{first:.1f} s",
            f"{loss:.4f}",
        )


def _timed(case: StepCase, device: torch.device, name: str) -> tuple[float, float, float, float]:
    """(seconds of a step, of the first, most bytes, loss)."""
    inputs, model = case.inputs(device), case.model(device)
    if name == "torch.compile":
        model = torch.compile(model)  # type: ignore[assignment]
    elif name != "eager":
        codegen, *more = name.split(", ")
        mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp",))
        model = autoshard.parallelize(
            model,
            mesh,
            example_inputs=inputs,
            cluster="h100-dgx",
            codegen=codegen,
            kernels="kernels" in more,
            cuda_graphs="graphs" in more and device.type == "cuda",
            products=next((each for each in more if each in PRODUCTS), ""),
        )
    step = stepper(model, inputs)
    start = time.perf_counter()
    step()
    synchronize(device)
    first = time.perf_counter() - start
    for _ in range(WARM):
        step()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        loss = step()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times), first, peak(device, "graphs" in name), float(loss)
