"""The launch of `kernels/quant_reduce.py`: every wire is read once, the sum is written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from autoshard.kernels.lang import to_out
from autoshard.kernels.launch import Launch, Prepared, aligned, ceil_div
from autoshard.kernels.quant import check_float, check_wires
from autoshard.kernels.triton_quant import parts_of

#: bits of codes that a program reads of each wire
_TILE = 16384


@triton.jit
def _reduce(  # type: ignore[no-untyped-def]
    code_ptr,
    scale_ptr,
    out_ptr,
    numel,
    ways,
    code_stride,
    scale_stride,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
):
    """ROWS groups of the sum."""
    groups = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows = groups * GROUP < numel
    valid = rows[:, None]
    if BITS == 8:
        at = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        total = tl.zeros((ROWS, GROUP), tl.float32)
        for _ in range(ways):
            scale = tl.load(scale_ptr + groups, mask=rows, other=0.0)[:, None]
            total += tl.load(code_ptr + at, mask=valid, other=0).to(tl.float32) * scale
            code_ptr += code_stride
            scale_ptr += scale_stride
        tl.store(out_ptr + at, to_out(total, out_ptr.dtype.element_ty), mask=at < numel)
    else:
        HALF: tl.constexpr = GROUP // 2
        column = tl.arange(0, HALF)[None, :]
        low = tl.zeros((ROWS, HALF), tl.float32)
        high = tl.zeros((ROWS, HALF), tl.float32)
        for _ in range(ways):
            scale = tl.load(scale_ptr + groups, mask=rows, other=0.0)[:, None]
            both = tl.load(code_ptr + groups[:, None] * HALF + column, mask=valid, other=0).to(tl.int32)
            low += ((both << 28) >> 28).to(tl.float32) * scale
            high += ((both << 24) >> 28).to(tl.float32) * scale
            code_ptr += code_stride
            scale_ptr += scale_stride
        at = groups[:, None] * GROUP + column
        tl.store(out_ptr + at, to_out(low, out_ptr.dtype.element_ty), mask=at < numel)
        tl.store(out_ptr + at + HALF, to_out(high, out_ptr.dtype.element_ty), mask=at + HALF < numel)


def dequantise_reduce(wires: torch.Tensor, numel: int, bits: int, group: int, dtype: torch.dtype) -> Prepared:
    check_wires(wires, numel, bits, group)
    check_float(dtype)
    wires = aligned(wires)
    ways, size = wires.shape
    out = wires.new_empty(numel, dtype=dtype)
    codes, scales = parts_of(wires, numel, bits, group)
    rows = max(1, _TILE // (bits * group))
    constants = {"ROWS": rows, "GROUP": group, "BITS": bits}
    args = (codes, scales, out, numel, ways, size, size // 4)
    return out, (Launch(_reduce, (ceil_div(numel, rows * group),), args, constants, narrow=8),)
