"""Launches of `kernels/quant.py`.

Bytes moved, of n elements of b bytes: b n + bits/8 n + 4 n / group, in either direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from autoshard.kernels.lang import rint, to_out
from autoshard.kernels.launch import Launch, Prepared, aligned, ceil_div
from autoshard.kernels.quant import (
    check_float,
    check_format,
    check_wires,
    limit_of,
    payload_bytes,
    wire_bytes,
)

#: elements of a program
_TILE = 4096


@triton.jit
def _quantise(  # type: ignore[no-untyped-def]
    x_ptr,
    code_ptr,
    scale_ptr,
    numel,
    code_stride,
    scale_stride,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """ROWS groups of one wire. Strides: from wire to wire, in bytes and in fp32."""
    way = tl.program_id(1).to(tl.int64)
    groups = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    x_ptr += way * numel
    code_ptr += way * code_stride
    scale_ptr += way * scale_stride
    count = (numel + GROUP - 1) // GROUP
    if BITS == 8:
        at = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(x_ptr + at, mask=at < numel, other=0.0).to(tl.float32)
        size = tl.abs(x)
        odd = tl.sum((size < float("inf")).to(tl.int32), 1) < GROUP
        scale, inverse = scale_of(tl.max(size, 1), odd, LIMIT)
        q = code(x, inverse, odd, LIMIT)
        tl.store(code_ptr + at, q.to(tl.int8), mask=groups[:, None] < count)
    else:
        HALF: tl.constexpr = GROUP // 2
        column = tl.arange(0, HALF)[None, :]
        at = groups[:, None] * GROUP + column
        low = tl.load(x_ptr + at, mask=at < numel, other=0.0).to(tl.float32)
        high = tl.load(x_ptr + at + HALF, mask=at + HALF < numel, other=0.0).to(tl.float32)
        finite = (tl.abs(low) < float("inf")) & (tl.abs(high) < float("inf"))
        odd = tl.sum(finite.to(tl.int32), 1) < HALF
        scale, inverse = scale_of(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1), odd, LIMIT)
        a = code(low, inverse, odd, LIMIT).to(tl.int32)
        b = code(high, inverse, odd, LIMIT).to(tl.int32)
        both = (a & 15) | ((b & 15) << 4)
        tl.store(code_ptr + groups[:, None] * HALF + column, both.to(tl.uint8), mask=groups[:, None] < count)
    tl.store(scale_ptr + groups, scale, mask=groups < count)


@triton.jit
def scale_of(top, odd, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """(scale as stored, its inverse) of groups whose largest size is ``top``; odd: not finite."""
    scale = top * (1.0 / LIMIT)
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
    inverse = tl.where((scale > 0) & (odd == 0), tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)
    return tl.where(odd, float("nan"), scale), inverse


@triton.jit
def code(x, inverse, odd, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whole numbers, as fp32."""
    q = tl.where(odd[:, None], 0.0, x) * inverse[:, None]
    return rint(tl.minimum(tl.maximum(q, -LIMIT), LIMIT))


@triton.jit
def _dequantise(  # type: ignore[no-untyped-def]
    code_ptr,
    scale_ptr,
    out_ptr,
    numel,
    code_stride,
    scale_stride,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
):
    """ROWS groups of one wire."""
    way = tl.program_id(1).to(tl.int64)
    groups = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    code_ptr += way * code_stride
    out_ptr += way * numel
    valid = groups[:, None] * GROUP < numel
    scale = tl.load(scale_ptr + way * scale_stride + groups, mask=groups * GROUP < numel, other=0.0)[:, None]
    if BITS == 8:
        at = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        q = tl.load(code_ptr + at, mask=valid, other=0).to(tl.float32)
        tl.store(out_ptr + at, to_out(q * scale, out_ptr.dtype.element_ty), mask=at < numel)
    else:
        HALF: tl.constexpr = GROUP // 2
        column = tl.arange(0, HALF)[None, :]
        both = tl.load(code_ptr + groups[:, None] * HALF + column, mask=valid, other=0).to(tl.int32)
        low = ((both << 28) >> 28).to(tl.float32) * scale
        high = ((both << 24) >> 28).to(tl.float32) * scale
        at = groups[:, None] * GROUP + column
        tl.store(out_ptr + at, to_out(low, out_ptr.dtype.element_ty), mask=at < numel)
        tl.store(out_ptr + at + HALF, to_out(high, out_ptr.dtype.element_ty), mask=at + HALF < numel)


@triton.jit
def _copy_out(  # type: ignore[no-untyped-def]
    code_ptr,
    scale_ptr,
    out_ptr,
    start,
    size,
    out_start,
    code_stride,
    scale_stride,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
):
    """What ROWS groups of one rank's wire have of one parameter. start: of its part within the wire."""
    way = tl.program_id(1).to(tl.int64)
    groups = start // GROUP + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    code_ptr += way * code_stride
    out_ptr += way * size + out_start - start
    end = start + size
    valid = groups * GROUP < end
    scale = tl.load(scale_ptr + way * scale_stride + groups, mask=valid, other=0.0)[:, None]
    if BITS == 8:
        at = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        q = tl.load(code_ptr + at, mask=valid[:, None], other=0).to(tl.float32)
        tl.store(out_ptr + at, to_out(q * scale, out_ptr.dtype.element_ty), mask=(at >= start) & (at < end))
    else:
        HALF: tl.constexpr = GROUP // 2
        column = tl.arange(0, HALF)[None, :]
        both = tl.load(code_ptr + groups[:, None] * HALF + column, mask=valid[:, None], other=0).to(tl.int32)
        low = to_out(((both << 28) >> 28).to(tl.float32) * scale, out_ptr.dtype.element_ty)
        high = to_out(((both << 24) >> 28).to(tl.float32) * scale, out_ptr.dtype.element_ty)
        at = groups[:, None] * GROUP + column
        tl.store(out_ptr + at, low, mask=(at >= start) & (at < end))
        at += HALF
        tl.store(out_ptr + at, high, mask=(at >= start) & (at < end))


def rows_of(group: int) -> int:
    """Groups of a program."""
    return max(1, _TILE // group)


def parts_of(wires: torch.Tensor, numel: int, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of wires [ways, bytes], as views of the buffer that start at the first ones."""
    flat = wires.reshape(-1)
    end = payload_bytes(numel, bits, group)
    codes = flat.view(torch.int8) if bits == 8 else flat
    return codes, flat.view(torch.float32)[end // 4 :]


def quantise_rows(x: torch.Tensor, bits: int, group: int) -> Prepared:
    check_format(bits, group)
    check_float(x.dtype)
    ways, numel = x.shape
    size, end = wire_bytes(numel, bits, group), payload_bytes(numel, bits, group)
    wire = x.new_empty((ways, size), dtype=torch.uint8)
    used = end + ceil_div(numel, group) * 4
    if used < size:
        wire[:, used:] = 0
    codes, scales = parts_of(wire, numel, bits, group)
    rows = rows_of(group)
    constants = {"ROWS": rows, "GROUP": group, "BITS": bits, "LIMIT": float(limit_of(bits))}
    grid = (ceil_div(numel, rows * group), ways)
    args = (aligned(x), codes, scales, numel, size, size // 4)
    return wire, (Launch(_quantise, grid, args, constants, narrow=4),)


def quantise(x: torch.Tensor, bits: int, group: int) -> Prepared:
    wire, launches = quantise_rows(x.reshape(1, -1), bits, group)
    return wire[0], launches


def dequantise_rows(wires: torch.Tensor, numel: int, bits: int, group: int, dtype: torch.dtype) -> Prepared:
    check_wires(wires, numel, bits, group)
    check_float(dtype)
    wires = aligned(wires)
    ways, size = wires.shape
    out = wires.new_empty((ways, numel), dtype=dtype)
    codes, scales = parts_of(wires, numel, bits, group)
    rows = rows_of(group)
    constants = {"ROWS": rows, "GROUP": group, "BITS": bits}
    grid = (ceil_div(numel, rows * group), ways)
    args = (codes, scales, out, numel, size, size // 4)
    return out, (Launch(_dequantise, grid, args, constants, narrow=4),)


def dequantise(wire: torch.Tensor, numel: int, bits: int, group: int, dtype: torch.dtype) -> Prepared:
    out, launches = dequantise_rows(wire.unsqueeze(0), numel, bits, group, dtype)
    return out[0], launches


def dequantise_copy_out(
    wires: torch.Tensor, sizes: Sequence[int], bits: int, group: int, dtype: torch.dtype
) -> Prepared:
    """One launch per parameter; accesses are wide where its part starts at a multiple of 16 elements."""
    numel = sum(sizes)
    check_wires(wires, numel, bits, group)
    check_float(dtype)
    wires = aligned(wires)
    ways, size = wires.shape
    out = wires.new_empty(ways * numel, dtype=dtype)
    codes, scales = parts_of(wires, numel, bits, group)
    rows = rows_of(group)
    constants = {"ROWS": rows, "GROUP": group, "BITS": bits}
    launches = []
    for n, end in zip(sizes, accumulate(sizes), strict=True):
        start = end - n
        groups = ceil_div(end, group) - start // group if n else 0
        args = (codes, scales, out, start, n, start * ways, size, size // 4)
        launches.append(Launch(_copy_out, (ceil_div(groups, rows), ways), args, constants, narrow=4))
    return out, launches
