"""Launches of `kernels/norm_quant.py`: rows are read once; codes, scales and statistics are written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from autoshard.kernels import triton_norm, triton_quant
from autoshard.kernels.lang import to_out
from autoshard.kernels.launch import Launch, Prepared, next_power
from autoshard.kernels.norm_quant import BITS, check_groups
from autoshard.kernels.quant import limit_of, wire_bytes
from autoshard.kernels.triton_norm import normalised, value
from autoshard.kernels.triton_quant import code, scale_of

#: elements of a row that a program holds
_WIDEST = 16384


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    a_ptr,
    b_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    code_ptr,
    scale_ptr,
    mean_ptr,
    rstd_ptr,
    width,
    eps,
    ADD: tl.constexpr,
    LAYER: tl.constexpr,
    BIAS: tl.constexpr,
    NARROW: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """One row, as [groups, elements of a group]."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = column < width
    at = row * width + column
    x = value(a_ptr, b_ptr, at, mask, ADD)
    mean = 0.0
    centred = x
    if LAYER:
        mean = tl.sum(x) / width
        centred = tl.where(mask, x - mean, 0.0)
        tl.store(mean_ptr + row, mean)
    rstd = tl.rsqrt(tl.sum(centred * centred) / width + eps)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    y = normalised(x, mean, rstd, weight, bias, a_ptr.dtype.element_ty, NARROW).to(tl.float32)
    if ADD:
        tl.store(sum_ptr + at, to_out(x, sum_ptr.dtype.element_ty), mask=mask)
    size = tl.abs(y)
    top = tl.max(tl.where(size < float("inf"), size, float("inf")), 1)
    odd = top == float("inf")
    scale, inverse = scale_of(top, odd, LIMIT)
    tl.store(code_ptr + at, code(y, inverse, odd, LIMIT).to(tl.int8), mask=mask)
    tl.store(scale_ptr + row * (width // GROUP) + group, scale, mask=group * GROUP < width)
    tl.store(rstd_ptr + row, rstd)


def _prepared(
    a: torch.Tensor,
    b: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    narrow: bool,
    layer: bool,
    group: int,
) -> tuple[tuple[torch.Tensor | None, ...], list[Launch]]:
    """((sum, wire, mean, rstd), launches). layer: whether it is a LayerNorm; an RMSNorm has neither mean nor
    bias."""
    width = a.shape[-1]
    check_groups(width, group)
    if width > _WIDEST or (b is not None and b.dtype != a.dtype):
        (summed, y, mean, rstd), first = triton_norm.normed(a, b, weight, bias, eps, narrow, layer)
        assert y is not None
        wire, second = triton_quant.quantise(y, BITS, group)
        return (summed, wire, mean, rstd), [first, *second]
    a = a.contiguous()
    b = b.contiguous() if b is not None else None
    numel = a.numel()
    rows = numel // max(1, width)
    size = wire_bytes(numel, BITS, group)
    wire = a.new_empty((1, size), dtype=torch.uint8)
    used = numel + numel // group * 4
    if used < size:
        wire[:, used:] = 0
    codes, scales = triton_quant.parts_of(wire, numel, BITS, group)
    summed = torch.empty_like(a) if b is not None else None
    mean = a.new_empty((*a.shape[:-1], 1), dtype=torch.float32) if layer else None
    rstd = a.new_empty((*a.shape[:-1], 1), dtype=torch.float32)
    own = bias.contiguous() if bias is not None else None
    args = (a, b, weight.contiguous(), own, summed, codes, scales, mean, rstd, width, float(eps))
    groups = next_power(width // group)
    constants = {
        "ADD": b is not None,
        "LAYER": layer,
        "BIAS": bias is not None,
        "NARROW": narrow and a.dtype != torch.float32,
        "GROUPS": groups,
        "GROUP": group,
        "LIMIT": float(limit_of(BITS)),
    }
    warps = max(4, min(16, groups * group // 1024))
    return (summed, wire[0], mean, rstd), [Launch(_forward, (rows,), args, constants, warps, narrow=4)]


def rms_norm_quantise(
    x: torch.Tensor, weight: torch.Tensor, eps: float, narrow: bool, group: int
) -> Prepared:
    (_, wire, _, rstd), launches = _prepared(x, None, weight, None, eps, narrow, False, group)
    return (wire, rstd), launches


def add_rms_norm_quantise(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, eps: float, narrow: bool, group: int
) -> Prepared:
    (summed, wire, _, rstd), launches = _prepared(a, b, weight, None, eps, narrow, False, group)
    return (summed, wire, rstd), launches


def layer_norm_quantise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, group: int
) -> Prepared:
    (_, *result), launches = _prepared(x, None, weight, bias, eps, False, True, group)
    return tuple(result), launches


def add_layer_norm_quantise(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, group: int
) -> Prepared:
    return _prepared(a, b, weight, bias, eps, False, True, group)
