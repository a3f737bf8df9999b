"""What a step takes beside its ops: the same program, whose ops give at once what they gave before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from torch import nn

import autoshard
from autoshard.runtime import executor, prepared_steps
from benchmarks.gpu_steps import process_group
from benchmarks.models import bench_batch, bench_llama

ROUNDS, STEPS = 9, 3


@dataclass
class _Recorder:
    """Ops that note what they give, until they only give it."""

    recording: bool = False
    replaying: bool = False

    def of(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        given: list[Any] = []
        turns: Iterator[Any] = cycle(given)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.replaying:
                return next(turns)
            result = fn(*args, **kwargs)
            if self.recording:
                given.append(result)
            return result

        return call


@contextmanager
def _recorded(recorder: _Recorder) -> Iterator[None]:
    """Programs made within it have the ops of a recorder."""
    made = prepared_steps.function_of
    with ExitStack() as stack:
        for module in (prepared_steps, executor):
            stack.enter_context(patch.object(module, "function_of", lambda *args: recorder.of(made(*args))))
        yield


@dataclass(frozen=True)
class Overhead:
    """Seconds of forward and backward, and of what of them is not in ops."""

    step: float
    outside: float


def overhead(
    batch: Mapping[str, torch.Tensor], make: Callable[[], nn.Module], rounds: int = ROUNDS
) -> Overhead:
    """Of a model on one process, op by op; one thread, medians of alternating rounds."""
    recorder = _Recorder()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with process_group(1):
            plain, stubbed = _step(make(), batch), None
            with _recorded(recorder):
                stubbed = _step(make(), batch)
                stubbed()
            recorder.recording = True
            stubbed()
            recorder.recording, recorder.replaying = False, True
            pairs = [(_seconds(plain), _seconds(stubbed)) for _ in range(rounds)]
            return Overhead(median(p for p, _ in pairs), median(s for _, s in pairs))
    finally:
        torch.set_num_threads(threads)


def _step(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    parallel = autoshard.parallelize(
        model, "dp=1", cluster="cpu-gloo", example_inputs=dict(batch), codegen="interpreter"
    )

    def step() -> None:
        parallel(**batch).loss.backward()
        parallel.zero_grad()

    step()
    return step


def _seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - start) / STEPS


def print_overhead(console: Console) -> None:
    found = overhead(bench_batch(), bench_llama)
    console.print(
        "[bold]overhead[/] (Llama, 6 layers, hidden 256, batch 8 x 64; one process, one thread; forward and "
        "backward, without an optimizer)"
    )
    console.print(
        f"step {1e3 * found.step:.1f} ms, with ops that take no time {1e3 * found.outside:.2f} ms: "
        f"{found.outside / found.step:.1%}",
        highlight=False,
    )
