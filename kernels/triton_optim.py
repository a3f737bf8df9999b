"""Launches of `kernels/optim.py`: 30 bytes per parameter with fp32 gradients and a copy of 2 bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from autoshard.kernels.lang import to_out
from autoshard.kernels.launch import Launch, Prepared, ceil_div, multiprocessors
from autoshard.kernels.optim import check_state, corrections

_BLOCK = 1024
#: elements that a program reads at once for a sum of squares
_SUM_BLOCK = 4096


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    param_ptr,
    avg_ptr,
    square_ptr,
    copy_ptr,
    grad_ptr,
    factor_ptr,
    numel,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    keep,
    rate,
    root,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """keep: 1 - lr * decay. rate: lr / (1 - beta1^step). root: sqrt(1 - beta2^step). rest1: 1 - beta1."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    g = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32) * tl.load(factor_ptr)
    avg = beta1 * tl.load(avg_ptr + at, mask=mask, other=0.0) + rest1 * g
    square = beta2 * tl.load(square_ptr + at, mask=mask, other=0.0) + rest2 * g * g
    param = tl.load(param_ptr + at, mask=mask, other=0.0)
    if COPY:
        held = tl.load(copy_ptr + at, mask=mask, other=0.0)
        param = tl.where(to_out(param, copy_ptr.dtype.element_ty) == held, param, held.to(tl.float32))
    param *= keep
    param -= rate * (avg / (tl.sqrt_rn(square) / root + eps))
    tl.store(param_ptr + at, param, mask=mask)
    tl.store(avg_ptr + at, avg, mask=mask)
    tl.store(square_ptr + at, square, mask=mask)
    if COPY:
        tl.store(copy_ptr + at, to_out(param, copy_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _squares(x_ptr, part_ptr, numel, steps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a program finds in its ``steps`` blocks of the tensor."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(steps):
        x = tl.load(x_ptr + at, mask=at < numel, other=0.0).to(tl.float32)
        total += x * x
        at += tl.num_programs(0) * BLOCK
    tl.store(part_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _sum(part_ptr, out_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of what all programs found."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + at, mask=at < count, other=0.0)
    tl.store(out_ptr, tl.sum(total, 0))


def adamw_shard(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    copy: torch.Tensor | None,
    grad: torch.Tensor,
    factor: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> Prepared:
    check_state(param, exp_avg, exp_avg_sq, copy)
    one, two = corrections(beta1, beta2, step)
    numbers = (beta1, 1 - beta1, beta2, 1 - beta2, eps, 1 - lr * weight_decay, lr / one, two)
    tensors = (param, exp_avg, exp_avg_sq, copy, grad.contiguous(), factor)
    args = (*tensors, param.numel(), *map(float, numbers))
    constants = {"COPY": copy is not None, "BLOCK": _BLOCK}
    return None, (Launch(_adamw, (ceil_div(param.numel(), _BLOCK),), args, constants, 4, 1),)


def sum_squares(tensors: Sequence[torch.Tensor]) -> Prepared:
    resident = 4 * multiprocessors(tensors[0].device)
    counts = [min(resident, ceil_div(t.numel(), _SUM_BLOCK)) for t in tensors]
    parts = tensors[0].new_empty(max(1, sum(counts)), dtype=torch.float32)
    out = tensors[0].new_empty((), dtype=torch.float32)
    launches = []
    start = 0
    for tensor, programs in zip(tensors, counts, strict=True):
        steps = ceil_div(tensor.numel(), _SUM_BLOCK * max(1, programs))
        args = (tensor.contiguous(), parts[start:], tensor.numel(), steps)
        launches.append(Launch(_squares, (programs,), args, {"BLOCK": _SUM_BLOCK}, 8, 1))
        start += programs
    launches.append(Launch(_sum, (1,), (parts, out, sum(counts)), {"BLOCK": 1024}, 4, 9))
    return out, launches
