"""RMSNorm and LayerNorm with the sum before them, and their gradients with the sum after them.

Rows are what lies along the last dim, H elements. All arithmetic is in fp32 (fp64 for fp64 tensors):

    RMSNorm    rstd = 1 / sqrt(mean(x^2) + eps), y = x * rstd * weight           (Zhang, Sennrich, 2019)
    LayerNorm  rstd = 1 / sqrt(mean((x - mean)^2) + eps), y = (x - mean) * rstd * weight + bias
                                                                                (Ba, Kiros, Hinton, 2016)

With g = grad * weight and n the normalised row, the gradient of x is (g - n * mean(g * n) - mean(g)) * rstd,
without the last mean for RMSNorm; that of the weight is the sum over rows of grad * n, of the bias of grad.
A LayerNorm need not have a bias; the sum over rows of grad is then given all the same.
``narrow`` says that n is rounded to the type of x before it is multiplied by the weight, as Llama does. A sum
before the norm is rounded to its type, as the model would keep it, and normalised from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autoshard.kernels.launch import launched
from autoshard.kernels.registry import ROUNDING, Cost, KernelSpec, Operand, all_moved
from autoshard.kernels.samples import Generator, eighths, normal
from autoshard.torch_adapters.op_library import define


def wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, narrow: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., H], weight [H] -> (y [..., H] in the type of x, rstd [..., 1] in fp32)."""
    full = wide(x)
    length = torch.linalg.vector_norm(full, dim=-1, keepdim=True)
    rstd = torch.rsqrt(length.square_().div_(x.shape[-1]).add_(eps))
    n = full * rstd
    if narrow and x.dtype != full.dtype:
        return (n.to(x.dtype) * weight).to(x.dtype), rstd
    return n.mul_(wide(weight)).to(x.dtype), rstd


def add_rms_norm(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, eps: float, narrow: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a + b [..., H], its RMSNorm, rstd [..., 1])."""
    x = a + b
    return x, *rms_norm(x, weight, eps, narrow)


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, more: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of x [..., H] with ``more`` added, gradient of the weight [H])."""
    # torch is slow at ops on two element types: everything is made fp32 first
    full, dy, gain = wide(x), wide(grad), wide(weight)
    product = dy * full
    tilt = (product * gain).sum(-1, keepdim=True).mul_(rstd.pow(3)).div_(-x.shape[-1])
    dw = product.mul_(rstd).reshape(-1, x.shape[-1]).sum(0)
    dx = (dy * gain).mul_(rstd).addcmul_(full, tilt)
    if more is not None:
        dx += wide(more)
    return dx.to(x.dtype), dw.to(weight.dtype)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(LayerNorm of x [..., H], mean [..., 1], rstd [..., 1]); the last two in fp32."""
    # a GPU takes no two element types, and gives statistics in that of x
    shift = None if bias is None else wide(bias)
    y, mean, rstd = torch.native_layer_norm(wide(x), weight.shape, wide(weight), shift, eps)
    return y.to(x.dtype), mean, rstd


def add_layer_norm(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a + b [..., H], its LayerNorm, mean [..., 1], rstd [..., 1]); the last two in fp32."""
    x = a + b
    return x, *layer_norm(x, weight, bias, eps)


def layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    more: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(gradient of x [..., H] with ``more`` added, gradients of weight and bias [H])."""
    dx, dw, db = torch.ops.aten.native_layer_norm_backward(
        wide(grad), wide(x), weight.shape, mean, rstd, wide(weight), wide(weight), (True, True, True)
    )
    if more is not None:
        dx += wide(more)
    return dx.to(x.dtype), dw.to(weight.dtype), db.to(weight.dtype)


# ops


def fake_stat(x: torch.Tensor) -> torch.Tensor:
    """[..., 1], of rows [..., H]."""
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def fake_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a + b [..., H]."""
    return a.new_empty(a.shape, dtype=torch.promote_types(a.dtype, b.dtype))


def _fake_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, narrow: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), fake_stat(x)


def _fake_add_rms_norm(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, eps: float, narrow: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = fake_sum(a, b)
    return x, torch.empty_like(x), fake_stat(x)


def _fake_rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, more: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _fake_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), fake_stat(x), fake_stat(x)


def _fake_add_layer_norm(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x = fake_sum(a, b)
    return x, torch.empty_like(x), fake_stat(x), fake_stat(x)


def _fake_layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    more: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def _save_rms(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """x (or the sum that is normalised), weight, rstd."""
    summed = len(output) == 3
    ctx.summed = summed
    ctx.save_for_backward(output[0] if summed else inputs[0], inputs[2 if summed else 1], output[-1])
    ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)


def _rms_backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
    x, weight, rstd = ctx.saved_tensors
    more = grads[0] if ctx.summed else None
    grad = grads[1] if ctx.summed else grads[0]
    if grad is None:
        return (more, more, None, None, None) if ctx.summed else (None, None, None, None)
    dx, dw = torch.ops.autoshard.rms_norm_backward(grad, x, weight, rstd, more)
    return (dx, dx, dw, None, None) if ctx.summed else (dx, dw, None, None)


def _save_layer(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.summed, ctx.shifted = len(output) == 4, inputs[-2] is not None
    ctx.save_for_backward(output[0] if ctx.summed else inputs[0], inputs[-3], *output[-2:])
    ctx.mark_non_differentiable(*output[-2:])
    ctx.set_materialize_grads(False)


def _layer_backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    more = grads[0] if ctx.summed else None
    grad = grads[-3]
    if grad is None:
        return (more, more, None, None, None) if ctx.summed else (None,) * 4
    dx, dw, db = torch.ops.autoshard.layer_norm_backward(grad, x, mean, rstd, weight, more)
    db = db if ctx.shifted else None
    return (dx, dx, dw, db, None) if ctx.summed else (dx, dw, db, None)


define(
    "rms_norm(Tensor x, Tensor weight, float eps, bool narrow) -> (Tensor, Tensor)",
    rms_norm,
    _fake_rms_norm,
    cuda=launched("triton_norm", "rms_norm", rms_norm),
    backward=_rms_backward,
    save=_save_rms,
)
define(
    "add_rms_norm(Tensor a, Tensor b, Tensor weight, float eps, bool narrow) -> (Tensor, Tensor, Tensor)",
    add_rms_norm,
    _fake_add_rms_norm,
    cuda=launched("triton_norm", "add_rms_norm", add_rms_norm),
    backward=_rms_backward,
    save=_save_rms,
)
define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor rstd, Tensor? more) -> (Tensor, Tensor)",
    rms_norm_backward,
    _fake_rms_norm_backward,
    cuda=launched("triton_norm", "rms_norm_backward", rms_norm_backward),
)
define(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    layer_norm,
    _fake_layer_norm,
    cuda=launched("triton_norm", "layer_norm", layer_norm),
    backward=_layer_backward,
    save=_save_layer,
)
define(
    "add_layer_norm(Tensor a, Tensor b, Tensor weight, Tensor? bias, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    add_layer_norm,
    _fake_add_layer_norm,
    cuda=launched("triton_norm", "add_layer_norm", add_layer_norm),
    backward=_layer_backward,
    save=_save_layer,
)
define(
    "layer_norm_backward(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor? more) "
    "-> (Tensor, Tensor, Tensor)",
    layer_norm_backward,
    _fake_layer_norm_backward,
    cuda=launched("triton_norm", "layer_norm_backward", layer_norm_backward),
)


# samples

_SMALL = ((7, 96), (3, 1), (2, 33), (1, 257))
#: rows wider than a program: only a few, the interpreter is slow
_WIDE = (2, 16400)


def _shapes(dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    yield from _SMALL
    if dtype == torch.float32:
        yield _WIDE


def _weight(g: Generator, h: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return normal(g, (h,), dtype, device, 0.3) + 1


def _rms_samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for k, (m, h) in enumerate(_shapes(dtype)):
        x = normal(g, (m, h), dtype, device, 2.0)
        yield x.reshape(1, m, h), _weight(g, h, dtype, device), 1e-6, k % 2 == 0
    yield torch.zeros(2, 48, dtype=dtype, device=device), _weight(g, 48, dtype, device), 1e-5, True


def _add_samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for k, (m, h) in enumerate(_shapes(dtype)):
        a, b = (eighths(g, (m, h), dtype, device) for _ in range(2))
        yield a, b, _weight(g, h, dtype, device), 1e-6, k % 2 == 0


def _rms_backward_samples(
    g: Generator, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Any, ...]]:
    for k, (m, h) in enumerate(_shapes(dtype)):
        grad, x, more = (normal(g, (m, h), dtype, device) for _ in range(3))
        weight = _weight(g, h, dtype, device)
        rstd = rms_norm(x, weight, 1e-6, False)[1]
        yield grad, x, weight, rstd, more if k % 2 else None


def _layer_samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for k, (m, h) in enumerate(_shapes(dtype)):
        a, b = (eighths(g, (m, h), dtype, device) + 1 for _ in range(2))
        # of one element per row, nothing is left but the bias
        bias = normal(g, (h,), dtype, device) if k != 2 else None
        yield a, b, _weight(g, h, dtype, device), bias, 1e-5


def _alone_samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for a, _, *rest in _layer_samples(g, dtype, device):
        yield a, *rest


def _layer_backward_samples(
    g: Generator, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Any, ...]]:
    for k, (m, h) in enumerate(_shapes(dtype)):
        grad, x, more = (normal(g, (m, h), dtype, device) for _ in range(3))
        weight = _weight(g, h, dtype, device)
        full = wide(x)
        mean = full.mean(-1, keepdim=True)
        rstd = torch.rsqrt(full.var(-1, unbiased=False, keepdim=True) + 1e-2)
        yield grad, x, mean, rstd, weight, more if k % 2 else None


_LARGE = ((8192, 8192), (8192, 4096), (16384, 768))


def _large_rms(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for m, h in _LARGE[:2]:
        yield normal(g, (m, h), dtype, device), _weight(g, h, dtype, device), 1e-6, True


def _large_add(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for m, h in (*_LARGE, (2048, 32768)):
        a, b = (normal(g, (m, h), dtype, device) for _ in range(2))
        yield a, b, _weight(g, h, dtype, device), 1e-6, True


def _large_rms_backward(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for m, h in (*_LARGE, (2048, 32768)):
        grad, x, more = (normal(g, (m, h), dtype, device) for _ in range(3))
        rstd = torch.ones((m, 1), device=device)
        yield grad, x, _weight(g, h, dtype, device), rstd, more


def _large_layer(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for m, h in (*_LARGE, (2048, 32768)):
        a, b = (normal(g, (m, h), dtype, device) for _ in range(2))
        yield a, b, _weight(g, h, dtype, device), _weight(g, h, dtype, device), 1e-5


def _large_alone(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    m, h = _LARGE[0]
    weights = (_weight(g, h, dtype, device) for _ in range(2))
    yield normal(g, (m, h), dtype, device), *weights, 1e-5


def _large_layer_backward(
    g: Generator, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Any, ...]]:
    for grad, x, weight, rstd, more in _large_rms_backward(g, dtype, device):
        yield grad, x, torch.zeros_like(rstd), rstd, weight, more


def _backward_cost(ins: Sequence[Operand], outs: Sequence[Operand]) -> Cost:
    """All operands once; sums of columns, kept per program, are small beside them."""
    plain = all_moved(ins, outs)
    return Cost(plain.read, plain.written, 8 * plain.flop, 2)


def _forward_cost(ins: Sequence[Operand], outs: Sequence[Operand]) -> Cost:
    plain = all_moved(ins, outs)
    return Cost(plain.read, plain.written, 4 * plain.flop)


#: sums over many rows and the division by a small spread add up more than one rounding
_SUMMED = {torch.float32: 1e-5, torch.bfloat16: ROUNDING[torch.bfloat16], torch.float16: 2e-3}
#: the normalised row is rounded before it is multiplied
TWICE = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}

SPECS = (
    KernelSpec(
        "rms_norm", rms_norm, ("triton_norm", "rms_norm"), _forward_cost, _rms_samples, _large_rms, TWICE
    ),
    KernelSpec(
        "add_rms_norm",
        add_rms_norm,
        ("triton_norm", "add_rms_norm"),
        _forward_cost,
        _add_samples,
        _large_add,
        TWICE,
    ),
    KernelSpec(
        "rms_norm_backward",
        rms_norm_backward,
        ("triton_norm", "rms_norm_backward"),
        _backward_cost,
        _rms_backward_samples,
        _large_rms_backward,
        _SUMMED,
    ),
    KernelSpec(
        "layer_norm",
        layer_norm,
        ("triton_norm", "layer_norm"),
        _forward_cost,
        _alone_samples,
        _large_alone,
        TWICE,
    ),
    KernelSpec(
        "add_layer_norm",
        add_layer_norm,
        ("triton_norm", "add_layer_norm"),
        _forward_cost,
        _layer_samples,
        _large_layer,
        TWICE,
    ),
    KernelSpec(
        "layer_norm_backward",
        layer_norm_backward,
        ("triton_norm", "layer_norm_backward"),
        _backward_cost,
        _layer_backward_samples,
        _large_layer_backward,
        _SUMMED,
    ),
)
