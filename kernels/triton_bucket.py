"""Launches of `kernels/bucket.py`, one per tensor; every element is read once and written once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from autoshard.kernels.bucket import check_bucket, check_parts
from autoshard.kernels.lang import to_out
from autoshard.kernels.launch import Launch, Prepared, ceil_div

_BLOCK = 4096


@triton.jit
def _copy(  # type: ignore[no-untyped-def]
    from_ptr,
    to_ptr,
    start,
    stop,
    size,
    from_stride,
    to_stride,
    scale,
    BLOCK: tl.constexpr,
):
    """BLOCK elements of a row of ``size``. start, stop: where rows begin on either side."""
    way = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(from_ptr + way * from_stride + start + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(to_ptr + way * to_stride + stop + at, to_out(x * scale, to_ptr.dtype.element_ty), mask=mask)


def _launch(
    source: torch.Tensor,
    target: torch.Tensor,
    starts: tuple[int, int],
    size: int,
    ways: int,
    strides: tuple[int, int],
    scale: float,
) -> Launch:
    args = (source, target, *starts, size, *strides, float(scale))
    return Launch(_copy, (ceil_div(size, _BLOCK), ways), args, {"BLOCK": _BLOCK}, 8)


def bucket_pack(tensors: Sequence[torch.Tensor], ways: int, dtype: torch.dtype, scale: float) -> Prepared:
    check_parts(tensors, ways)
    sizes = [t.numel() // ways for t in tensors]
    total = sum(sizes)
    out = tensors[0].new_empty((ways, total), dtype=dtype)
    launches = [
        _launch(t.contiguous(), out, (0, end - n), n, ways, (n, total), scale)
        for t, n, end in zip(tensors, sizes, accumulate(sizes), strict=True)
    ]
    return out, launches


def bucket_unpack(bucket: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype, scale: float) -> Prepared:
    check_bucket(bucket, sizes)
    bucket = bucket.contiguous()
    ways, total = bucket.shape
    out = bucket.new_empty(ways * total, dtype=dtype)
    launches = [
        _launch(bucket, out, (end - n, (end - n) * ways), n, ways, (total, n), scale)
        for n, end in zip(sizes, accumulate(sizes), strict=True)
    ]
    return out, launches
