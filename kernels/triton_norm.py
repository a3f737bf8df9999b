"""Launches of `kernels/norm.py`.

A program holds full rows in registers, up to 32768 elements forward and 8192 backward; of wider rows it
reads pieces, once per pass over the row (the later passes find them in the cache). Backward, few programs go
over many rows each and keep the sums of columns in registers; a second launch adds up those of all programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from autoshard.kernels.lang import to_out
from autoshard.kernels.launch import Launch, Prepared, ceil_div, multiprocessors, next_power

_WIDEST_FORWARD = 32768
_WIDEST_BACKWARD = 8192
#: elements that the programs of one multiprocessor have in hand backward: as many loads as hide the memory's
#: latency, and few sums of columns to write and add up (measured on an H200)
_RESIDENT = 8192
_TILE = 4096


@triton.jit
def value(a_ptr, b_ptr, at, mask, ADD: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is normalised, in fp32; a sum is rounded to the type of ``a`` first."""
    x = tl.load(a_ptr + at, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    if ADD:
        wide = to_out(wide + tl.load(b_ptr + at, mask=mask, other=0.0).to(tl.float32), x.dtype).to(tl.float32)
    return wide


@triton.jit
def normalised(x, mean, rstd, weight, bias, dtype: tl.constexpr, NARROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row as it leaves a norm."""
    n = (x - mean) * rstd
    if NARROW:
        n = to_out(n, dtype).to(tl.float32)
    return to_out(n * weight + bias, dtype)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    a_ptr,
    b_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    width,
    eps,
    ADD: tl.constexpr,
    LAYER: tl.constexpr,
    BIAS: tl.constexpr,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """ROWS rows. WHOLE: whether BLOCK elements are a row; otherwise ROWS is 1."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    valid = (row < rows)[:, None]
    if WHOLE:
        at = row[:, None] * width + column[None, :]
        mask = valid & (column < width)[None, :]
        x = value(a_ptr, b_ptr, at, mask, ADD)
        if LAYER:
            mean = (tl.sum(x, 1) / width)[:, None]
            centred = tl.where(mask, x - mean, 0.0)
        else:
            mean = 0.0
            centred = x
        rstd = tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)[:, None]
        weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        if LAYER:
            tl.store(mean_ptr + row[:, None], mean, mask=valid)
        if BIAS:
            bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        else:
            bias = 0.0
        if ADD:
            tl.store(sum_ptr + at, to_out(x, sum_ptr.dtype.element_ty), mask=mask)
        y = normalised(x, mean, rstd, weight, bias, y_ptr.dtype.element_ty, NARROW)
        tl.store(y_ptr + at, y, mask=mask)
        tl.store(rstd_ptr + row[:, None], rstd, mask=valid)
    else:
        start = row[:, None] * width + column[None, :]
        lanes = tl.zeros((ROWS, BLOCK), tl.float32)
        mean = 0.0
        if LAYER:
            for k in range(0, width, BLOCK):
                mask = valid & (k + column < width)[None, :]
                lanes += value(a_ptr, b_ptr, start + k, mask, ADD)
            mean = (tl.sum(lanes, 1) / width)[:, None]
            tl.store(mean_ptr + row[:, None], mean, mask=valid)
            lanes = tl.zeros((ROWS, BLOCK), tl.float32)
        for k in range(0, width, BLOCK):
            mask = valid & (k + column < width)[None, :]
            x = value(a_ptr, b_ptr, start + k, mask, ADD)
            centred = tl.where(mask, x - mean, 0.0)
            lanes += centred * centred
        rstd = tl.rsqrt(tl.sum(lanes, 1) / width + eps)[:, None]
        tl.store(rstd_ptr + row[:, None], rstd, mask=valid)
        for k in range(0, width, BLOCK):
            inside = k + column < width
            mask = valid & inside[None, :]
            x = value(a_ptr, b_ptr, start + k, mask, ADD)
            weight = tl.load(weight_ptr + k + column, mask=inside, other=0.0).to(tl.float32)[None, :]
            if BIAS:
                bias = tl.load(bias_ptr + k + column, mask=inside, other=0.0).to(tl.float32)[None, :]
            else:
                bias = 0.0
            if ADD:
                tl.store(sum_ptr + start + k, to_out(x, sum_ptr.dtype.element_ty), mask=mask)
            y = normalised(x, mean, rstd, weight, bias, y_ptr.dtype.element_ty, NARROW)
            tl.store(y_ptr + start + k, y, mask=mask)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    grad_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    more_ptr,
    dx_ptr,
    part_ptr,
    rows,
    width,
    steps,
    LAYER: tl.constexpr,
    MORE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``steps`` times ROWS full rows, and what they add to the gradients of weight and bias."""
    column = tl.arange(0, BLOCK)
    inside = (column < width)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    db = tl.zeros((ROWS, BLOCK), tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None] & inside
    at = row[:, None] * width + column[None, :]
    grad = tl.load(grad_ptr + at, mask=mask, other=0.0)
    value = tl.load(x_ptr + at, mask=mask, other=0.0)
    for _ in range(steps):
        valid = (row < rows)[:, None]
        mask = valid & inside
        at = row[:, None] * width + column[None, :]
        rstd = tl.load(rstd_ptr + row[:, None], mask=valid, other=0.0)
        if LAYER:
            mean = tl.load(mean_ptr + row[:, None], mask=valid, other=0.0)
        if MORE:
            more = tl.load(more_ptr + at, mask=mask, other=0.0)
        dy = grad.to(tl.float32)
        x = value.to(tl.float32)
        # the next rows are on their way while these are done
        row += tl.num_programs(0) * ROWS
        following = (row < rows)[:, None] & inside
        ahead = row[:, None] * width + column[None, :]
        grad = tl.load(grad_ptr + ahead, mask=following, other=0.0)
        value = tl.load(x_ptr + ahead, mask=following, other=0.0)
        if LAYER:
            n = tl.where(mask, (x - mean) * rstd, 0.0)
            db += dy
        else:
            n = x * rstd
        g = dy * weight
        dx = g - n * (tl.sum(g * n, 1) / width)[:, None]
        if LAYER:
            dx -= (tl.sum(g, 1) / width)[:, None]
        dx *= rstd
        if MORE:
            dx += more.to(tl.float32)
        tl.store(dx_ptr + at, to_out(dx, dx_ptr.dtype.element_ty), mask=mask)
        dw += dy * n
    part_ptr += tl.program_id(0).to(tl.int64) * width
    tl.store(part_ptr + column, tl.sum(dw, 0), mask=column < width)
    if LAYER:
        part_ptr += tl.num_programs(0).to(tl.int64) * width
        tl.store(part_ptr + column, tl.sum(db, 0), mask=column < width)


@triton.jit
def _backward_wide(  # type: ignore[no-untyped-def]
    grad_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    more_ptr,
    dx_ptr,
    width,
    LAYER: tl.constexpr,
    MORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of one row, in pieces."""
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if LAYER:
        mean = tl.load(mean_ptr + row)
    column = tl.arange(0, BLOCK)
    start = row * width + column
    along = tl.zeros((BLOCK,), tl.float32)
    level = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, width, BLOCK):
        mask = k + column < width
        g = tl.load(grad_ptr + start + k, mask=mask, other=0.0).to(tl.float32)
        g *= tl.load(weight_ptr + k + column, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + start + k, mask=mask, other=0.0).to(tl.float32)
        along += g * (x - mean) * rstd
        level += g
    tilt = tl.sum(along, 0) / width
    shift = 0.0
    if LAYER:
        shift = tl.sum(level, 0) / width
    for k in range(0, width, BLOCK):
        mask = k + column < width
        g = tl.load(grad_ptr + start + k, mask=mask, other=0.0).to(tl.float32)
        g *= tl.load(weight_ptr + k + column, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + start + k, mask=mask, other=0.0).to(tl.float32)
        dx = (g - (x - mean) * rstd * tilt - shift) * rstd
        if MORE:
            dx += tl.load(more_ptr + start + k, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + start + k, to_out(dx, dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _columns_wide(  # type: ignore[no-untyped-def]
    grad_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    part_ptr,
    rows,
    width,
    steps,
    LAYER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What every so many rows add to BLOCK columns of the gradients of weight and bias."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    row = tl.program_id(1).to(tl.int64)
    for _ in range(steps):
        mask = inside & (row < rows)
        dy = tl.load(grad_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
        n = x
        if LAYER:
            n -= tl.load(mean_ptr + row, mask=row < rows, other=0.0)
            db += dy
        dw += dy * n * tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        row += tl.num_programs(1)
    part_ptr += tl.program_id(1).to(tl.int64) * width
    tl.store(part_ptr + column, dw, mask=inside)
    if LAYER:
        tl.store(part_ptr + tl.num_programs(1).to(tl.int64) * width + column, db, mask=inside)


@triton.jit
def _columns(part_ptr, dw_ptr, db_ptr, parts, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of [parts, width] over parts, for BLOCK columns: of the weight's, then of the bias's."""
    out_ptr = dw_ptr
    if tl.program_id(1) == 1:
        out_ptr = db_ptr
    part_ptr += tl.program_id(1).to(tl.int64) * parts * width
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    at = row[:, None] * width + column[None, :]
    for k in range(0, parts, ROWS):
        mask = (k + row < parts)[:, None] & (column < width)[None, :]
        total += tl.load(part_ptr + at, mask=mask, other=0.0)
        at += ROWS * width
    tl.store(out_ptr + column, to_out(tl.sum(total, 0), out_ptr.dtype.element_ty), mask=column < width)


def _shape(width: int, widest: int) -> tuple[int, int]:
    """(rows of a program, elements of a block)."""
    block = min(next_power(width), widest)
    rows = max(1, _TILE // 2 // block) if block < width or block <= _TILE // 2 else 1
    rows = 1 if block < width else rows
    return rows, block


def normed(
    a: torch.Tensor,
    b: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    narrow: bool,
    layer: bool,
) -> tuple[tuple[torch.Tensor | None, ...], Launch]:
    """((sum, y, mean, rstd), launch). layer: of a LayerNorm; an RMSNorm has no mean and no bias."""
    a = a.contiguous()
    if b is not None and b.dtype != a.dtype:
        wider = torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(wider), b.to(wider)
    b = b.contiguous() if b is not None else None
    width = a.shape[-1]
    count = a.numel() // max(1, width)
    summed = torch.empty_like(a) if b is not None else None
    y = torch.empty_like(a)
    mean = a.new_empty((*a.shape[:-1], 1), dtype=torch.float32) if layer else None
    rstd = a.new_empty((*a.shape[:-1], 1), dtype=torch.float32)
    rows, block = _shape(width, _WIDEST_FORWARD)
    warps = 8 if block == 8192 else max(4, min(32, block * rows // 512))
    if block < width:
        block, warps = _TILE, 8
    constants = {
        "ADD": b is not None,
        "LAYER": layer,
        "BIAS": bias is not None,
        "NARROW": narrow and a.dtype != torch.float32,
        "ROWS": rows,
        "BLOCK": block,
        "WHOLE": block >= width,
    }
    own = bias.contiguous() if bias is not None else None
    args = (a, b, weight.contiguous(), own, summed, y, mean, rstd, count, width, float(eps))
    launch = Launch(_forward, (ceil_div(count, rows),), args, constants, warps, narrow=4 * rows)
    return (summed, y, mean, rstd), launch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, narrow: bool) -> Prepared:
    (_, y, _, rstd), launch = normed(x, None, weight, None, eps, narrow, False)
    return (y, rstd), (launch,)


def add_rms_norm(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, eps: float, narrow: bool
) -> Prepared:
    (summed, y, _, rstd), launch = normed(a, b, weight, None, eps, narrow, False)
    return (summed, y, rstd), (launch,)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> Prepared:
    (_, *result), launch = normed(x, None, weight, bias, eps, False, True)
    return tuple(result), (launch,)


def add_layer_norm(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> Prepared:
    result, launch = normed(a, b, weight, bias, eps, False, True)
    return result, (launch,)


def _gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    more: torch.Tensor | None,
) -> tuple[tuple[torch.Tensor, ...], list[Launch]]:
    """((dx, dw, db with a mean), launches)."""
    grad, x, weight, rstd = (t.contiguous() for t in (grad, x, weight, rstd))
    mean = mean.contiguous() if mean is not None else None
    more = more.contiguous() if more is not None else None
    width = x.shape[-1]
    count = x.numel() // max(1, width)
    layer = mean is not None
    dx = torch.empty_like(x)
    sums = [torch.empty_like(weight) for _ in range(1 + layer)]
    grid: tuple[int, ...]
    flags: dict[str, Any] = {"LAYER": layer, "MORE": more is not None}
    if width <= _WIDEST_BACKWARD:
        rows, block = _shape(width, _WIDEST_BACKWARD)
        resident = max(1, _RESIDENT // (rows * block)) * multiprocessors(x.device)
        parts = max(1, min(resident, ceil_div(count, rows)))
        part = x.new_empty((1 + layer, parts, width), dtype=torch.float32)
        full = (grad, x, mean, rstd, weight, more, dx, part, count, width, ceil_div(count, rows * parts))
        constants = {**flags, "ROWS": rows, "BLOCK": block}
        launches = [Launch(_backward, (parts,), full, constants, max(4, block // 1024), 4 * rows)]
    else:
        parts = max(1, min(2 * multiprocessors(x.device), count))
        part = x.new_empty((1 + layer, parts, width), dtype=torch.float32)
        wide = (grad, x, mean, rstd, weight, more, dx, width)
        launches = [Launch(_backward_wide, (count,), wide, {**flags, "BLOCK": _TILE}, 8, 2)]
        columns = (grad, x, mean, rstd, part, count, width, ceil_div(count, parts))
        grid = (ceil_div(width, 1024), parts)
        launches.append(Launch(_columns_wide, grid, columns, {"LAYER": layer, "BLOCK": 1024}, 4, 2))
    grid = (ceil_div(width, 8), len(sums))
    launches.append(
        Launch(_columns, grid, (part, sums[0], sums[-1], parts, width), {"ROWS": 256, "BLOCK": 8}, 4, 2)
    )
    return (dx, *sums), launches


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, more: torch.Tensor | None
) -> Prepared:
    return _gradients(grad, x, None, rstd, weight, more)


def layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    more: torch.Tensor | None,
) -> Prepared:
    return _gradients(grad, x, mean, rstd, weight, more)
