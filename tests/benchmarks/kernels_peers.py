"""The same work by other people's kernels, where these are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from benchmarks.kernels_measure import Stopwatch

Call: TypeAlias = Callable[[], object]
#: (functions of Liger-Kernel, arguments of our op) -> the call to measure
Adapter: TypeAlias = Callable[[Any, tuple[Any, ...]], Call]


def liger(name: str, args: tuple[Any, ...]) -> Call | None:
    """What Liger-Kernel does in place of our op, None if it is not installed or has nothing like it."""
    if name not in _LIGER or find_spec("liger_kernel") is None:
        return None
    return _LIGER[name](import_module("liger_kernel.transformers.functional"), args)


def loss_rows(watch: Stopwatch) -> Iterator[tuple[str, str]]:
    """(whose, milliseconds) of a cross-entropy and its gradient: 8,192 tokens, 131,072 words, bf16."""
    ops = torch.ops.autoshard
    words, device = 131_072, watch.device
    logits = torch.randn(8192, words, device=device, dtype=torch.bfloat16)
    target = torch.randint(words, (8192,), device=device)
    grad = torch.full((8192,), 1 / 8192, device=device)

    def ours() -> None:
        lse = ops.xent_merge(ops.xent_stats(logits, target, 0).unsqueeze(0))[:, 0].contiguous()
        ops.xent_part_backward(grad, logits, target, lse, -100, 0.0, words, 0)

    def of(loss: Callable[..., torch.Tensor]) -> Call:
        x = logits.detach().requires_grad_()
        return lambda: torch.autograd.grad(loss(x, target), x)

    sides: dict[str, Call] = {"ours": ours, "eager": of(torch.nn.functional.cross_entropy)}
    if find_spec("liger_kernel") is not None:
        sides["Liger"] = of(import_module("liger_kernel.transformers.functional").liger_cross_entropy)
    for name, call in sides.items():
        yield name, f"{watch.seconds(call) * 1e3:.2f} ms"


def _rms_norm(functions: Any, args: tuple[Any, ...]) -> Call:
    x, weight, eps, narrow = args
    casting = "llama" if narrow else "gemma"
    return lambda: functions.liger_rms_norm(x, weight, eps, 0.0, casting, False)


def _add_rms_norm(functions: Any, args: tuple[Any, ...]) -> Call:
    a, b, weight, eps, narrow = args
    casting = "llama" if narrow else "gemma"
    return lambda: functions.liger_fused_add_rms_norm(a, b, weight, eps, 0.0, casting, False)


def _rms_norm_backward(functions: Any, args: tuple[Any, ...]) -> Call:
    """The gradient alone; what else arrives at x, as a second sum."""
    grad, x, weight, _, more = args
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = functions.liger_rms_norm(x, weight, 1e-6, 0.0, "llama", False)

    def run() -> None:
        dx, _ = torch.autograd.grad(y, (x, weight), grad, retain_graph=True)
        if more is not None:
            dx.add_(more)

    return run


def _layer_norm_backward(functions: Any, args: tuple[Any, ...]) -> Call:
    grad, x, _, _, weight, more = args
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    bias = torch.zeros_like(weight).requires_grad_()
    y = functions.liger_layer_norm(x, weight, bias, 1e-5)

    def run() -> None:
        dx, _, _ = torch.autograd.grad(y, (x, weight, bias), grad, retain_graph=True)
        if more is not None:
            dx.add_(more)

    return run


_LIGER: Mapping[str, Adapter] = MappingProxyType(
    {
        "rms_norm": _rms_norm,
        "add_rms_norm": _add_rms_norm,
        "rms_norm_backward": _rms_norm_backward,
        "layer_norm_backward": _layer_norm_backward,
    }
)
