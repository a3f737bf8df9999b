"""Launches of `kernels/vocab_ce.py`: logits are read once for the statistics, once for the gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from autoshard.kernels.lang import to_out
from autoshard.kernels.launch import Launch, Prepared, ceil_div, next_power

#: logits of a piece of a row
_LANES = 1024


@triton.jit
def _piece(logit_ptr, at, columns):  # type: ignore[no-untyped-def]
    """BLOCK logits of a row, -inf behind its end."""
    return tl.load(logit_ptr + at, mask=at < columns, other=-float("inf")).to(tl.float32)


@triton.jit
def _counted(x, at, columns):  # type: ignore[no-untyped-def]
    """What logits add to their sum."""
    return tl.where(at < columns, x, 0.0)


@triton.jit
def _stats(  # type: ignore[no-untyped-def]
    logit_ptr, target_ptr, out_ptr, columns, stride, offset, BLOCK: tl.constexpr
):
    """The four numbers of one row. Each lane keeps a maximum and sums of its own, so that lanes wait for each
    other only at the end; four pieces at a time, which makes five exponentials of four logits."""
    row = tl.program_id(0).to(tl.int64)
    logit_ptr += row * stride
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, 4 * BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = _piece(logit_ptr, at, columns)
        b = _piece(logit_ptr, at + BLOCK, columns)
        c = _piece(logit_ptr, at + 2 * BLOCK, columns)
        d = _piece(logit_ptr, at + 3 * BLOCK, columns)
        higher = tl.maximum(top, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
        # lanes of which nothing is finite so far have no place to measure from
        base = tl.where(higher == -float("inf"), 0.0, higher)
        sums = sums * tl.exp(top - base) + (
            (tl.exp(a - base) + tl.exp(b - base)) + (tl.exp(c - base) + tl.exp(d - base))
        )
        total += (_counted(a, at, columns) + _counted(b, at + BLOCK, columns)) + (
            _counted(c, at + 2 * BLOCK, columns) + _counted(d, at + 3 * BLOCK, columns)
        )
        top = higher
    most = tl.max(top, 0)
    base = tl.where(most == -float("inf"), 0.0, most)
    lse = base + tl.log(tl.sum(sums * tl.exp(top - base), 0))
    # inf - inf is no number, but the sum is infinite
    lse = tl.where(most == float("inf"), float("inf"), lse)
    local = tl.load(target_ptr + row) - offset
    inside = (local >= 0) & (local < columns)
    picked = tl.load(logit_ptr + tl.where(inside, local, 0), mask=inside, other=0.0).to(tl.float32)
    out_ptr += row * 4
    tl.store(out_ptr, lse)
    tl.store(out_ptr + 1, 1.0)
    tl.store(out_ptr + 2, picked)
    tl.store(out_ptr + 3, tl.sum(total, 0))


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    grad_ptr,
    logit_ptr,
    target_ptr,
    lse_ptr,
    out_ptr,
    columns,
    stride,
    ignore_index,
    offset,
    share,
    smoothing,
    BLOCK: tl.constexpr,
):
    """BLOCK gradients of one row. share: of the smoothing that every word gets."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < columns
    x = tl.load(logit_ptr + row * stride + at, mask=mask, other=0.0).to(tl.float32)
    target = tl.load(target_ptr + row)
    scale = tl.where(target == ignore_index, 0.0, tl.load(grad_ptr + row).to(tl.float32))
    value = tl.exp(x - tl.load(lse_ptr + row)) - share
    value += tl.where(at == target - offset, smoothing - 1.0, 0.0)
    tl.store(out_ptr + row * columns + at, to_out(value * scale, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _merge(stat_ptr, out_ptr, rows, ways, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Statistics of BLOCK rows from all shards, read twice."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    at = stat_ptr + row.to(tl.int64) * 4
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    odd = tl.zeros((BLOCK,), tl.int32)
    for way in range(ways):
        m = tl.load(at + way * rows * 4, mask=mask, other=-float("inf"))
        top = tl.maximum(top, m)
        odd = odd | (m != m).to(tl.int32)
    top = tl.where(odd != 0, float("nan"), top)
    sums = tl.zeros((BLOCK,), tl.float32)
    picked = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for way in range(ways):
        one = at + way * rows * 4
        m = tl.load(one, mask=mask, other=0.0)
        finite = tl.abs(m) < float("inf")
        sums += tl.load(one + 1, mask=mask, other=0.0) * tl.where(finite, tl.exp(m - top), 0.0)
        picked += tl.load(one + 2, mask=mask, other=0.0)
        total += tl.load(one + 3, mask=mask, other=0.0)
    to = out_ptr + row.to(tl.int64) * 4
    tl.store(to, top, mask=mask)
    tl.store(to + 1, sums, mask=mask)
    tl.store(to + 2, picked, mask=mask)
    tl.store(to + 3, total, mask=mask)


def _rows(logits: torch.Tensor) -> torch.Tensor:
    """Logits whose rows lie in one piece each."""
    return logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()


def _block(columns: int) -> tuple[int, int]:
    """(elements of a block, warps)."""
    block = min(4096, max(128, next_power(columns)))
    return block, 8 if block >= 2048 else 4


def xent_stats(logits: torch.Tensor, target: torch.Tensor, offset: int) -> Prepared:
    logits = _rows(logits)
    n, v = logits.shape
    out = logits.new_empty((n, 4), dtype=torch.float32)
    block = min(_LANES, max(128, next_power(ceil_div(v, 4))))
    args = (logits, target.contiguous(), out, v, logits.stride(0), offset)
    return out, (Launch(_stats, (n,), args, {"BLOCK": block}, narrow=6),)


def xent_merge(stacked: torch.Tensor) -> Prepared:
    ways, n, _ = stacked.shape
    out = stacked.new_empty((n, 4))
    args = (stacked.contiguous(), out, n, ways)
    return out, (Launch(_merge, (ceil_div(n, 128),), args, {"BLOCK": 128}, narrow=64),)


def xent_part_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    vocabulary: int,
    offset: int,
) -> Prepared:
    logits = _rows(logits)
    n, v = logits.shape
    out = torch.empty((n, v), dtype=logits.dtype, device=logits.device)
    block, warps = _block(v)
    share = float(label_smoothing) / vocabulary
    tensors = (grad.contiguous(), logits, target.contiguous(), lse.contiguous(), out)
    args = (*tensors, v, logits.stride(0), ignore_index, offset, share, float(label_smoothing))
    # rows in the slower dim of the grid, which holds 65535
    launches = [
        Launch(
            _backward, (ceil_div(v, block), min(n - k, 65535)), _from_row(args, k), {"BLOCK": block}, warps, 3
        )
        for k in range(0, n, 65535)
    ]
    return out, launches


def _from_row(args: tuple[object, ...], row: int) -> tuple[object, ...]:
    """Arguments of a launch that starts at a row: tensors without the rows before it."""
    return tuple(a[row:] if isinstance(a, torch.Tensor) and row else a for a in args)
